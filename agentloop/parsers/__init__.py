"""Sampled turns to tool calls: one reader for all formats that are data, known or derived, and one for harmony."""
