"""``nixl-offload check``: proves each tier on this machine."""
