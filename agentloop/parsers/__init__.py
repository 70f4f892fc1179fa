"""Sampled turns to tool calls: one file a model family, one function to pick it."""
