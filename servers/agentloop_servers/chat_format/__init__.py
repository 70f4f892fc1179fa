"""The chat format of a model folder: its renderer and parser, chosen, built and tested as a config says."""

from __future__ import annotations

from agentloop_servers.chat_format.load import ChatFormat, load_chat_format

__all__ = ["ChatFormat", "load_chat_format"]
