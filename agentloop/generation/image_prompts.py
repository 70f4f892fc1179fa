"""Prompts with images: replaces a template's placeholder ids by the ids that the model reads.

A process has one `ImagePlacer`. All replicas serve the same model, so the tokens that one engine returns for an
image are valid for all; they are cached by the image's hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.generation.deadline import Deadline
from agentloop.generation.leased_engine import LeasedEngine
from agentloop.images import MAX_IMAGES, Image, ImageSpan, ImageTokens, expanded
from agentloop.types import GenerateRequest, IntArray, Message, SamplingParams

_MAX_REMEMBERED_TOKENS = 4 << 20
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ImageAsker:
    """The images of a call or a task, and the engine that is asked for their tokens."""

    images: Mapping[str, Image]  # by their hash
    engine: LeasedEngine
    request_id: str  # the next generation's
    deadline: Deadline | None = None


class ImagePlacer:
    """The tokens of images, as engines gave them. Lives on one event loop."""

    def __init__(self, *, takes_images: bool) -> None:
        """`takes_images`: the model sees them. If not, every image is refused."""
        self.takes_images = takes_images
        self._known: OrderedDict[str, tuple[int, IntArray]] = OrderedDict()  # placeholder, tokens
        self._num_tokens = 0

    async def place(
        self, ids: Sequence[int], messages: Sequence[Message], asker: ImageAsker, *, first_index: int = 0
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Return ids rendered from `messages` with the tokens of their images in place, and where each image is.

        `first_index` is the place of the first message in the conversation, for errors to name. Raises
        UnsupportedParameter or InvalidRequest naming the message of an image that cannot be shown, and
        TemplateError if the template does not show them.
        """
        placed = []
        for index, message in enumerate(messages, start=first_index):
            for ref in message.images:
                try:
                    placed.append((ref.sha256, await self._tokens(ref.sha256, ids, asker)))
                except InvalidRequest as error:
                    raise type(error)(error.message, param=f"messages.{index}.content") from error
        if len(placed) > MAX_IMAGES:
            raise InvalidRequest(f"the request has more than {MAX_IMAGES} images: send fewer", param="messages")
        return expanded(ids, placed) if placed else (list(ids), ())

    async def _tokens(self, name: str, ids: Sequence[int], asker: ImageAsker) -> ImageTokens:
        if (found := self._known.get(name)) is not None:
            self._known.move_to_end(name)
            return ImageTokens(found[0], tuple(found[1].tolist()))
        if not self.takes_images:
            raise UnsupportedParameter(
                "this service's model takes no images: send text, or serve a vision-language model"
            )
        if name not in asker.images:
            raise InvalidRequest(f"image {name} is referenced in the messages but was not uploaded")
        request = GenerateRequest(asker.request_id, tuple(ids), SamplingParams(max_tokens=1), timeout_s=_TIMEOUT_S)
        image = asker.images[name]
        (tokens,) = await asker.engine.image_tokens(request, (image,), deadline=asker.deadline)
        if name not in self._known:
            self._known[name] = tokens.placeholder, np.array(tokens.token_ids, np.int32)
            self._num_tokens += len(tokens.token_ids)
        while self._num_tokens > _MAX_REMEMBERED_TOKENS:
            _, (_, forgotten) = self._known.popitem(last=False)
            self._num_tokens -= len(forgotten)
        return tokens
