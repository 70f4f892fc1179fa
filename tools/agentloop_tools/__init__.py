"""The service's tools, one per module. Each module docstring describes the isolation that the tool provides."""
