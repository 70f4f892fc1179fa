"""Sockets and TLS of a service's processes."""
