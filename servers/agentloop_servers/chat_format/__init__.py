"""The chat format of a model folder: its renderer and parser, chosen, built and tested as a config says."""
