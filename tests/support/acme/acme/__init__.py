"""A package that extends agentloop by its entry points alone."""
