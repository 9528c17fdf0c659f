"""Tiers that many servers write to: a bucket, a shared directory."""
