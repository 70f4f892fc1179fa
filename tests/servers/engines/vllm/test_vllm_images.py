"""Images on real vLLM (CPU), proved against transformers: its processor's ids, and its model's logprobs.

The model is Idefics3, tiny and random (`vision_folder.py`). Its image tokens include many copies of the token that
a template writes for an image, so code that searches a prompt for that token fails here.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as Picture

from agentloop.chat.call import ChatCall
from agentloop.engine.interface import WeightUpdate
from agentloop.errors import InvalidRequest
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.images import Image, ImageSpan, shown
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.sessions.session import Session
from agentloop.types import GenerateRequest, Generation, Message, PauseMode, SamplingParams
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.contract.vllm_case import vllm_config
from tests.support.endpoint.sessions import key, make_session
from tests.support.records.vision_folder import CONTEXT_TOKENS, PLACEHOLDER, picture, write_vision_folder

pytestmark = [pytest.mark.engine, pytest.mark.long]

SAME = 1e-2  # absolute difference of logprobs, all in float32: below 0.002 on CPU, 0.003 on a GPU
RED, BLUE = picture(112, 112, (220, 20, 20)), picture(112, 112, (20, 20, 220))
WIDE = picture(168, 40, (20, 200, 20), "JPEG")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one model, with different weights in every tensor."""
    made = [write_vision_folder(tmp_path_factory.mktemp("vision") / f"v{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(made):
        write_weights(folder, seed)
    return made


@pytest.fixture(scope="module")
def renderer(folders: list[Path]) -> TemplateRenderer:
    return TemplateRenderer.from_directory(folders[0])


@pytest.fixture(scope="module")
async def engine(folders: list[Path]) -> AsyncIterator[VllmEngine]:
    made = VllmEngine(vllm_config(folders[0], max_model_len=CONTEXT_TOKENS, max_num_seqs=8))
    await made.start()
    yield made
    await made.close()


def write_weights(folder: Path, seed: int) -> None:
    """Write random weights that are large enough for the output to depend on every input."""
    torch.manual_seed(seed)
    model = transformers.Idefics3ForConditionalGeneration(transformers.AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)


class Reference:
    """transformers on the same folder."""

    def __init__(self, folder: Path) -> None:
        self.processor = transformers.Idefics3Processor(
            transformers.Idefics3ImageProcessorPil.from_pretrained(folder),
            transformers.AutoTokenizer.from_pretrained(folder),
            image_seq_len=4,
        )
        model = transformers.Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()

    def inputs(self, text: str, images: Sequence[Image]) -> Any:
        pictures = [Picture.open(io.BytesIO(image.data)).convert("RGB") for image in images]
        return self.processor(text=text, images=pictures, return_tensors="pt", add_special_tokens=False)

    def logprobs(self, token_ids: Sequence[int], images: Sequence[Image]) -> np.ndarray:
        """Return the logprob of each id given the ids before it; 0 for the first."""
        seen = self.inputs(PLACEHOLDER * len(images), images)
        with torch.inference_mode():
            logits = self.model(
                torch.tensor([list(token_ids)]),
                pixel_values=seen["pixel_values"],
                pixel_attention_mask=seen["pixel_attention_mask"],
            ).logits[0]
        chosen = torch.log_softmax(logits.float(), dim=-1)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])
        return np.concatenate([[0.0], chosen[:, 0].numpy()])


def new_session(engine: VllmEngine, renderer: TemplateRenderer) -> Session:
    placer = ImagePlacer(takes_images=True)
    sizes = {"max_context_tokens": CONTEXT_TOKENS, "vocab_size": renderer.vocab_size}
    return make_session(engine, renderer=renderer, placer=placer, **sizes)


def asks(*parts: str | Image) -> Message:
    content, images = shown(parts)
    return Message("user", content, images=images)


def call(messages: Sequence[Message], *images: Image, seed: int = 0) -> ChatCall:
    return ChatCall(tuple(messages), SamplingParams(1, seed=seed), max_tokens=10, images=images)


async def prompt_of(
    engine: VllmEngine, renderer: TemplateRenderer, image: Image
) -> tuple[tuple[int, ...], ImageSpan]:
    """Return a prompt with one image, and the position of the image."""
    ids = renderer.render([asks("What is ", image, "?")], [])
    (tokens,) = await engine.image_tokens([image])
    at = ids.index(tokens.placeholder)
    whole = (*ids[:at], *tokens.token_ids, *ids[at + 1 :])
    return whole, ImageSpan(image.sha256, at, at + len(tokens.token_ids))


async def sampled(
    engine: VllmEngine, name: str, ids: Sequence[int], *images: tuple[ImageSpan, Image], num_tokens: int = 4
) -> Generation:
    return await engine.generate(
        GenerateRequest(
            name,
            tuple(ids),
            SamplingParams(num_tokens, seed=3),
            images=tuple(span for span, _ in images),
            image_data=tuple(image for _, image in images),
        )
    )


