"""One way from a model folder and a service's `chat` settings to what reads and writes its conversations.

Workers, the endpoint and `agentloop doctor` all come through here, so that what a doctor says of a folder is what a
service does with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentloop.parsers import Parser, get_parser
from agentloop.rendering import OnUnstable, Renderer, RenderSettings, TemplateRenderer
from agentloop_servers.config import ChatSettings


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One model's way from messages to ids, and from sampled ids to messages."""

    renderer: Renderer
    parser: Parser


def load_chat_format(folder: Path, settings: ChatSettings) -> ChatFormat:
    """Build the chat format of a model folder. Raises InvalidRequest for a parser that there is not, and
    TemplateError for a template that cannot be used."""
    renderer = TemplateRenderer.from_directory(folder, RenderSettings(OnUnstable(settings.on_unstable_template)))
    return ChatFormat(renderer, get_parser(settings.parser))
