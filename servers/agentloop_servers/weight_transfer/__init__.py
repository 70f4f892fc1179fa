"""Weights from a trainer to every engine worker, beside the served ones. What is exported here needs no torch."""
