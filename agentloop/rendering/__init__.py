"""Messages to token ids and back: template, tokenizer, and the bridge between turns."""

from __future__ import annotations

from agentloop.rendering.renderer import OnUnstable, Renderer

__all__ = ["OnUnstable", "Renderer"]
