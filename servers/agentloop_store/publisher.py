"""The publisher: stores new weights as a version, periodically a full one and deltas in between.

Each tensor is loaded once, compared with the base, compressed, hashed, and written to the local folder that is the
base of the next delta (`LocalVersions`), so memory is that of one tensor and its base. Invariants: a version's
files are complete on this host before any byte is uploaded, and the pointer moves last. A killed process leaves the
old version, and publishing the same number again overwrites the remains.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog

from agentloop.client.publish import PublishOptions, PublishReport, TensorBytes
from agentloop.errors import InvalidRequest, LayoutMismatch
from agentloop_servers.weight_transfer.checkpoint import DTYPES, Entry, inspect_checkpoint
from agentloop_store.format import (
    CHECKSUM,
    CHECKSUMS,
    Encoding,
    Index,
    StoredTensor,
    TensorFile,
    chunks,
    digest,
    encode_delta,
    stored_tensors,
)
from agentloop_store.local_versions import CopyDamaged, LocalVersions, verified
from agentloop_store.store import VersionStore, chain_of

_log = structlog.stdlib.get_logger(__name__)
SHARD_BYTES = 4 << 30  # maximum size of tensors in one file of a version
_CODES = {name: code for code, (name, _) in DTYPES.items()}
_DELTA = "delta"  # folder of the delta's files inside the new version's folder, until they are uploaded


class VersionPublisher:
    """The `Publisher` (`agentloop/client/publish.py`) of one run."""

    def __init__(self, options: PublishOptions) -> None:
        """Raises InvalidRequest for invalid options."""
        try:
            self._encoding = Encoding(options.encoding)
        except ValueError as error:
            raise InvalidRequest(
                f"unknown encoding {options.encoding!r}: expected one of {', '.join(Encoding)}", param="encoding"
            ) from error
        if options.checksum not in CHECKSUMS:
            raise InvalidRequest(
                f"unknown checksum {options.checksum!r}: expected one of {', '.join(CHECKSUMS)}", param="checksum"
            )
        self._options = options
        self._store = VersionStore(options.store, options.run)
        self._base_sums: Mapping[str, str] = {}  # checksums of the last version's tensors when they were written
        self._local = LocalVersions(Path(options.cache) if options.cache else _cache_of(self._store))

    def publish(self, tensors: Sequence[TensorBytes] | Path, version: int) -> PublishReport:
        """Publish a version, and move the pointer to it. The tensors must not change until this returns.

        Raises PointerWentBack if the version is not greater than the last one, LayoutMismatch if the tensors differ
        from those of the last one, InvalidRequest, CheckpointUnreadable, StoreUnreachable, StoreRefused or
        StorageFull.
        """
        try:
            return self._publish(tensors, version, is_doubted=False)
        except CopyDamaged as error:  # the local copy of the last version, the base of the delta, is damaged
            _log.warning("version_made_again", version=version, reason=str(error))
            return self._publish(tensors, version, is_doubted=True)

    def _publish(self, tensors: Sequence[TensorBytes] | Path, version: int, *, is_doubted: bool) -> PublishReport:
        started_at = time.monotonic()
        self._local.check_apart(self._store)
        new_tensors = tensors_of(tensors) if isinstance(tensors, Path) else list(tensors)
        entries = {tensor.name: _entry_of(tensor) for tensor in new_tensors}
        latest, base_version = self._store.latest_before(version), None
        index = Index(version, {}, self._options.checksum, encoding=self._encoding)
        base: Mapping[str, StoredTensor] = {}
        if latest is not None:
            self._local.folder(self._store, latest, is_doubted=is_doubted)
            base_tensors, self._base_sums = self._local.tensors(latest)
            _check_layout(entries, base_tensors, latest)
            chain = chain_of(self._store, latest)
            # A reader applies all deltas of the chain, so its length is bounded by periodic full versions.
            if len(chain) < self._options.full_every:
                base_version, base = latest, base_tensors
                index = replace(index, base_version=latest, base_index=digest(chain[0].raw))
        with self._local.making(version, latest) as part:
            files, checksums, sums = self._write(part, new_tensors, entries, base, index)
            encoded_at = time.monotonic()
            index = replace(index, files=files, content=digest("".join(sorted(checksums.values())).encode()))
            folder = part if base_version is None else part / _DELTA
            num_bytes = self._store.put(index, sorted(folder.glob("*.safetensors")))
            self._store.advance(version)  # last: readers see the version only after its files are complete
            shutil.rmtree(part / _DELTA, ignore_errors=True)
            self._local.keep(part, index.to_json(), sums)
        num_full = sum(entry.num_bytes for entry in entries.values())
        times_s = encoded_at - started_at, time.monotonic() - encoded_at
        return PublishReport(version, base_version, num_bytes, num_full, len(files), *times_s)

    def _write(
        self,
        part: Path,
        given: Sequence[TensorBytes],
        entries: Mapping[str, Entry],
        base: Mapping[str, StoredTensor],
        index: Index,
    ) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        """Write the local checkpoint and, with a base, the delta.

        Returns the published files and checksums by tensor, and the xxh3-128 of every tensor. Raises CopyDamaged.
        """
        kind, is_full = self._options.checksum, index.base_version is None
        (part / _DELTA).mkdir()
        files: dict[str, str] = {}
        checksums: dict[str, str] = {}
        sums: dict[str, str] = {}
        shards = list(_sharded(given, entries))
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            own = {one.name: entries[one.name] for one in shard}
            flat = {one: Entry("U8", [], own[one].data_offsets) for one in own}
            with (
                TensorFile(part / name, own, kind if is_full else None) as whole,
                nullcontext(whole) if is_full else TensorFile(part / _DELTA / name, flat, kind) as published,
            ):
                for one in shard:
                    sums[one.name] = self._write_tensor(one, own[one.name], base.get(one.name), whole, published)
            checksums |= published.checksums
            files |= dict.fromkeys(published.checksums, name)
        return files, checksums, sums

    def _write_tensor(
        self, given: TensorBytes, entry: Entry, base: StoredTensor | None, whole: TensorFile, published: TensorFile
    ) -> str:
        new, state, own = given.load(), CHECKSUMS[self._options.checksum](), CHECKSUMS[CHECKSUM]()
        for piece in chunks(new):
            state.update(piece)
            own.update(piece)
            whole.write(piece)
        whole.end(given.name, entry.dtype, entry.shape, "" if base is not None else state.hexdigest())
        if base is None:
            return own.hexdigest()
        old = verified(base, self._base_sums)
        if not all(map(np.array_equal, chunks(old), chunks(new))):
            encode_delta(self._encoding, old, new, published.write)
            published.end(given.name, "U8", None, state.hexdigest())
        return own.hexdigest()


def _cache_of(store: VersionStore) -> Path:
    """Return the cache folder of this user for a run of a store."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "agentloop" / "publish" / digest(store.place.encode())


