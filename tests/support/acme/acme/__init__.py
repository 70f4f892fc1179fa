"""A package that extends agentloop only through its entry points."""
