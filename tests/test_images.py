"""Images as received, as stored in messages, among token ids, and as files."""

import base64

import pytest

from agentloop.errors import InvalidRequest, TemplateError, UnsupportedParameter
from agentloop.images import (
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    ImageFiles,
    ImageRef,
    ImageSpan,
    ImageTokens,
    data_url,
    each_once,
    expanded,
    image_of,
    parts_of,
    read_image,
    shifted_images,
    shown,
)
from tests.support.records.vision_folder import picture

RED, WIDE = picture(20, 20), picture(40, 10, kind="JPEG")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_data_url_is_its_image(kind):
    image = picture(8, 8, kind=kind)
    assert read_image(data_url(image)) == image
    assert data_url(image).startswith(f"data:image/{kind.lower()};base64,")
    # The bytes determine the type, not the URL.
    assert read_image("DATA:text/plain;base64," + base64.b64encode(image.data).decode()) == image


@pytest.mark.parametrize(
    ("url", "error", "reason"),
    [
        ("http://169.254.169.254/latest", UnsupportedParameter, "not fetched"),
        ("https://example.org/a.png", UnsupportedParameter, "not fetched"),
        ("a.png", UnsupportedParameter, "not fetched"),
        ("file:///etc/passwd", UnsupportedParameter, "local image files are not supported here"),
        ("data:image/png;base64", InvalidRequest, "the data URL of an image must"),
        ("data:image/png,abc", InvalidRequest, "the data URL of an image must"),
        ("data:image/png;base64,!!!!", InvalidRequest, "not valid base64"),
        ("data:image/png;base64,é", InvalidRequest, "not valid base64"),
        ("data:image/png;base64,aGVsbG8=", InvalidRequest, "an image must be a PNG"),
        ("data:image/png;base64,", InvalidRequest, "an image must be a PNG"),
        ("data:image/png;base64," + "A" * (MAX_IMAGE_BYTES * 4 // 3 + 8), InvalidRequest, "more than"),
    ],
)
def test_what_is_no_image_is_refused(url, error, reason):
    with pytest.raises(error, match=reason):
        read_image(url)


def test_local_files_are_read_within_their_roots_only(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root, other):
        folder.mkdir()
        (folder / "a b.png").write_bytes(RED.data)
    (root / "link.png").symlink_to(other / "a b.png")
    assert read_image(f"file://{root}/a%20b.png", [root]) == RED
    assert read_image(f"file://localhost{root}/../root/a b.png", [other, root]) == RED
    for path in (other / "a b.png", root / ".." / "other" / "a b.png", root / "link.png"):
        with pytest.raises(InvalidRequest, match="not in a folder"):
            read_image(f"file://{path}", [root])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_image(f"file://{root}/none.png", [root])
    with pytest.raises(InvalidRequest, match="must not have the host"):
        read_image("file://elsewhere/a.png", [root])


def test_a_message_gives_back_its_parts():
    parts = ["one ", RED, WIDE, "two", RED]
    content, refs = shown(parts)
    assert content == "one two"
    assert parts_of(content, refs) == [
        "one ",
        ImageRef(RED.sha256, 4),
        ImageRef(WIDE.sha256, 4),
        "two",
        ImageRef(RED.sha256, 7),
    ]
    assert parts_of(*shown([RED])) == [ImageRef(RED.sha256, 0)]
    assert parts_of(*shown(["a", "", "b"])) == ["ab"]
    assert parts_of("", ()) == []


def test_there_are_so_many_images_at_most():
    assert each_once([RED, WIDE, RED]) == (RED, WIDE)
    each_once([RED] * MAX_IMAGES)
    with pytest.raises(InvalidRequest, match="more than"):
        each_once([RED] * (MAX_IMAGES + 1))


def test_tokens_take_the_place_of_placeholders():
    small, large = ImageTokens(9, (5, 9, 9, 6)), ImageTokens(9, (5, 6))
    ids, spans = expanded([1, 9, 2, 9, 9], [("a", small), ("b", large), ("a", small)])
    assert ids == [1, 5, 9, 9, 6, 2, 5, 6, 5, 9, 9, 6]
    assert spans == (ImageSpan("a", 1, 5), ImageSpan("b", 6, 8), ImageSpan("a", 8, 12))
    assert shifted_images(spans, -6) == (ImageSpan("b", 0, 2), ImageSpan("a", 2, 6))
    for ids, images in (([1, 2], [("a", small)]), ([9, 9], [("a", small)]), ([9], [("a", small), ("b", large)])):
        with pytest.raises(TemplateError, match="the chat template rendered"):
            expanded(ids, images)


async def test_files_are_named_by_their_hash_and_written_once(tmp_path):
    files = ImageFiles(tmp_path / "images")
    await files.keep([])
    assert not (tmp_path / "images").exists()
    await files.keep([RED, WIDE])
    path = tmp_path / "images" / RED.sha256
    written_at = path.stat().st_mtime_ns
    await files.keep([RED])
    assert path.stat().st_mtime_ns == written_at
    assert sorted(one.name for one in path.parent.iterdir()) == sorted([RED.sha256, WIDE.sha256])
    assert image_of(path.read_bytes()) == RED


def test_a_file_that_is_too_large_is_refused():
    with pytest.raises(InvalidRequest, match="the maximum is"):
        image_of(RED.data + bytes(MAX_IMAGE_BYTES))
