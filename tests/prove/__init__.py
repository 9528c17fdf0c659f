"""The proof: ``make prove``."""
