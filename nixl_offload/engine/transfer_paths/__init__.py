"""How batches travel between KV blocks, or host slots, and a tier: a generator for each path, which yields while it
waits.
"""
