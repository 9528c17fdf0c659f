"""Links: how a rank reaches one tier, over that tier's mover. See ``base``."""
