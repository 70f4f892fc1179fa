"""Local copies of published versions: checkpoint folders that are assembled once per host.

A version is assembled from a full or an existing local version and the deltas after it. Each tensor is read once,
verified, updated by all deltas in memory with checksums verified, and written once, so memory is that of the
largest tensor (with `overwrite` plus five bytes per changed byte) and a buffer. Invariants: a folder gets its final
name, under the lock of the parent folder, after it is complete and synced, so a killed process leaves no partial
version; a version with changed files is verified again, and a damaged one is not used as a base.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import msgspec
import structlog
import xxhash

from agentloop.engine.weight_digest import FileStamp, content_digest, folder_stamps
from agentloop.errors import (
    CheckpointUnreadable,
    InvalidRequest,
    LayoutMismatch,
    StorageFull,
    VersionDamaged,
)
from agentloop_servers.run.locks import take_lock
from agentloop_servers.weight_transfer.checkpoint import inspect_checkpoint
from agentloop_store.format import (
    CHECKSUM,
    CHECKSUMS,
    Bytes,
    Index,
    StoredTensor,
    TensorFile,
    apply_delta,
    check_sum,
    chunks,
    read_files,
    stored_tensors,
)
from agentloop_store.store import VersionStore, chain_of, folder_of, sync_path

# The index that a version was assembled from. A folder with another index belongs to another run of the same name;
# a folder without one is not a local version and is never deleted.
MADE_OF = "made_of.json"
CONTENT = "content.json"  # a `_Content`
_LOCK = "lock"
_PART = "part"  # the version that is being assembled; only the lock's owner uses it
_LOCK_POLL_S = 0.05

Check: TypeAlias = Callable[[], object]
"""Raises if the work has been cancelled."""

Delta: TypeAlias = tuple[Index, Mapping[str, StoredTensor]]

_log = structlog.stdlib.get_logger(__name__)


class CopyDamaged(Exception):
    """Raised if a tensor of a local version has changed since it was written."""


class _Content(msgspec.Struct):
    """The xxh3-128 of each tensor of a version, and the stamps of its complete files."""

    sums: dict[str, str]
    stamps: tuple[FileStamp, ...]


class LocalVersions:
    """The local versions in one folder of this host. All calls block."""

    def __init__(self, folder: Path, served: str = "") -> None:
        """`served` is the name of a version's folder that is never deleted."""
        self._folder, self._served = folder, served

    def folder(
        self, store: VersionStore, version: int, check: Check = lambda: None, *, is_doubted: bool = False
    ) -> Path:
        """Return the folder of a version, and assemble it first if it is missing or damaged.

        `check` is called between steps. With `is_doubted`, the bytes are verified even if the files' stamps are
        unchanged. Raises CheckpointUnreadable or a subclass, StoreUnreachable, StoreRefused or StorageFull, and
        InvalidRequest if this folder is in the store. After an error the existing versions are unchanged.
        """
        self.check_apart(store)

        def has(index: Index) -> bool:
            return self._has(index, check, is_doubted=is_doubted)

        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked(check):
                try:
                    self._make(store, chain_of(store, version, has), check)
                except CopyDamaged as error:  # the base was damaged on disk without a changed stamp
                    _log.warning("version_made_again", version=version, reason=str(error))
                    self._make(store, chain_of(store, version), check)  # from the last full version
        except OSError as error:
            raise StorageFull(f"{self._folder}: {error}") from error
        return self._folder / folder_of(version)

    def check_apart(self, store: VersionStore) -> None:
        """Raise InvalidRequest if this folder, with links resolved, is inside the store's run."""
        if store.local_folder is not None and self._folder.resolve().is_relative_to(store.local_folder.resolve()):
            raise InvalidRequest(
                f"local versions cannot be stored in {self._folder}, because {store.local_folder} is the published "
                "store: use a folder outside of it",
                param="local_checkpoint_dir",
            )

    def tensors(self, version: int) -> tuple[dict[str, StoredTensor], Mapping[str, str]]:
        """Return the tensors of a local version, and the checksums with which they were written."""
        folder = self._folder / folder_of(version)
        return stored_tensors(folder), content_of(folder).sums

    def digest(self, version: int) -> str:
        """Return the content digest of a local version when it was written."""
        tensors, sums = self.tensors(version)
        described = {name: (tensor.entry.dtype, tensor.entry.shape, sums[name]) for name, tensor in tensors.items()}
        return content_digest(described, str(self._folder / folder_of(version)))

    @contextmanager
    def making(self, version: int, base: int | None) -> Iterator[Path]:
        """Yield an empty folder for a version; at the end it is renamed to its final name. Requires the lock.

        Raises InvalidRequest if a folder with that name exists and is not a local version.
        """
        self._prune(base)
        part, target = self._folder / _PART, self._folder / folder_of(version)
        if target.exists() and not _is_ours(target):
            raise InvalidRequest(f"{target} is not a local version: move it, or use another folder", param="folder")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            sync_path(part)
            shutil.rmtree(target, ignore_errors=True)  # a damaged copy, or a version of another run
            part.rename(target)
            sync_path(self._folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    @staticmethod
    def keep(part: Path, made_of: bytes, sums: dict[str, str]) -> None:
        """Write the tensors' checksums and the index, after the tensors are complete."""
        content = msgspec.json.encode(_Content(sums, folder_stamps(str(part))))
        for name, data in ((CONTENT, content), (MADE_OF, made_of)):
            (part / name).write_bytes(data)
            sync_path(part / name)

    # Helpers

    @contextmanager
    def _locked(self, check: Check) -> Iterator[None]:
        while (lock := take_lock(self._folder / _LOCK)) is None:
            check()
            time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            lock.release()

    def _has(self, index: Index, check: Check, *, is_doubted: bool) -> bool:
        """Return True if a version exists that was assembled from this index and is undamaged."""
        folder = self._folder / folder_of(index.version)
        try:
            if (folder / MADE_OF).read_bytes() != index.raw:
                return False
            content, stamps = content_of(folder), folder_stamps(str(folder))
            if content.stamps == stamps and not is_doubted:
                return True
            for tensor in stored_tensors(folder).values():
                check()
                verified(tensor, content.sums)
        except FileNotFoundError:
            return False
        except (CopyDamaged, VersionDamaged, CheckpointUnreadable, msgspec.DecodeError) as error:
            _log.warning("version_damaged", version=index.version, folder=str(folder), reason=str(error))
            return False
        self.keep(folder, index.raw, content.sums)  # store the new stamps
        return True

    def _make(self, store: VersionStore, chain: list[Index], check: Check) -> None:
        """Assemble the first version of `chain` (newest first). Raises CopyDamaged if the local base is damaged."""
        base = chain[-1].base_version if chain else None
        if chain and base is None:
            base = chain[-1].version
            self._make_full(store, chain.pop(), check)
        if chain and base is not None:
            self._make_from(self._folder / folder_of(base), store, chain[::-1], check)

    def _make_full(self, store: VersionStore, index: Index, check: Check) -> None:
        with self.making(index.version, None) as part:
            store.fetch(index, part)
            tensors = read_files(part, index)
            try:
                inspect_checkpoint(str(part))
            except CheckpointUnreadable as error:
                raise VersionDamaged(f"version {index.version}: {error.message}") from error
            sums = {}
            for tensor in tensors.values():
                check()
                state, own = CHECKSUMS[index.checksum or CHECKSUM](), xxhash.xxh3_128()
                for piece in chunks(tensor.read()):
                    state.update(piece)
                    own.update(piece)
                if index.checksum:
                    check_sum(state, tensor)
                sums[tensor.name] = own.hexdigest()
            for name in set(index.files.values()):
                sync_path(part / name)
            self.keep(part, index.raw, sums)

    def _make_from(self, base: Path, store: VersionStore, deltas: Sequence[Index], check: Check) -> None:
        """Assemble the version of the last delta from the folder `base` and consecutive `deltas`, oldest first."""
        with self.making(deltas[-1].version, deltas[0].base_version) as part:
            fetched: list[Delta] = []
            for index in deltas:
                folder = part / folder_of(index.version)
                folder.mkdir()
                store.fetch(index, folder)
                fetched.append((index, read_files(folder, index)))
            sums = apply(base, fetched, part, check)
            for index in deltas:
                shutil.rmtree(part / folder_of(index.version))
            self.keep(part, deltas[-1].raw, sums)

    def _prune(self, base: int | None) -> None:
        """Delete all local versions except the served one and `base`; without a base, except the newest.

        A host thus has at most three versions: the new one, its base, and the one that a link refers to.
        """
        ours = filter(_is_ours, self._folder.glob("weight_v*"))
        names = [(folder.name.removeprefix("weight_v"), folder) for folder in ours]
        folders = {int(number): folder for number, folder in names if number.isdecimal()}
        for number in folders.keys() - {max(folders, default=0) if base is None else base}:
            if folders[number].name != self._served:
                shutil.rmtree(folders[number], ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / MADE_OF).is_file()


def content_of(folder: Path) -> _Content:
    return msgspec.json.decode((folder / CONTENT).read_bytes(), type=_Content)


def verified(one: StoredTensor, sums: Mapping[str, str]) -> Bytes:
    """Read a tensor's bytes. Raises CopyDamaged if they have changed since they were written."""
    data = one.read()
    if xxhash.xxh3_128_hexdigest(data) != sums.get(one.name):
        raise CopyDamaged(f"tensor {one.name} in {one.path} has changed since it was written")
    return data


def apply(base: Path, deltas: Sequence[Delta], target: Path, check: Check) -> dict[str, str]:
    """Write the version in the folder `base`, updated by all deltas in order, to the folder `target`.

    Returns the tensors' checksums. Raises CopyDamaged if any tensor of the base is damaged.
    """
    base_tensors, sums = stored_tensors(base), dict(content_of(base).sums)
    if unknown := min({name for _, tensors in deltas for name in tensors} - base_tensors.keys(), default=None):
        raise LayoutMismatch(f"tensor {unknown} is in a delta, but not in its base")
    for path, tensors in groupby(base_tensors.values(), key=lambda stored: stored.path):
        own = list(tensors)
        with TensorFile(target / path.name, {stored.name: stored.entry for stored in own}) as made:
            for stored in own:
                check()
                data = verified(stored, sums)
                for index, packed in deltas:
                    if stored.name in packed:
                        apply_delta(index, packed[stored.name], data)
                        sums[stored.name] = xxhash.xxh3_128_hexdigest(data)
                made.write(data)
                made.end(stored.name, stored.entry.dtype, stored.entry.shape)
    return sums
