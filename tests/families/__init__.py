"""The table of model families: every family on every kind of tier, whole and damaged: ``python -m tests.families``."""
