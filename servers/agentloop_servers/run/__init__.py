"""The locks and the store of a run directory."""
