"""API dialects of the chat endpoint: OpenAI Chat Completions, Completions and Responses, and Anthropic Messages."""
