"""Dialects of the chat endpoint: OpenAI chat and completions, Responses, and Anthropic messages."""

from __future__ import annotations

from agentloop.chat import anthropic, openai, openai_completions, responses
from agentloop.chat.anthropic_bodies import CountTokensBody, MessagesBody
from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import CallKey, ChatCall, ChatModel, ChatResult, ToolChoice
from agentloop.chat.logprobs import TokenTexts
from agentloop.chat.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from agentloop.chat.responses_bodies import ResponsesBody
from agentloop.chat.sampling import template_kwargs

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
    "ToolChoice",
    "anthropic",
    "openai",
    "openai_completions",
    "read_body",
    "responses",
    "template_kwargs",
]
