"""The HTTP dialects and control routes of vLLM's and SGLang's own servers."""
