"""Images over HTTP: a conversation in a session, its prompts, its record and its files, and refusals."""

from pathlib import Path

import openai
import pytest

from agentloop.images import IMAGES_FOLDER, data_url
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.simulation.engine import SimulatedSpec
from agentloop.types import Trajectory
from tests.support.endpoint.chat_service import chat_service
from tests.support.engine.seeing import SeeingEngine
from tests.support.records.vision_folder import picture, write_vision_folder

RED = picture(20, 20)
SHOWN = {"type": "image_url", "image_url": {"url": data_url(RED)}}
ASKED = {"role": "user", "content": [{"type": "text", "text": "What is "}, SHOWN]}
SPEC = SimulatedSpec(vocab_size=299, max_context_tokens=2048)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer.from_directory(write_vision_folder(tmp_path_factory.mktemp("vision")))


async def test_a_client_shows_images(renderer: TemplateRenderer, tmp_path: Path):
    engine = SeeingEngine(renderer, spec=SPEC)
    async with chat_service(tmp_path, spec=SPEC, renderer=renderer, seeing=engine) as service:
        assert (await service.call("POST", "/sessions", json={"session_id": "s"}))[0] in (200, 201)
        base_url = f"{service.url}/sessions/s/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            one = await client.chat.completions.create(model="tiny", messages=[ASKED], max_tokens=5)
            said = {"role": "assistant", "content": one.choices[0].message.content}
            history = [ASKED, said, {"role": "user", "content": [SHOWN]}]
            body, render = {"model": "tiny", "messages": history}, "/v1/chat/completions/render"
            status, preview, _ = await service.call("POST", render, json={**body, "session": "s"})
            assert (status, preview["split_reason"]) == (200, None)
            two = await client.chat.completions.create(model="tiny", messages=history, max_tokens=5)
            assert two.usage.prompt_tokens == len(preview["prompt_token_ids"])
            status, _, _ = await service.call("POST", render, json=body)
            assert status == 400  # outside a session, the tokens of images are not requested

        session = await service.sessions.find("s", None)
        trajectory: Trajectory = session.trajectory()
        assert [span.sha256 for span in trajectory.path.images] == [RED.sha256] * 2
        assert engine.asked == [RED.sha256]
        assert (tmp_path / IMAGES_FOLDER / RED.sha256).read_bytes() == RED.data


async def test_responses_and_messages_show_images_too(renderer: TemplateRenderer, tmp_path: Path):
    source = {"type": "base64", "media_type": "image/png", "data": data_url(RED).partition(",")[2]}
    block, part = {"type": "image", "source": source}, {"type": "input_image", "image_url": data_url(RED)}
    text, called = {"type": "text", "text": "What is "}, {"id": "c", "name": "f"}
    turns = [
        {"role": "user", "content": [text, block]},
        {"role": "assistant", "content": [{"type": "tool_use", "input": {}, **called}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}]},
    ]
    items = [
        {"role": "user", "content": [{**text, "type": "input_text"}, part]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}},
        {"type": "function_call_output", "call_id": "c", "output": [part]},
    ]
    engine = SeeingEngine(renderer, spec=SPEC)
    async with chat_service(tmp_path, spec=SPEC, renderer=renderer, seeing=engine) as service:
        for session, path, body in (
            ("a", "responses", {"input": items, "max_output_tokens": 4}),
            ("b", "messages", {"messages": turns, "max_tokens": 4}),
        ):
            given = {"model": "tiny", "session": session, **body}
            status, answer, _ = await service.call("POST", f"/v1/{path}", json=given)
            assert status == 200, answer
            [shown] = (await service.sessions.find(session, None)).trajectory().paths
            assert [span.sha256 for span in shown.images] == [RED.sha256] * 2
            follow = {"model": "tiny", "input": "And now?", "previous_response_id": answer["id"]}
            if path == "responses":
                status, refused, _ = await service.call("POST", "/v1/responses", json=follow)
                assert (status, refused["error"]["param"]) == (400, "previous_response_id")


async def test_what_cannot_be_shown_is_a_400_that_names_the_part(tmp_path: Path):
    async with chat_service(tmp_path) as service:
        status, answer, _ = await service.call(
            "POST", "/v1/chat/completions", json={"model": "tiny", "messages": [ASKED]}
        )
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
        assert answer["error"]["param"] == "messages.0.content.1"
        task = {"task_id": "t", "messages": [{"role": "user", "content": "Hi"}, ASKED]}
        status, answer, _ = await service.call("POST", "/rollouts", json={"tasks": [task]})
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
        assert answer["error"]["param"] == "tasks.0.messages.1.content.1"
        assert not (tmp_path / IMAGES_FOLDER).exists()
