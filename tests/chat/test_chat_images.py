"""Images in bodies of chat completions: their parsed form, and refusals that name the field."""

import json
from typing import Any

import pytest

from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import ChatModel
from agentloop.chat.fields import read_body
from agentloop.chat.openai import conversation_of, read_chat, to_call
from agentloop.chat.openai_bodies import TokenizeBody
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.images import ImageRef, data_url
from agentloop.parsers.by_name import get_parser
from tests.support.records.vision_folder import picture

RED, BLUE = picture(20, 20), picture(90, 50, (1, 2, 200))
SEEING = ChatModel(get_parser("hermes"), 100, takes_images=True)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(url: str = data_url(RED), **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def data_of(*messages: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", "messages": list(messages)}).encode()


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_parts_become_a_message_and_its_images():
    cache = BodyCache()
    tool = {"role": "tool", "tool_call_id": "c", "content": [image(data_url(BLUE), detail="low"), text(" shot")]}
    data = data_of(user(text("Compare "), image(), image(data_url(BLUE)), text("a"), text("b")), tool)
    for _ in range(2):  # parsed, then found in the cache
        call = to_call(read_chat(data, cache), SEEING)
        first, second = call.messages
        assert (first.content, second.content) == ("Compare ab", " shot")
        assert first.images == (ImageRef(RED.sha256, 8), ImageRef(BLUE.sha256, 8))
        assert (second.role, second.tool_call_id, second.images) == ("tool", "c", (ImageRef(BLUE.sha256, 0),))
        assert call.images == (RED, BLUE)
    # Texts without an image are still joined as lines.
    plain = to_call(read_chat(data_of(user(text("a"), text("b"))), cache), SEEING)
    assert (plain.messages[0].content, plain.images) == ("a\nb", ())


@pytest.mark.parametrize(
    ("message", "error", "param"),
    [
        (user(text("?"), image("https://example.org/a.png")), UnsupportedParameter, "messages.1.content.1"),
        (user(image("file:///etc/passwd")), UnsupportedParameter, "messages.1.content.0"),
        (user(image("data:image/png;base64,AAAA")), InvalidRequest, "messages.1.content.0"),
        (user({"type": "image_url"}), InvalidRequest, "messages.1.content.0.image_url"),
        (user({"type": "image_url", "image_url": "x"}), InvalidRequest, "messages.1.content.0.image_url"),
        ({"role": "system", "content": [image()]}, UnsupportedParameter, "messages.1.content.0"),
        ({"role": "assistant", "content": [text("a"), image()]}, UnsupportedParameter, "messages.1.content.1"),
    ],
)
def test_what_is_wrong_with_an_image_is_told_at_its_part(message, error, param):
    with pytest.raises(error) as refused:
        to_call(read_chat(data_of(user(text("Hi")), message), BodyCache()), SEEING)
    assert refused.value.param == param


def test_a_model_without_vision_refuses_the_part():
    cache, blind = BodyCache(), ChatModel(get_parser("hermes"), 100)
    data = data_of(user(text("Hi")), user(text("?"), image()))
    for _ in range(2):
        with pytest.raises(UnsupportedParameter, match="takes no images") as refused:
            to_call(read_chat(data, cache), blind)
        assert refused.value.param == "messages.1.content.1"


def test_images_are_tokenized_in_sessions_only():
    body = read_body(json.dumps({"messages": [user(image())]}).encode(), TokenizeBody)
    with pytest.raises(UnsupportedParameter) as refused:
        conversation_of(body.messages or (), None)
    assert refused.value.param == "messages.0.content.0"


def test_what_is_kept_of_a_message_has_the_size_of_its_images():
    request = read_chat(data_of(user(image())), BodyCache())
    assert request.messages[0].num_bytes > len(RED.data)
