"""Logs, metrics and trace context."""
