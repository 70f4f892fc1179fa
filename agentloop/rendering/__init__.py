"""Messages to token ids and back: template, tokenizer, and the bridge between turns."""

from __future__ import annotations

from agentloop.rendering.port import NO_KWARGS, ModelFacts, Renderer, TokenText, TurnEnd
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer, Thinking, off_loop
from agentloop.rendering.tokenizer import TextDecoder, Tokens

__all__ = [
    "NO_KWARGS",
    "ModelFacts",
    "OnUnstable",
    "RenderSettings",
    "Renderer",
    "TemplateRenderer",
    "TextDecoder",
    "Thinking",
    "TokenText",
    "Tokens",
    "TurnEnd",
    "off_loop",
]
