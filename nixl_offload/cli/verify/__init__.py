"""``nixl-offload verify``: reads and checks everything."""
