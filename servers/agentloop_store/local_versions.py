"""The versions of a host: published ones, made into ordinary checkpoint folders, once a host.

A version is made from its full one, or from one that is here, and the deltas after it: tensor by tensor, each
read once, verified, brought through all deltas in memory with every checksum verified, and written once. Memory
is that of the largest tensor (`overwrite`: five more bytes for each changed one) and of a buffer.

Each version has the checksums of all its tensors, and the stamps of its files. A version whose files have changed
since is read again; a damaged one is no base, and is made again from the last full version.

Ownership: the process that holds the folder's lock; the others wait, and find the version. A version is renamed to
its name once it is complete and synced: a kill leaves it there or not. Each folder keeps the index that it was made
of, so that another run under the same name is not taken for it. A folder without that index is not ours, and stays.
Two versions are here, the new one and its base or
the newest before it, and a third if a pull goes back: the one that its path led to.
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

MADE_OF = "made_of.json"
CONTENT = "content.json"  # a `_Content`
_LOCK = "lock"
_PART = "part"  # what is being made; it has no other owner than the lock's
_LOCK_POLL_S = 0.05

Check: TypeAlias = Callable[[], object]
"""Raises once the work is not wanted any more."""

Delta: TypeAlias = tuple[Index, Mapping[str, StoredTensor]]

_log = structlog.stdlib.get_logger(__name__)


class CopyDamaged(Exception):
    """A tensor of a version of this host has other bytes than it was written with."""


class _Content(msgspec.Struct):
    """The xxh3-128 of each tensor of a version, and the stamps of its files once they were complete."""

    sums: dict[str, str]
    stamps: tuple[FileStamp, ...]


class LocalVersions:
    """The versions in one folder of this host. All calls block."""

    def __init__(self, folder: Path, served: str = "") -> None:
        """`served`: the name of a version's folder that stays, whatever is made."""
        self._folder, self._served = folder, served

    def folder(
        self, store: VersionStore, version: int, check: Check = lambda: None, *, is_doubted: bool = False
    ) -> Path:
        """Return the folder of a version, which is made first if it is not here or is damaged.

        `check` is called between pieces of the work. With `is_doubted` the bytes are read even if no file's stamp
        has changed. Raises CheckpointUnreadable of the kind that tells why, StoreUnreachable, StoreRefused or
        StorageFull, and InvalidRequest if this folder is the store's; what was here stays.
        """
        self.check_apart(store)

        def has(index: Index) -> bool:
            return self._has(index, check, is_doubted=is_doubted)

        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked(check):
                try:
                    self._make(store, chain_of(store, version, has), check)
                except CopyDamaged as error:  # the base's disk, behind its stamps
                    _log.warning("version_made_again", version=version, reason=str(error))
                    self._make(store, chain_of(store, version), check)
        except OSError as error:
            raise StorageFull(f"{self._folder}: {error}") from error
        return self._folder / folder_of(version)

    def check_apart(self, store: VersionStore) -> None:
        """Raise InvalidRequest if this folder is the store's run or in it, links followed."""
        if store.local_folder is not None and self._folder.resolve().is_relative_to(store.local_folder.resolve()):
            raise InvalidRequest(
                f"local versions cannot be kept in {self._folder}: versions are published in {store.local_folder}. "
                "Name a folder outside of it",
                param="local_checkpoint_dir",
            )

    def tensors(self, version: int) -> tuple[dict[str, StoredTensor], Mapping[str, str]]:
        """Return the tensors of a version that is here, and the checksums with which they were written."""
        folder = self._folder / folder_of(version)
        return stored_tensors(folder), content_of(folder).sums

    def digest(self, version: int) -> str:
        """Return the digest of a version that is here, as it was written."""
        tensors, sums = self.tensors(version)
        described = {name: (one.entry.dtype, one.entry.shape, sums[name]) for name, one in tensors.items()}
        return content_digest(described, str(self._folder / folder_of(version)))

    @contextmanager
    def making(self, version: int, base: int | None) -> Iterator[Path]:
        """Give an empty folder to make a version in, which gets its name at the end. For one process.

        Raises InvalidRequest if a folder of that name is here which is not ours.
        """
        self._prune(base)
        part, made = self._folder / _PART, self._folder / folder_of(version)
        if made.exists() and not _is_ours(made):
            raise InvalidRequest(f"{made} is not a local version: move it, or name another folder", param="folder")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            sync_path(part)
            shutil.rmtree(made, ignore_errors=True)  # of another run
            part.rename(made)
            sync_path(self._folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    @staticmethod
    def keep(part: Path, made_of: bytes, sums: dict[str, str]) -> None:
        """Write the index that a folder was made of, and its tensors' checksums, once the tensors are written."""
        content = msgspec.json.encode(_Content(sums, folder_stamps(str(part))))
        for name, data in ((CONTENT, content), (MADE_OF, made_of)):
            (part / name).write_bytes(data)
            sync_path(part / name)

    # --- inside ---

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
        """Return True if a version is here, made of this index, and its bytes are those that were written."""
        folder = self._folder / folder_of(index.version)
        try:
            if (folder / MADE_OF).read_bytes() != index.raw:
                return False
            content, stamps = content_of(folder), folder_stamps(str(folder))
            if content.stamps == stamps and not is_doubted:
                return True
            for one in stored_tensors(folder).values():
                check()
                verified(one, content.sums)
        except FileNotFoundError:
            return False
        except (CopyDamaged, VersionDamaged, CheckpointUnreadable, msgspec.DecodeError) as error:
            _log.warning("version_damaged", version=index.version, folder=str(folder), reason=str(error))
            return False
        self.keep(folder, index.raw, content.sums)  # with the new stamps
        return True

    def _make(self, store: VersionStore, chain: list[Index], check: Check) -> None:
        """Make the first of `chain`, of the others and the base that is here. Raises CopyDamaged if that is."""
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
            for one in tensors.values():
                check()
                state, own = CHECKSUMS[index.checksum or CHECKSUM](), xxhash.xxh3_128()
                for piece in chunks(one.read()):
                    state.update(piece)
                    own.update(piece)
                if index.checksum:
                    check_sum(state, one)
                sums[one.name] = own.hexdigest()
            for name in set(index.files.values()):
                sync_path(part / name)
            self.keep(part, index.raw, sums)

    def _make_from(self, base: Path, store: VersionStore, deltas: Sequence[Index], check: Check) -> None:
        """Make the last of `deltas`, oldest first, each being to the one before it and the first to `base`."""
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
        """Remove all our versions but the served one and the next one's base; without a base, the newest stays."""
        ours = filter(_is_ours, self._folder.glob("weight_v*"))
        names = [(one.name.removeprefix("weight_v"), one) for one in ours]
        found = {int(number): one for number, one in names if number.isdecimal()}
        for number in found.keys() - {max(found, default=0) if base is None else base}:
            if found[number].name != self._served:
                shutil.rmtree(found[number], ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / MADE_OF).is_file()


def content_of(folder: Path) -> _Content:
    return msgspec.json.decode((folder / CONTENT).read_bytes(), type=_Content)


def verified(one: StoredTensor, sums: Mapping[str, str]) -> Bytes:
    """Return a tensor's bytes. Raises CopyDamaged unless they are those that were written."""
    data = one.read()
    if xxhash.xxh3_128_hexdigest(data) != sums.get(one.name):
        raise CopyDamaged(f"tensor {one.name} in {one.path} has other bytes than it was written with")
    return data


def apply(base: Path, deltas: Sequence[Delta], target: Path, check: Check) -> dict[str, str]:
    """Write the version `base`, brought through all deltas in order, to the folder `target`.

    Returns the tensors' checksums. Raises CopyDamaged if a tensor of the base is, whether a delta names it or not.
    """
    held, sums = stored_tensors(base), dict(content_of(base).sums)
    if strange := min({name for _, tensors in deltas for name in tensors} - held.keys(), default=None):
        raise LayoutMismatch(f"tensor {strange} is in a delta, and not in its base")
    for path, tensors in groupby(held.values(), key=lambda one: one.path):
        own = list(tensors)
        with TensorFile(target / path.name, {one.name: one.entry for one in own}) as made:
            for one in own:
                check()
                tensor = verified(one, sums)
                for index, packed in deltas:
                    if one.name in packed:
                        apply_delta(index, packed[one.name], tensor)
                        sums[one.name] = xxhash.xxh3_128_hexdigest(tensor)
                made.write(tensor)
                made.end(one.name, one.entry.dtype, one.entry.shape)
    return sums
