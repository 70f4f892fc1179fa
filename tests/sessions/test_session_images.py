"""Conversations with images: prompts, records, matching, stored images and refusals."""

from pathlib import Path

import pytest

from agentloop.errors import InvalidRequest, TemplateError, UnsupportedParameter
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.images import MAX_IMAGES, Image, ImageFiles, shown
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.simulation.engine import SimulatedSpec
from agentloop.types import Message, SplitReason
from tests.support.endpoint.sessions import MemoryJournal, ask, key, make_session
from tests.support.engine.scripted import POLICY
from tests.support.engine.seeing import SeeingEngine
from tests.support.records.vision_folder import picture, write_vision_folder

RED, BLUE, JPEG = picture(20, 20), picture(90, 50, (1, 2, 200)), picture(8, 8, kind="JPEG")
SPEC = SimulatedSpec(vocab_size=299, max_context_tokens=2048)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer.from_directory(write_vision_folder(tmp_path_factory.mktemp("vision")))


@pytest.fixture
async def engine(renderer: TemplateRenderer):
    made = SeeingEngine(renderer, spec=SPEC)
    await made.start()
    yield made
    await made.close()


def seeing(renderer: TemplateRenderer, **parts: object) -> dict[str, object]:
    placer = ImagePlacer(takes_images=True)
    return {"renderer": renderer, "placer": placer, "vocab_size": 299, "max_context_tokens": 2048, **parts}


def looks(*parts: str | Image, role: str = "user", **fields: object) -> Message:
    content, refs = shown(parts)
    return Message(role, content, images=refs, **fields)


async def test_images_stand_as_their_tokens_in_every_prompt_and_record(engine, renderer, tmp_path):
    journal = MemoryJournal()
    session = make_session(
        engine, journal, **seeing(renderer, keep_image_files=ImageFiles(tmp_path / "images").keep)
    )
    first = looks("Compare ", RED, " and ", BLUE, ".")
    one = await session.call(ask(first, images=(RED, BLUE)), key("one"))
    said = one.choices[0].reply.message
    second = looks("And ", RED, "?")
    two = await session.call(ask(first, said, second, images=(RED, BLUE)), key("two"))
    assert engine.asked == [RED.sha256, BLUE.sha256]  # each one once
    assert two.choices[0].parent_id == one.choices[0].node_id

    red, blue = await engine.image_tokens([RED, BLUE])
    (path,) = session.trajectory().paths
    ids = (*path.prompt_ids.tolist(), *path.response_ids.tolist())
    assert [span.sha256 for span in path.images] == [RED.sha256, BLUE.sha256, RED.sha256]
    assert [ids[span.start : span.end] for span in path.images] == [red.token_ids, blue.token_ids, red.token_ids]
    assert not any(path.response_mask[span.start - len(path.prompt_ids) :][:1].any() for span in path.images[2:])
    # Without the images, the prompt equals the template's output.
    bare = list(path.prompt_ids)
    for span in reversed(path.images[:2]):
        bare[span.start : span.end] = [red.placeholder]
    assert bare == renderer.render([first], [])
    # The engine received exactly the ids of the record, and every image.
    for turn, request in zip(path.turns, engine.requests, strict=True):
        assert request.token_ids == ids[: turn.prompt_len]
        assert request.images == tuple(span for span in path.images if span.end <= turn.prompt_len)
        assert request.image_data == (RED, BLUE)
    assert {Path(file).name for file in (tmp_path / "images").iterdir()} == {RED.sha256, BLUE.sha256}

    # Another process continues from the journal.
    restored = journal.restored(session, engine, **seeing(renderer))
    said_again = two.choices[0].reply.message
    chat = ask(first, said, second, said_again, looks("Now?"), images=(RED, BLUE))
    three = await restored.call(chat, key("three"))
    assert three.prompt_ids[: len(ids)] == ids
    assert engine.requests[-1].images == path.images


async def test_another_image_is_another_history(engine, renderer):
    session = make_session(engine, **seeing(renderer))
    one = await session.call(ask(looks("Look: ", RED), images=(RED,)), key("one"))
    said = one.choices[0].reply.message
    two = await session.call(ask(looks("Look: ", BLUE), said, Message("user", "?"), images=(BLUE,)), key("two"))
    assert two.choices[0].split.reason is SplitReason.HISTORY_EDIT
    assert two.choices[0].parent_id is None
    assert RED.sha256[:8] in two.choices[0].split.detail
    # Spaces around the text are not a change, and they do not move the image.
    three = await session.call(ask(looks("  Look: ", RED), said, Message("user", "?"), images=(RED,)), key("three"))
    assert three.choices[0].parent_id == one.choices[0].node_id
    moved = await session.call(ask(looks(RED, "Look: "), said, Message("user", "?"), images=(RED,)), key("four"))
    assert moved.choices[0].parent_id is None


async def test_a_tool_answers_with_an_image(engine, renderer):
    session = make_session(engine, **seeing(renderer))
    answer = looks("A screenshot: ", RED, role="tool", tool_call_id="c1")
    result = await session.call(ask("Look.", answer, images=(RED,)), key("one"))
    assert [span.sha256 for span in result.choices[0].images] == [RED.sha256]


async def test_what_cannot_be_shown_leaves_no_trace(engine, renderer):
    session = make_session(engine, **seeing(renderer))
    with pytest.raises(InvalidRequest, match="cannot process the image") as refused:
        await session.call(ask("Hi", looks("Look: ", JPEG), images=(JPEG,)), key("one"))
    assert refused.value.param == "messages.1.content"
    with pytest.raises(InvalidRequest, match="was not uploaded"):
        await session.call(ask(looks("Look: ", RED)), key("two"))
    with pytest.raises(InvalidRequest, match="more than"):
        await session.call(ask(looks(*[RED] * (MAX_IMAGES + 1)), images=(RED,)), key("three"))
    assert (session.num_turns, session.calls) == (0, ())

    one = await session.call(ask(looks("Look: ", RED), images=(RED,)), key("four"))
    prompt_ids = (*one.prompt_ids, *one.choices[0].reply.token_ids.tolist())
    with pytest.raises(UnsupportedParameter, match="a raw prompt") as refused:
        await session.call(ask(prompt_ids=prompt_ids), key("five"))
    assert refused.value.param == "prompt"


async def test_a_model_without_vision_refuses(engine, renderer):
    session = make_session(engine, **seeing(renderer, placer=ImagePlacer(takes_images=False)))
    with pytest.raises(UnsupportedParameter, match="takes no images") as refused:
        await session.call(ask(looks("Look: ", RED), images=(RED,)), key("one"))
    assert refused.value.param == "messages.0.content"
    assert engine.asked == []


async def test_a_template_that_shows_no_images_is_refused(engine, renderer):
    blind = TemplateRenderer.from_directory(POLICY)
    session = make_session(engine, **seeing(blind, max_context_tokens=2048))
    with pytest.raises(TemplateError) as refused:
        await session.call(ask(looks("Look: ", RED), images=(RED,)), key("one"))
    assert refused.value.param in ("messages", None)
    assert session.num_turns == 0


async def test_text_that_spells_a_placeholder_shows_nothing(engine, renderer):
    session = make_session(engine, **seeing(renderer))
    chat = ask(looks("<image> is not ", RED, " <image>"), images=(RED,))
    result = await session.call(chat, key("one"))
    assert len(result.choices[0].images) == 1
    plain = await session.call(ask("<image>"), key("two"))
    assert plain.choices[0].images == ()
    assert renderer.ids("<image>")[0] not in plain.prompt_ids
