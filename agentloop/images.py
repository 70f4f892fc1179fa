"""Images of conversations: reading them, references in messages, their tokens, and their files.

The id of an image is the SHA-256 of its file. Messages and records contain this id; the bytes are passed separately
and stored once, in a file with that name. Images are not fetched from the network and not decoded here: the engine
decodes them and refuses invalid ones.

A chat template renders one placeholder token per image. Only the engine's processor knows the tokens that replace
it, so they are requested (`ImageTokens`) before sampling. Token ids of prompts, records and later turns contain the
actual image tokens.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from agentloop.errors import InvalidRequest, TemplateError, UnsupportedParameter

MAX_IMAGE_BYTES = 16 << 20
"""The maximum size of an image file."""

MAX_IMAGES = 64
"""The maximum number of images per conversation."""

MAX_IMAGE_URL_CHARS = MAX_IMAGE_BYTES * 4 // 3 + 128
"""The maximum length of a data URL, for an image of MAX_IMAGE_BYTES."""

IMAGES_FOLDER = "images"
"""The folder in a run directory with the images of its records."""

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class Image:
    """An image file with its id, the SHA-256 as 64 hex digits."""

    sha256: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image in a message, located before character `at` of the content."""

    sha256: str
    at: int = 0


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The tokens `[start, end)` of an image in a list of token ids."""

    sha256: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of one image: `token_ids` replace the template's `placeholder`."""

    placeholder: int
    token_ids: tuple[int, ...]


def image_of(data: bytes) -> Image:
    """Return the image of a file's bytes.

    Raises InvalidRequest if it is too large or not PNG, JPEG, WebP or GIF.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequest(
            f"an image has {len(data)} bytes; the maximum is {MAX_IMAGE_BYTES}: send a smaller one"
        )
    media_type(data)
    return Image(sha256(data).hexdigest(), data)


def media_type(data: bytes) -> str:
    """Return the media type, determined by the first bytes. Raises InvalidRequest for other than the four types."""
    for signature, kind in _SIGNATURES.items():
        if data.startswith(signature) and (kind != "webp" or data[8:12] == b"WEBP"):
            return f"image/{kind}"
    raise InvalidRequest("an image must be a PNG, JPEG, WebP or GIF file")


def read_image(url: str, roots: Sequence[Path] = ()) -> Image:
    """Return the image of a `data:` URL, or of a `file:` URL within one of `roots`.

    Raises InvalidRequest for data that is not an image, and UnsupportedParameter for other URLs.
    """
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return image_of(_data_of(url))
    if scheme == "file" and roots:
        return image_of(_file_of(url, roots))
    if scheme == "file":
        raise UnsupportedParameter("local image files are not supported here: send the image as a data URL")
    raise UnsupportedParameter("images are not fetched: send the image as a data URL (data:image/png;base64,...)")


def data_url(image: Image) -> str:
    """Return the image as a `data:` URL."""
    return f"data:{media_type(image.data)};base64,{base64.b64encode(image.data).decode()}"


def _data_of(url: str) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("the data URL of an image must have the form data:image/...;base64,...")
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise InvalidRequest(f"an image has more than the maximum of {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the data URL of an image is not valid base64: {error}") from error


def _file_of(url: str, roots: Sequence[Path]) -> bytes:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise InvalidRequest(f"a file URL must not have the host {parts.netloc!r}: use file:///path")
    path = Path(unquote(parts.path)).resolve()  # resolve links, which must not lead out of the roots
    if not any(path.is_relative_to(root.resolve()) for root in roots):
        raise InvalidRequest("the image file is not in a folder from which images may be read")
    try:
        with path.open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"the image file cannot be read: {error.strerror}") from error


# Messages


def shown(parts: Iterable[str | Image]) -> tuple[str, tuple[ImageRef, ...]]:
    """Return the content and the image references of a message that consists of texts and images."""
    texts: list[str] = []
    refs: list[ImageRef] = []
    num_chars = 0
    for part in parts:
        if isinstance(part, Image):
            refs.append(ImageRef(part.sha256, num_chars))
        else:
            texts.append(part)
            num_chars += len(part)
    return "".join(texts), tuple(refs)


def parts_of(content: str, images: Sequence[ImageRef]) -> list[str | ImageRef]:
    """Return a message's texts and images in order, the inverse of `shown`.

    Adjacent texts are joined; none is empty.
    """
    parts: list[str | ImageRef] = []
    start = 0
    for ref in images:
        if ref.at > start:
            parts.append(content[start : ref.at])
            start = ref.at
        parts.append(ref)
    if start < len(content):
        parts.append(content[start:])
    return parts


def each_once(images: Iterable[Image]) -> tuple[Image, ...]:
    """Return the distinct images. Raises InvalidRequest for more than `MAX_IMAGES`, including duplicates."""
    distinct: dict[str, Image] = {}
    for count, image in enumerate(images, start=1):
        if count > MAX_IMAGES:
            raise InvalidRequest(
                f"the messages have more than the maximum of {MAX_IMAGES} images", param="messages"
            )
        distinct[image.sha256] = image
    return tuple(distinct.values())


# Tokens


def expanded(
    ids: Sequence[int], images: Sequence[tuple[str, ImageTokens]]
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Replace the placeholders by the images' tokens. Returns the token ids and the span of each image.

    `images` are pairs of sha256 and tokens in the order of the placeholders. Takes linear time. Raises
    TemplateError unless there is exactly one placeholder per image.
    """
    out: list[int] = []
    spans: list[ImageSpan] = []
    placeholders = {tokens.placeholder for _, tokens in images}
    num_found = 0
    for token_id in ids:
        if token_id not in placeholders:
            out.append(token_id)
            continue
        if num_found < len(images) and images[num_found][1].placeholder == token_id:
            sha, tokens = images[num_found]
            spans.append(ImageSpan(sha, len(out), len(out) + len(tokens.token_ids)))
            out.extend(tokens.token_ids)
        num_found += 1
    if num_found != len(images):
        raise TemplateError(
            f"the chat template rendered {num_found} image placeholders for {len(images)} images of the messages",
            param="messages",
        )
    return out, tuple(spans)


def shifted_images(spans: Iterable[ImageSpan], offset: int) -> tuple[ImageSpan, ...]:
    """Return the spans shifted by `offset`, without spans whose start becomes negative."""
    moved = (ImageSpan(span.sha256, span.start + offset, span.end + offset) for span in spans)
    return tuple(span for span in moved if span.start >= 0)


# Files


class ImageFiles:
    """The images of a run's records, one file per image, named by its id.

    Several processes may write one folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def keep(self, images: Sequence[Image]) -> None:
        """Store the images in the folder, in a thread. Raises OSError."""
        if images:
            await asyncio.to_thread(self.write, images)

    def lacks(self, sha256: str) -> bool:
        """Return True if an image is not in the folder."""
        return not (self._folder / sha256).exists()

    def write(self, images: Sequence[Image]) -> None:
        """Store the images in the folder, in this thread. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for image in images:
            path = self._folder / image.sha256
            if not path.exists():
                unfinished = self._folder / f".{image.sha256}.{secrets.token_hex(4)}"
                try:
                    with unfinished.open("wb") as file:
                        file.write(image.data)
                        os.fsync(file.fileno())
                    unfinished.replace(path)
                finally:
                    unfinished.unlink(missing_ok=True)
