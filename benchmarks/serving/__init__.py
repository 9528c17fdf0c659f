"""``make bench-serving``: what each way of keeping KV makes of a server's day, at a GPU's pace, without a GPU."""
