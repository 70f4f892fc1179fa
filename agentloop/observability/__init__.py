"""Logging, metrics and trace context."""
