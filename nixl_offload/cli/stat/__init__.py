"""``nixl-offload stat``: one chunk, header and all."""
