"""Dialects of the chat endpoint: OpenAI chat and completions, Responses, Anthropic messages, and vLLM tokens."""

from __future__ import annotations

from agentloop.chat import anthropic, openai, openai_completions, responses, vllm_tokens
from agentloop.chat.anthropic_bodies import CountTokensBody, MessagesBody
from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import CallKey, ChatCall, ChatModel, ChatResult, ToolChoice
from agentloop.chat.logprobs import TokenTexts
from agentloop.chat.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from agentloop.chat.responses_bodies import ResponsesBody
from agentloop.chat.sampling import template_kwargs
from agentloop.chat.vllm_tokens import TokensBody

__all__ = [
    "BodyCache",
    "CallKey",
    "ChatBody",
    "ChatCall",
    "ChatModel",
    "ChatResult",
    "CompletionBody",
    "CountTokensBody",
    "DetokenizeBody",
    "MessagesBody",
    "ResponsesBody",
    "TokenTexts",
    "TokenizeBody",
    "TokensBody",
    "ToolChoice",
    "anthropic",
    "openai",
    "openai_completions",
    "read_body",
    "responses",
    "template_kwargs",
    "vllm_tokens",
]
