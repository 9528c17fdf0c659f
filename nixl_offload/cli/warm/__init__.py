"""``nixl-offload warm``: pulls chunks into a nearer tier."""
