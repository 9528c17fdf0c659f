"""``nixl-offload bench``: drives the tiers of a config with a model's shapes."""
