"""Runs each trajectory in a separate process, so that user code can harm only its own trajectory."""