def _sharded(given: Sequence[TensorBytes], entries: Mapping[str, Entry]) -> Iterator[list[TensorBytes]]:
    """Split the tensors into files, so that a host can download several files concurrently."""
    shard: list[TensorBytes] = []
    num_bytes = 0
    for tensor in given:
        size = entries[tensor.name].num_bytes
        if shard and num_bytes + size > SHARD_BYTES:
            yield shard
            shard, num_bytes = [], 0
        shard.append(tensor)
        num_bytes += size
    yield shard


def _entry_of(tensor: TensorBytes) -> Entry:
    if (code := _CODES.get(tensor.dtype)) is None:
        raise InvalidRequest(
            f"tensor {tensor.name} has the dtype {tensor.dtype}: expected one of {', '.join(_CODES)}",
            param="weights",
        )
    return Entry(code, list(tensor.shape), (0, math.prod(tensor.shape) * DTYPES[code][1]))


def tensors_of(folder: Path) -> list[TensorBytes]:
    """Return the tensors of a checkpoint. Raises CheckpointUnreadable."""
    inspect_checkpoint(str(folder))
    return [
        TensorBytes(tensor.name, DTYPES[tensor.entry.dtype][0], tuple(tensor.entry.shape), tensor.read)
        for tensor in stored_tensors(folder).values()
    ]


def _check_layout(entries: Mapping[str, Entry], base: Mapping[str, StoredTensor], base_version: int) -> None:
    new_layout = {name: (one.dtype, one.shape) for name, one in entries.items()}
    base_layout = {name: (one.entry.dtype, one.entry.shape) for name, one in base.items()}
    if new_layout != base_layout:
        first = next(name for name in (*new_layout, *base_layout) if new_layout.get(name) != base_layout.get(name))
        differs = f"tensor {first} differs from version {base_version}: names, dtypes and shapes must not change"
        raise LayoutMismatch(f"{differs} within a run", param="weights")
