"""The table of model families: every family on every kind of tier, whole and damaged: ``make families``."""
