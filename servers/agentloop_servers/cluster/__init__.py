"""Hosts, the nodes of a Ray cluster, and the start of Ray's own processes."""
