"""Messages to token ids and back: template, tokenizer, and the bridge between turns."""

from __future__ import annotations

from agentloop.rendering.renderer import OnUnstable, Renderer, off_loop
from agentloop.rendering.tokenizer import TextDecoder

__all__ = ["OnUnstable", "Renderer", "TextDecoder", "off_loop"]
