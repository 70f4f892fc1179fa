"""The chat format of a model folder: selection, construction and self-test of its renderer and parser."""
