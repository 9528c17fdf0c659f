"""Stores: named blobs in a bucket or under a shared directory, behind one small contract. See ``base``."""
