"""What the tiers of a config hold, looked at from outside: read-only, beside running servers, as a stream."""
