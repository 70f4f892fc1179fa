"""A store of published weight versions: full checkpoints and deltas in a directory or an object store."""
