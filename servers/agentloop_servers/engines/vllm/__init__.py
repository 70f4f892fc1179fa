"""The adapter that implements the Engine interface with vLLM."""
