"""Transfers weights from a trainer to every engine worker, into staging memory. The exports need no torch."""
