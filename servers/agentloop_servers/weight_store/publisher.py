"""The publisher: new weights become a version in the store, a full one every so often and deltas in between.

One pass over the tensors: each is loaded, compared with the base chunk by chunk, compressed, hashed, and written to
the folder that is the next delta's base (`LocalVersions`). Memory is that of one tensor and of chunks. A version's
files are complete on this host before the first byte leaves it, and the pointer moves last: a kill leaves the old
version, and publishing the same number again writes over what was left.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentloop.client.publish import PublishOptions, PublishReport, TensorBytes
from agentloop.errors import InvalidRequest, LayoutMismatch
from agentloop_servers.weight_store.format import (
    CHECKSUMS,
    Bytes,
    DeltaEncoder,
    Encoding,
    Index,
    TensorFile,
    TensorForm,
    digest,
)
from agentloop_servers.weight_store.local_versions import LocalVersions
from agentloop_servers.weight_store.store import VersionStore, chain_of
from agentloop_servers.weight_transfer.checkpoint import DTYPES, READ_CHUNK_BYTES, inspect_checkpoint, read_header

SHARD_BYTES = 4 << 30  # of a checkpoint, in one file of a version
_CODES = {name: code for code, (name, _) in DTYPES.items()}
_DELTA = "delta"  # its folder beside the new version's files, until these have their name


@dataclass(frozen=True, slots=True)
class _Base:
    """A tensor of the base: its file, and where its bytes begin there."""

    path: Path
    at: int
    form: TensorForm


class VersionPublisher:
    """A `Publisher` (`agentloop/client/publish.py`) of one run."""

    def __init__(self, options: PublishOptions) -> None:
        """Raises InvalidRequest for options that cannot be."""
        try:
            self._encoding = Encoding(options.encoding)
        except ValueError as error:
            raise InvalidRequest(f"an encoding is one of {', '.join(Encoding)}", param="encoding") from error
        if options.checksum not in CHECKSUMS:
            raise InvalidRequest(f"a checksum is one of {', '.join(CHECKSUMS)}", param="checksum")
        self._options = options
        self._store = VersionStore(options.store, options.run)
        self._own = None if options.cache else Path(tempfile.mkdtemp(prefix="agentloop-publish-"))
        self._local = LocalVersions(Path(options.cache) if options.cache else self._own or Path())

    def publish(self, tensors: Sequence[TensorBytes] | Path, version: int) -> PublishReport:
        """Publish a version, and move the pointer to it. The tensors must not change until this returns.

        Raises PointerWentBack for a version that is not beyond the last one, LayoutMismatch for other tensors than
        that has, InvalidRequest, CheckpointUnreadable, StoreUnreachable, StoreRefused or StorageFull.
        """
        started_at = time.monotonic()
        given = tensors_of(tensors) if isinstance(tensors, Path) else list(tensors)
        forms = [TensorForm(one.name, _code_of(one), one.shape) for one in given]
        base_version = self._base_version(version)
        index = Index(version, {}, self._options.checksum, base_version, self._encoding)
        base: Mapping[str, _Base] = {}
        if base_version is not None:
            index = replace(index, base_index=digest(self._store.index(base_version).raw))
            base = _tensors_in(self._local.folder(self._store, base_version))
            _check_layout(forms, base, base_version)
        with self._local.making(version, base_version) as part:
            files, checksums = self._write(part, given, forms, base, index)
            encoded_at = time.monotonic()
            index = replace(index, files=files, content=digest("".join(sorted(checksums.values())).encode()))
            folder = part if base_version is None else part / _DELTA
            num_bytes = self._store.put(index, sorted(folder.glob("*.safetensors")))
            self._store.advance(version)
            shutil.rmtree(part / _DELTA, ignore_errors=True)
            self._local.keep(part, index.to_json())
        num_full = sum(math.prod(one.shape) * DTYPES[one.dtype][1] for one in forms)
        times_s = encoded_at - started_at, time.monotonic() - encoded_at
        return PublishReport(version, base_version, num_bytes, num_full, len(files), *times_s)

    def close(self) -> None:
        """Remove the folder of this process, if it is its own. Idempotent."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    # --- inside ---

    def _base_version(self, version: int) -> int | None:
        """Return the version that the next one is a delta to; None: it is a full one."""
        latest = self._store.latest_before(version)
        if latest is None:
            return None
        return latest if len(chain_of(self._store, latest)) < self._options.full_every else None

    def _write(
        self,
        part: Path,
        given: Sequence[TensorBytes],
        forms: Sequence[TensorForm],
        base: Mapping[str, _Base],
        index: Index,
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Write the checkpoint and, with a base, its delta. Returns files and checksums of what is published."""
        kind, is_delta = self._options.checksum, index.base_version is not None
        (part / _DELTA).mkdir()
        files: dict[str, str] = {}
        checksums: dict[str, str] = {}
        shards = list(_sharded(forms))
        for number, (first, end) in enumerate(shards, 1):
            name, own = f"model-{number:05d}-of-{len(shards):05d}.safetensors", forms[first:end]
            flat = [TensorForm(one.name, "U8", ()) for one in own]
            with ExitStack() as closing:
                whole = closing.enter_context(TensorFile(part / name, own, None if is_delta else kind))
                delta = closing.enter_context(TensorFile(part / _DELTA / name, flat, kind)) if is_delta else None
                for one, form in zip(given[first:end], own, strict=True):
                    self._write_tensor(one.load(), form, base.get(one.name), whole, delta)
            checksums |= (whole if delta is None else delta).checksums
            files |= dict.fromkeys((whole if delta is None else delta).checksums, name)
        return files, checksums

    def _write_tensor(
        self, data: Bytes, form: TensorForm, base: _Base | None, whole: TensorFile, delta: TensorFile | None
    ) -> None:
        state = CHECKSUMS[self._options.checksum]()
        encoder = None if delta is None else DeltaEncoder(self._encoding, len(data), delta.write)
        for new, old in _in_step(data, base):
            state.update(new)
            whole.write(new)
            if encoder is not None:
                encoder.add(old, new)
        if delta is None or encoder is None:
            whole.end(form.name, form.dtype, form.shape, state.hexdigest())
            return
        whole.end(form.name, form.dtype, form.shape)
        if encoder.has_changed:
            encoder.end()
            delta.end(form.name, "U8", None, state.hexdigest())
        else:
            delta.drop()


def _in_step(data: Bytes, base: _Base | None) -> Iterator[tuple[Bytes, Bytes]]:
    """Give a tensor's bytes in chunks, each with those of the base; without one, with none."""
    pieces = (data[start : start + READ_CHUNK_BYTES] for start in range(0, len(data), READ_CHUNK_BYTES))
    if base is None:
        yield from ((piece, piece[:0]) for piece in pieces)
        return
    buffer: Bytes = np.empty(READ_CHUNK_BYTES, np.uint8)
    with base.path.open("rb", buffering=0) as file:
        file.seek(base.at)
        for piece in pieces:
            file.readinto(memoryview(buffer)[: len(piece)])
            yield piece, buffer[: len(piece)]


def _sharded(forms: Sequence[TensorForm]) -> Iterator[tuple[int, int]]:
    """Give the ranges of tensors that are a file each, so that a host can fetch several at once."""
    first, num_bytes = 0, 0
    for at, form in enumerate(forms):
        size = math.prod(form.shape) * DTYPES[form.dtype][1]
        if num_bytes and num_bytes + size > SHARD_BYTES:
            yield first, at
            first, num_bytes = at, 0
        num_bytes += size
    yield first, len(forms)


def _code_of(tensor: TensorBytes) -> str:
    if (code := _CODES.get(tensor.dtype)) is None:
        raise InvalidRequest(f"tensor {tensor.name} is of {tensor.dtype}, not a float type", param="weights")
    return code


def _tensors_in(folder: Path) -> dict[str, _Base]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path)
        for name, entry in header.entries.items():
            form = TensorForm(name, entry.dtype, tuple(entry.shape))
            found[name] = _Base(path, header.data_at + entry.data_offsets[0], form)
    return found


def tensors_of(folder: Path) -> list[TensorBytes]:
    """Return the tensors of a checkpoint. Raises CheckpointUnreadable."""
    inspect_checkpoint(str(folder))

    def tensor(one: _Base) -> TensorBytes:
        dtype, size = DTYPES[one.form.dtype]
        num_bytes = size * math.prod(one.form.shape)
        return TensorBytes(
            one.form.name,
            dtype,
            one.form.shape,
            lambda: np.fromfile(one.path, np.uint8, num_bytes, offset=one.at),
        )

    return [tensor(one) for one in _tensors_in(folder).values()]


def _check_layout(forms: Sequence[TensorForm], base: Mapping[str, _Base], base_version: int) -> None:
    given = {one.name: one for one in forms}
    held = {name: one.form for name, one in base.items()}
    if given != held:
        first = next(name for name in (*given, *held) if given.get(name) != held.get(name))
        differs = f"tensor {first} is not as in version {base_version}: names, dtypes and shapes stay in a run"
        raise LayoutMismatch(differs, param="weights")