async def test_a_conversation_is_what_transformers_reads(engine, renderer, folders):
    session, reference = new_session(engine, renderer), Reference(folders[0])
    first = [Message("system", "You see."), asks("Look: ", RED, " and ", WIDE, "\nWhich is red?")]
    one = await session.call(call(first, RED, WIDE), key("one"))
    asked = renderer.text(first, [])
    assert list(one.prompt_ids) == reference.inputs(asked, [RED, WIDE])["input_ids"][0].tolist()

    second = [*first, one.choices[0].reply.message, asks("And this? ", BLUE, RED)]
    two = await session.call(call(second, RED, WIDE, BLUE), key("two"))
    assert two.choices[0].parent_id == one.choices[0].node_id

    (path,) = session.trajectory().paths
    ids = [*path.prompt_ids.tolist(), *path.response_ids.tolist()]
    assert [span.sha256 for span in path.images] == [image.sha256 for image in (RED, WIDE, BLUE, RED)]
    tokens = await engine.image_tokens([RED, WIDE, BLUE, RED])
    assert [tuple(ids[span.start : span.end]) for span in path.images] == [one.token_ids for one in tokens]
    recomputed = reference.logprobs(ids, [RED, WIDE, BLUE, RED])[len(path.prompt_ids) :]
    mask = path.response_mask
    assert mask.sum() == sum(turn.end - turn.start for turn in path.turns)
    assert np.abs(recomputed - path.logprobs)[mask].max() < SAME
    blind = reference.logprobs(ids, [BLUE, WIDE, BLUE, RED])[len(path.prompt_ids) :]
    assert np.abs(blind - path.logprobs)[mask].max() > 10 * SAME  # the images affect the logprobs
    # For the second turn, the images of the first turn were in the KV cache.
    assert two.choices[0].reply.cached_tokens > path.images[1].end


async def test_images_of_equal_size_have_equal_ids_and_share_no_kv(engine, renderer):
    red_ids, red_at = await prompt_of(engine, renderer, RED)
    blue_ids, blue_at = await prompt_of(engine, renderer, BLUE)
    assert red_ids == blue_ids
    first = await sampled(engine, "red", red_ids, (red_at, RED))
    other = await sampled(engine, "blue", blue_ids, (blue_at, BLUE))
    again = await sampled(engine, "red again", red_ids, (red_at, RED))
    block = engine.info.block_size
    assert other.cached_tokens <= red_at.start < block < again.cached_tokens
    assert again.logprobs == pytest.approx(first.logprobs, abs=SAME)
    assert max(abs(a - b) for a, b in zip(first.logprobs, other.logprobs, strict=True)) > 10 * SAME


async def test_a_placeholder_that_was_sampled_moves_no_image(engine, renderer):
    ids, span = await prompt_of(engine, renderer, RED)
    placeholder = (await engine.image_tokens([RED]))[0].placeholder
    plain = await sampled(engine, "plain", (7, *ids), (replace(span, start=span.start + 1, end=span.end + 1), RED))
    moved = replace(span, start=span.start + 1, end=span.end + 1)
    before = await sampled(engine, "before", (placeholder, *ids), (moved, RED))
    blue = await sampled(engine, "before blue", (placeholder, *ids), (replace(moved, sha256=BLUE.sha256), BLUE))
    assert before.logprobs != plain.logprobs  # an ordinary token
    assert max(abs(a - b) for a, b in zip(before.logprobs, blue.logprobs, strict=True)) > 10 * SAME


async def test_what_cannot_be_shown_is_refused(engine, renderer):
    ids, span = await prompt_of(engine, renderer, RED)
    broken = Image("0" * 64, RED.data[:40])
    with pytest.raises(InvalidRequest, match="cannot process the image") as refused:
        await engine.image_tokens([broken])
    assert refused.value.param == "images"
    with pytest.raises(InvalidRequest, match="are not the tokens of image"):
        await sampled(engine, "other", ids, (replace(span, sha256=WIDE.sha256), WIDE))
    with pytest.raises(InvalidRequest, match="did not come"):
        await engine.generate(GenerateRequest("none", ids, SamplingParams(1), images=(span,)))
    assert (await sampled(engine, "after", ids, (span, RED))).token_ids


async def test_what_stands_before_an_image_is_shared_and_the_image_is_not(engine, renderer):
    text = [11 + number % 90 for number in range(2 * engine.info.block_size)]
    ids, span = await prompt_of(engine, renderer, RED)
    shown_at = replace(span, start=span.start + len(text), end=span.end + len(text))
    for number, image in enumerate((RED, BLUE)):
        seen = replace(shown_at, sha256=image.sha256)
        answer = await sampled(engine, f"seen {number}", (*text, *ids, *text), (seen, image))
        assert answer.cached_tokens == number * len(text)


async def test_new_weights_see_with_their_own_vision(engine, renderer, folders):
    ids, span = await prompt_of(engine, renderer, RED)
    old = await sampled(engine, "old", ids, (span, RED))
    await engine.stage(WeightUpdate(1, directory=str(folders[1])))
    await engine.pause(PauseMode.KEEP)
    await engine.commit(1)
    await engine.resume()
    new = await sampled(engine, "new", ids, (span, RED))
    for generation, folder in ((old, folders[0]), (new, folders[1])):
        recomputed = Reference(folder).logprobs([*ids, *generation.token_ids], [RED])[len(ids) :]
        assert np.abs(recomputed - generation.logprobs).max() < SAME
