"""Dialects of the chat endpoint: OpenAI chat and completions, Responses, Anthropic messages, and vLLM tokens."""
