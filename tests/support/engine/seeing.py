"""A simulated engine that accepts images: an image is one token per hundred bytes of its file, between delimiters.

Its delimiters and its placeholder are those of `vision_folder.py`; as there, the placeholder is in every image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentloop.engine.interface import EngineInfo, OnProgress
from agentloop.errors import InvalidRequest
from agentloop.images import Image, ImageTokens
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.simulation.engine import SimulatedEngine
from agentloop.types import GenerateRequest, Generation
from agentloop.values.capabilities import Feature
from tests.support.records.vision_folder import PLACEHOLDER


class SeeingEngine(SimulatedEngine):
    """Records its requests; an image that is not a PNG is refused."""

    def __init__(self, renderer: TemplateRenderer, **options: object) -> None:
        super().__init__(**options)
        self._mark, self._placeholder = renderer.ids("<fake_token_around_image>" + PLACEHOLDER)
        self.asked: list[str] = []
        self.requests: list[GenerateRequest] = []

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, features=super().info.features | {Feature.IMAGES})

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        self.asked += [image.sha256 for image in images]
        return tuple(map(self._tokens, images))

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        self.requests.append(request)
        return await super().generate(request, on_progress)

    def _tokens(self, image: Image) -> ImageTokens:
        if not image.data.startswith(b"\x89PNG"):
            raise InvalidRequest("the model's processor cannot process the image", param="images")
        seen = (self._placeholder,) * (1 + len(image.data) // 100)
        return ImageTokens(self._placeholder, (self._mark, *seen, self._mark))
