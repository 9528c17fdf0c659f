"""``make bench-scale``: costs by keys, requests and ranks in the scheduler's half, and 1,000 servers on one bucket."""
