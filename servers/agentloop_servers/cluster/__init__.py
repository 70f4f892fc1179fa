"""Hosts, the nodes of a Ray cluster, and Ray's own processes."""
