"""Messages to token ids and back: template, tokenizer, and the bridge between turns."""

from __future__ import annotations

from agentloop.rendering.bridge_check import examine
from agentloop.rendering.port import NAMED_ROLES, NO_KWARGS, ModelFacts, Renderer, TokenText, TurnEnd
from agentloop.rendering.prompt_text import PromptText, TemplateForm, masked_tool, thought_marks
from agentloop.rendering.renderer import (
    ModelText,
    OnUnstable,
    RenderSettings,
    TemplateRenderer,
    model_text,
    off_loop,
)
from agentloop.rendering.template import ChatTemplate
from agentloop.rendering.tokenizer import TextDecoder, Tokens

__all__ = [
    "NAMED_ROLES",
    "NO_KWARGS",
    "ChatTemplate",
    "ModelFacts",
    "ModelText",
    "OnUnstable",
    "PromptText",
    "RenderSettings",
    "Renderer",
    "TemplateForm",
    "TemplateRenderer",
    "TextDecoder",
    "TokenText",
    "Tokens",
    "TurnEnd",
    "examine",
    "masked_tool",
    "model_text",
    "off_loop",
    "thought_marks",
]
