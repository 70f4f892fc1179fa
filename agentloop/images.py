"""Images of conversations: how they come in, how messages hold them, the tokens that show them, and their files.

An image is known by the SHA-256 of its file. Messages and records name it; its bytes travel beside them and are
kept once, in a file of that name. Nothing is fetched from the network, and nothing here decodes a picture: the
engine does, and refuses what it cannot read.

A chat template writes one placeholder token for an image. Which tokens stand there in its place only the engine's
processor knows, so it is asked for them (`ImageTokens`) before anything is sampled. From then on a prompt is what
the model reads, token for token: the ids of prompts, records and later turns all have the tokens themselves.
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
"""Of one image's file."""

MAX_IMAGES = 64
"""Images that one conversation may show."""

MAX_IMAGE_URL_CHARS = MAX_IMAGE_BYTES * 4 // 3 + 128
"""Of a data URL with the largest image."""

IMAGES_FOLDER = "images"
"""The folder of a run directory that has the images of its records."""

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class Image:
    """An image file as it was given, with its SHA-256 as 64 hex digits: its name everywhere."""

    sha256: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image within a message: it stands before character `at` of the content."""

    sha256: str
    at: int = 0


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens `[start, end)` that stand for an image; offsets are into the list they describe."""

    sha256: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of one image: `token_ids` take the place of the template's `placeholder`."""

    placeholder: int
    token_ids: tuple[int, ...]


def image_of(data: bytes) -> Image:
    """Return the image of a file's bytes. Raises InvalidRequest if too large, or no PNG, JPEG, WebP or GIF."""
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequest(f"an image of {len(data)} bytes; at most {MAX_IMAGE_BYTES} are taken")
    media_type(data)
    return Image(sha256(data).hexdigest(), data)


def media_type(data: bytes) -> str:
    """Return the media type by a file's first bytes. Raises InvalidRequest for none of the four."""
    for signature, kind in _SIGNATURES.items():
        if data.startswith(signature) and (kind != "webp" or data[8:12] == b"WEBP"):
            return f"image/{kind}"
    raise InvalidRequest("an image is a PNG, JPEG, WebP or GIF file")


def read_image(url: str, roots: Sequence[Path] = ()) -> Image:
    """Return the image of a `data:` URL, or of a `file:` URL within one of `roots`.

    Raises InvalidRequest for bytes that are no image, and UnsupportedParameter for another URL: none is fetched.
    """
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return image_of(_data_of(url))
    if scheme == "file" and roots:
        return image_of(_file_of(url, roots))
    if scheme == "file":
        raise UnsupportedParameter("local files are not read here: send the image as a data URL")
    raise UnsupportedParameter("images are not fetched: send the image as a data URL (data:image/png;base64,...)")


def data_url(image: Image) -> str:
    """Return the image's `data:` URL, as `read_image` reads it."""
    return f"data:{media_type(image.data)};base64,{base64.b64encode(image.data).decode()}"


def _data_of(url: str) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("a data URL of an image is data:image/...;base64,...")
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise InvalidRequest(f"an image of more than {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"a data URL that is not base64: {error}") from error


def _file_of(url: str, roots: Sequence[Path]) -> bytes:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise InvalidRequest("a file URL names a file of this host: file:///path")
    path = Path(unquote(parts.path)).resolve()  # links may not lead out of the roots
    if not any(path.is_relative_to(root.resolve()) for root in roots):
        raise InvalidRequest("the file is in none of the folders that images may come from")
    try:
        with path.open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"the image cannot be read: {error.strerror}") from error


# --- messages ---------------------------------------------------------------------------------------------


def shown(parts: Iterable[str | Image]) -> tuple[str, tuple[ImageRef, ...]]:
    """Return content and images of a message with texts and images side by side."""
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
    """Return a message's texts and images in their order, as `shown` took them. Neighbouring texts are one, and
    none is empty."""
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
    """Return the images without repeats. Raises InvalidRequest for more than `MAX_IMAGES`, repeats counted."""
    found: dict[str, Image] = {}
    for count, image in enumerate(images, start=1):
        if count > MAX_IMAGES:
            raise InvalidRequest(f"more than {MAX_IMAGES} images", param="messages")
        found[image.sha256] = image
    return tuple(found.values())


# --- tokens -----------------------------------------------------------------------------------------------


def expanded(
    ids: Sequence[int], images: Sequence[tuple[str, ImageTokens]]
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Put images' tokens where their placeholders stand: return the ids, and the span of each image among them.

    `images` are (sha256, tokens) in the order they are shown. Takes linear time. Raises TemplateError unless the
    template has written exactly one placeholder for each.
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
            f"the chat template shows {num_found} images where the messages have {len(images)}", param="messages"
        )
    return out, tuple(spans)


def shifted_images(spans: Iterable[ImageSpan], offset: int) -> tuple[ImageSpan, ...]:
    """Return a list's spans as those of a longer list that begins `offset` earlier, without negative ones."""
    moved = (ImageSpan(span.sha256, span.start + offset, span.end + offset) for span in spans)
    return tuple(span for span in moved if span.start >= 0)


# --- files ------------------------------------------------------------------------------------------------


class ImageFiles:
    """The images of a run's records: one file each, named by its hash. Several processes may write one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def keep(self, images: Sequence[Image]) -> None:
        """Store these images in the folder. Raises OSError if the disk fails."""
        if images:
            await asyncio.to_thread(self.write, images)

    def lacks(self, sha256: str) -> bool:
        """Tell if an image is not in the folder."""
        return not (self._folder / sha256).exists()

    def write(self, images: Sequence[Image]) -> None:
        """Do what `keep` does, in this thread."""
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
