"""The versions of a host: published ones, made into ordinary checkpoint folders, once a host.

A version comes of its full one, or of one that is here, and the deltas after it: tensor by tensor, each read once,
brought through all deltas in memory with every checksum verified, and written once. Memory is that of the largest
tensor (`overwrite`: five bytes for each changed one beside it) and of a buffer.

Ownership: the process that holds the folder's lock; the others wait, and find the version. A version is renamed to
its name once it is complete and synced: a kill leaves it there or not. Each folder keeps the index that it was made
of, so that another run under the same name is not taken for it. Two versions are here, the new one and its base or
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

from agentloop.errors import CheckpointUnreadable, LayoutMismatch, StorageFull, VersionDamaged
from agentloop_servers.locks import take_lock
from agentloop_servers.weight_store.format import (
    CHECKSUMS,
    Index,
    StoredTensor,
    TensorFile,
    apply_delta,
    check_sum,
    chunks,
    read_files,
    stored_tensors,
)
from agentloop_servers.weight_store.store import VersionStore, chain_of, folder_of, sync_path
from agentloop_servers.weight_transfer.checkpoint import inspect_checkpoint

MADE_OF = "made_of.json"
_LOCK = "lock"
_PART = "part"  # what is being made; it has no other owner than the lock's
_LOCK_POLL_S = 0.05

Check: TypeAlias = Callable[[], object]
"""Raises once the work is not wanted any more."""

Delta: TypeAlias = tuple[Index, Mapping[str, StoredTensor]]


class LocalVersions:
    """The versions in one folder of this host. All calls block."""

    def __init__(self, folder: Path, served: str = "") -> None:
        """`served`: the name of a version's folder that stays, whatever is made."""
        self._folder, self._served = folder, served

    def folder(self, store: VersionStore, version: int, check: Check = lambda: None) -> Path:
        """Return the folder of a version, which is made first if it is not here.

        `check` is called between pieces of the work. Raises CheckpointUnreadable of the kind that tells why,
        StoreUnreachable, StoreRefused or StorageFull; what was here stays.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked(check):
                chain = chain_of(store, version, self._has)
                base = chain[-1].base_version if chain else None
                if chain and base is None:
                    base = chain[-1].version
                    self._make_full(store, chain.pop(), check)
                if chain and base is not None:
                    self._make_from(self._folder / folder_of(base), store, chain[::-1], check)
        except OSError as error:
            raise StorageFull(f"{self._folder}: {error}") from error
        return self._folder / folder_of(version)

    @contextmanager
    def making(self, version: int, base: int | None) -> Iterator[Path]:
        """Give an empty folder to make a version in, which gets its name at the end. For one process."""
        self._prune(base)
        part, made = self._folder / _PART, self._folder / folder_of(version)
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
    def keep(part: Path, made_of: bytes) -> None:
        """Write down the index of which a folder was made, once all else in it is written."""
        (part / MADE_OF).write_bytes(made_of)
        sync_path(part / MADE_OF)

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

    def _has(self, index: Index) -> bool:
        made_of = self._folder / folder_of(index.version) / MADE_OF
        return made_of.exists() and made_of.read_bytes() == index.raw

    def _make_full(self, store: VersionStore, index: Index, check: Check) -> None:
        with self.making(index.version, None) as part:
            store.fetch(index, part)
            tensors = read_files(part, index)
            try:
                inspect_checkpoint(str(part))
            except CheckpointUnreadable as error:
                raise VersionDamaged(f"version {index.version}: {error.message}") from error
            for one in tensors.values() if index.checksum else ():
                check()
                state = CHECKSUMS[index.checksum or ""]()
                for piece in chunks(one.read()):
                    state.update(piece)
                check_sum(state, one)
            for name in set(index.files.values()):
                sync_path(part / name)
            self.keep(part, index.raw)

    def _make_from(self, base: Path, store: VersionStore, deltas: Sequence[Index], check: Check) -> None:
        """Make the last of `deltas`, oldest first, each being to the one before it and the first to `base`."""
        with self.making(deltas[-1].version, deltas[0].base_version) as part:
            fetched: list[Delta] = []
            for index in deltas:
                folder = part / folder_of(index.version)
                folder.mkdir()
                store.fetch(index, folder)
                fetched.append((index, read_files(folder, index)))
            apply(base, fetched, part, check)
            for index in deltas:
                shutil.rmtree(part / folder_of(index.version))
            self.keep(part, deltas[-1].raw)

    def _prune(self, base: int | None) -> None:
        """Remove all versions but the served one and the next one's base; without a base, the newest stays."""
        names = [(one.name.removeprefix("weight_v"), one) for one in self._folder.glob("weight_v*")]
        found = {int(number): one for number, one in names if number.isdecimal()}
        for number in found.keys() - {max(found, default=0) if base is None else base}:
            if found[number].name != self._served:
                shutil.rmtree(found[number], ignore_errors=True)


def apply(base: Path, deltas: Sequence[Delta], target: Path, check: Check) -> None:
    """Write the checkpoint `base`, brought through all deltas in order, to the folder `target`."""
    held = stored_tensors(base)
    if strange := min({name for _, tensors in deltas for name in tensors} - held.keys(), default=None):
        raise LayoutMismatch(f"tensor {strange} is in a delta, and not in its base")
    for path, tensors in groupby(held.values(), key=lambda one: one.path):
        own = list(tensors)
        with TensorFile(target / path.name, {one.name: one.entry for one in own}) as made:
            for one in own:
                check()
                tensor = one.read()
                for index, packed in deltas:
                    if one.name in packed:
                        apply_delta(index, packed[one.name], tensor)
                made.write(tensor)
                made.end(one.name, one.entry.dtype, one.entry.shape)
