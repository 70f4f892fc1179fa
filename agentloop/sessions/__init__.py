"""Sessions of the chat endpoint, without HTTP: calls, prompts, and the journal they write."""
