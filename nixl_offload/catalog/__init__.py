"""All decisions of the scheduler's half over the tiers in order: what to store where, what is there, who still uses it,
and what moves to a farther tier.
"""
