"""The vLLM engine behind the Engine port."""
