"""The slab tier: one preallocated file per rank on a local drive."""
