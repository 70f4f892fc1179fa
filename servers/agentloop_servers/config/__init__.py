"""The configuration of a service."""
