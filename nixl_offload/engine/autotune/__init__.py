"""Compares movers and transfer paths at start and takes the fastest: ``plan`` decides, ``compare`` measures."""
