"""The ways of a chunk between KV blocks, or a host slot, and storage: a generator each, which yields while it waits."""
