"""``nixl-offload gc``: brings shared tiers down to a size and an age."""
