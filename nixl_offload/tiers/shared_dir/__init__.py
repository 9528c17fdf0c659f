"""The shared-directory tier: one file per shard."""
