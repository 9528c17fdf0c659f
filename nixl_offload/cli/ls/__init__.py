"""``nixl-offload ls``: what is stored."""
