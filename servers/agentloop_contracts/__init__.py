"""The HTTP dialects and control verbs of vLLM's and SGLang's own servers."""
