"""Images for vLLM: the model's processor processes each image alone, and the request's spans set its position.

vLLM itself searches the prompt for placeholder tokens and inserts the image tokens there. A policy can sample a
placeholder, which would shift all later images and change a sampled id. Here the processor gets a single
placeholder, and its result is the image's tokens, independent of position. Requests already contain these tokens,
which are checked.

vLLM's own caches of processed images are off: two processes keep mirrored caches that require the same order of
requests, but requests wait at the gate here and may be aborted before they reach the engine.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.images import Image, ImageTokens
from agentloop.types import GenerateRequest
from agentloop_servers.engines.common.process import one_line

MAX_PROCESSED_BYTES = 1 << 30
"""The size limit of the cache of processed images, which take about 20 times the bytes of their files."""


@dataclass(frozen=True, slots=True)
class _Processed:
    tokens: ImageTokens
    model_input: Any  # vLLM's MultiModalKwargsItem
    places: Any  # vLLM's PlaceholderRange, within the tokens
    num_bytes: int


class VllmImages:
    """An LRU cache of an engine's processed images, on one event loop."""

    def __init__(self, llm: Any) -> None:
        """`llm` is a started AsyncLLM."""
        self._llm = llm
        self._placeholder = _placeholder_of(llm)
        self._processed: OrderedDict[str, _Processed] = OrderedDict()
        self._num_bytes = 0

    @property
    def takes_images(self) -> bool:
        """True if the model has a single-token placeholder for an image."""
        return self._placeholder is not None

    async def tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        """Return the tokens of each image. Raises UnsupportedParameter and InvalidRequest."""
        return tuple([(await self._process(image)).tokens for image in images])

    async def prompt(self, request: GenerateRequest) -> Any:
        """Make vLLM's prompt with the request's images; None for a request without images.

        Raises InvalidRequest if the tokens of a span differ from the tokens of its image.
        """
        if not request.images:
            return None
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        data = {image.sha256: image for image in request.image_data}
        processed = {name: await self._process(image) for name, image in data.items()}
        shown = [processed[span.sha256] for span in request.images]
        for span, image in zip(request.images, shown, strict=True):
            if request.token_ids[span.start : span.end] != image.tokens.token_ids:
                raise InvalidRequest(
                    f"tokens [{span.start}, {span.end}) are not the tokens of image {span.sha256}: use the tokens"
                    " that the engine returned for it",
                    param="images",
                )
        places = [
            replace(image.places, offset=span.start + image.places.offset)
            for span, image in zip(request.images, shown, strict=True)
        ]
        return mm_input(
            list(request.token_ids),
            MultiModalKwargsItems({"image": [image.model_input for image in shown]}),
            {"image": [span.sha256 for span in request.images]},
            {"image": places},
        )

    async def _process(self, image: Image) -> _Processed:
        if self._placeholder is None:
            raise UnsupportedParameter("this model does not support images", param="images")
        if (cached := self._processed.get(image.sha256)) is not None:
            self._processed.move_to_end(image.sha256)
            return cached
        try:
            processed = await self._make(image, self._placeholder)
        except InvalidRequest:
            raise
        except Exception as error:  # Pillow, transformers and vLLM raise different exceptions for invalid images
            raise InvalidRequest(
                f"the model's processor cannot process the image: {one_line(error)}", param="images"
            ) from error
        if image.sha256 not in self._processed:
            self._processed[image.sha256] = processed
            self._num_bytes += processed.num_bytes
        while self._num_bytes > MAX_PROCESSED_BYTES:
            _, dropped = self._processed.popitem(last=False)
            self._num_bytes -= dropped.num_bytes
        return processed

    async def _make(self, image: Image, placeholder: int) -> _Processed:
        from vllm.inputs import TokensPrompt
        from vllm.multimodal.cache.base import MultiModalCache
        from vllm.multimodal.media.image import ImageMediaIO

        picture = await asyncio.to_thread(ImageMediaIO().load_bytes, image.data)
        alone = TokensPrompt(
            prompt_token_ids=[placeholder],
            multi_modal_data={"image": [picture]},
            multi_modal_uuids={"image": [image.sha256]},
        )
        (rendered,) = await self._llm.renderer.render_cmpl_async([alone], skip_mm_cache=True)
        ((places,), (model_input,)) = rendered["mm_placeholders"]["image"], rendered["mm_kwargs"]["image"]
        max_embeds = self._llm.input_processor.mm_encoder_cache_size
        if places.get_num_embeds() > max_embeds:
            raise InvalidRequest(
                f"the image has {places.get_num_embeds()} tokens: the engine's encoder cache holds {max_embeds};"
                " send a smaller image"
            )
        tokens = ImageTokens(placeholder, tuple(rendered["prompt_token_ids"]))
        return _Processed(tokens, model_input, places, MultiModalCache.get_item_size(model_input))


def _placeholder_of(llm: Any) -> int | None:
    """Return the token that the chat template inserts for an image; None if the model does not support images."""
    if not llm.model_config.supports_multimodal_inputs or llm.renderer.tokenizer is None:
        return None
    processor = llm.renderer.get_mm_processor()
    if not processor.info.allowed_mm_limits.get("image"):
        return None
    text = processor.dummy_inputs.get_dummy_text({"image": 1})
    ids = llm.renderer.tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
