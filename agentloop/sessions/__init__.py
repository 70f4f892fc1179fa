"""Sessions of the chat endpoint, independent of HTTP: calls, prompts and the journal."""
