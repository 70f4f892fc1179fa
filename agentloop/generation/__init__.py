"""One engine path: a turn sampled under a lease, continued, split, and read."""
