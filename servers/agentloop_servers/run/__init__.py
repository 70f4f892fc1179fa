"""The run directory: its locks and its store."""
