"""Sockets and TLS."""
