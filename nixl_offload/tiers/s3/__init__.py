"""The S3 tier: one object per shard."""
