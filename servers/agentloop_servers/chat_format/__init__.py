"""The chat format of a model folder: its renderer and parser, chosen, built and tested as a config says."""

from __future__ import annotations

from agentloop_servers.chat_format.load import (
    ChatFormat,
    ChosenFormat,
    load_chat_format,
    load_parser,
    load_renderer,
)

__all__ = ["ChatFormat", "ChosenFormat", "load_chat_format", "load_parser", "load_renderer"]
