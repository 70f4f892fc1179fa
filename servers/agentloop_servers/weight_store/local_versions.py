"""The versions of a host: published ones, made into ordinary checkpoint folders, once a host.

A version comes of its full one, or of one that is here, and the deltas after it: tensor by tensor, each read once,
brought through all deltas in memory with every checksum verified, and written once. Memory is that of the largest
tensor (`overwrite`: five bytes for each changed one beside it) and of a buffer.

Ownership: the process that holds the folder's lock; the others wait, and find the version. A version is renamed to
its name once it is complete and synced: a kill leaves it there or not. Each folder keeps the index that it was made
of, so that another run under the same name is not taken for it. Two versions at most are here: the new one
and its base, or the newest before it.
"""

from __future__ import annotations

import mmap
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import RawIOBase
from pathlib import Path

import numpy as np

from agentloop.errors import CheckpointUnreadable, LayoutMismatch, StorageFull, VersionDamaged
from agentloop_servers.locks import take_lock
from agentloop_servers.weight_store.format import (
    CHECKSUMS,
    Bytes,
    Index,
    TensorFile,
    TensorForm,
    apply_delta,
    check_sum,
    read_files,
)
from agentloop_servers.weight_store.store import VersionStore, chain_of, folder_of, sync_path
from agentloop_servers.weight_transfer.checkpoint import READ_CHUNK_BYTES, Header, inspect_checkpoint, read_header

MADE_OF = "made_of.json"
_LOCK = "lock"
_PART = "part"  # what is being made; it has no other owner than the lock's
_LOCK_POLL_S = 0.05


class LocalVersions:
    """The versions in one folder of this host. All calls block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, store: VersionStore, version: int, is_given_up: Callable[[], bool] = lambda: False) -> Path:
        """Return the folder of a version, which is made first if it is not here.

        `is_given_up` is asked between pieces of the work. Raises CheckpointUnreadable of the kind that tells why,
        StoreUnreachable, StoreRefused or StorageFull; what was here stays.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked(is_given_up):
                chain = chain_of(store, version, self._has)
                base = chain[-1].base_version if chain else None
                if chain and base is None:
                    base = chain[-1].version
                    self._make_full(store, chain.pop(), is_given_up)
                if chain and base is not None:
                    self._make_from(self._folder / folder_of(base), store, chain[::-1], is_given_up)
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
    def _locked(self, is_given_up: Callable[[], bool]) -> Iterator[None]:
        while (lock := take_lock(self._folder / _LOCK)) is None:
            if is_given_up():
                raise _given_up()
            time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            lock.release()

    def _has(self, index: Index) -> bool:
        made_of = self._folder / folder_of(index.version) / MADE_OF
        return made_of.exists() and made_of.read_bytes() == index.raw

    def _make_full(self, store: VersionStore, index: Index, is_given_up: Callable[[], bool]) -> None:
        with self.making(index.version, None) as part:
            store.fetch(index, part)
            headers = read_files(part, index)
            try:
                inspect_checkpoint(str(part))
            except CheckpointUnreadable as error:
                raise VersionDamaged(f"version {index.version}: {error.message}") from error
            for path, header in headers.items():
                _check_full(path, header, index, is_given_up)
                sync_path(path)
            self.keep(part, index.raw)

    def _make_from(
        self, base: Path, store: VersionStore, deltas: Sequence[Index], is_given_up: Callable[[], bool]
    ) -> None:
        """Make the last of `deltas`, oldest first, each being to the one before it and the first to `base`."""
        last = deltas[-1].version
        with ExitStack() as closing, self.making(last, deltas[0].base_version) as part:
            opened = []
            for index in deltas:
                fetched = part / folder_of(index.version)
                fetched.mkdir()
                store.fetch(index, fetched)
                opened.append(OpenDelta(fetched, index, closing))
            apply(base, opened, part, is_given_up)
            for index in deltas:
                shutil.rmtree(part / folder_of(index.version))
            self.keep(part, deltas[-1].raw)

    def _prune(self, base: int | None) -> None:
        """Remove all versions but the base of the next one; without a base, all but the newest."""
        found = {int(one.name.removeprefix("weight_v")): one for one in self._folder.glob("weight_v*")}
        for number in found.keys() - {max(found, default=0) if base is None else base}:
            shutil.rmtree(found[number], ignore_errors=True)


class OpenDelta:
    """The files of one delta, mapped into memory until `closing` ends."""

    def __init__(self, folder: Path, index: Index, closing: ExitStack) -> None:
        """Raises VersionDamaged for files that are torn, or are not those of the index."""
        self.index = index
        self._places: dict[str, tuple[memoryview, str | None]] = {}
        for path, header in read_files(folder, index).items():
            file = closing.enter_context(path.open("rb"))
            mapped = closing.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            view = closing.enter_context(memoryview(mapped))
            for name, entry in header.entries.items():
                first, end = (header.data_at + offset for offset in entry.data_offsets)
                piece = closing.enter_context(view[first:end])
                self._places[name] = piece, header.metadata.get(name)

    @property
    def names(self) -> frozenset[str]:
        """The tensors that it changes."""
        return frozenset(self._places)

    def apply(self, name: str, tensor: Bytes) -> None:
        """Bring a tensor's bytes from the base's to this version's, in place. Raises CheckpointUnreadable."""
        packed, checksum = self._places[name]
        state = CHECKSUMS[self.index.checksum or ""]()
        apply_delta(packed, self.index.encoding, tensor, state)
        check_sum(name, state, checksum)


def apply(base: Path, deltas: Sequence[OpenDelta], target: Path, is_given_up: Callable[[], bool]) -> None:
    """Write the checkpoint `base`, brought through all deltas in order, to the folder `target`."""
    headers = {path: read_header(path) for path in sorted(base.glob("*.safetensors"))}
    held = {name: entry for header in headers.values() for name, entry in header.entries.items()}
    if strange := next((name for delta in deltas for name in delta.names if name not in held), None):
        raise LayoutMismatch(f"tensor {strange} is in a delta, and not in its base")
    changed = frozenset[str]().union(*(delta.names for delta in deltas))
    sizes = [held[name].data_offsets[1] - held[name].data_offsets[0] for name in changed]
    buffer: Bytes = np.empty(max([READ_CHUNK_BYTES, *sizes]), np.uint8)
    for path, header in headers.items():
        forms = [TensorForm(name, entry.dtype, tuple(entry.shape)) for name, entry in header.entries.items()]
        with path.open("rb", buffering=0) as old, TensorFile(target / path.name, forms) as made:
            old.seek(header.data_at)
            for form, entry in zip(forms, header.entries.values(), strict=True):
                if is_given_up():
                    raise _given_up()
                num_bytes = entry.data_offsets[1] - entry.data_offsets[0]
                if form.name in changed:
                    tensor = next(_pieces(old, num_bytes, buffer), buffer[:0])
                    for delta in deltas:
                        if form.name in delta.names:
                            delta.apply(form.name, tensor)
                    made.write(tensor)
                else:
                    for piece in _pieces(old, num_bytes, buffer):
                        made.write(piece)
                made.end(form.name, form.dtype, form.shape)


def _pieces(file: RawIOBase, num_bytes: int, buffer: Bytes) -> Iterator[Bytes]:
    """Read the next bytes of a file into `buffer`, as many at once as it takes."""
    while num_bytes > 0:
        wanted = buffer[: min(num_bytes, len(buffer))]
        if file.readinto(memoryview(wanted)) != len(wanted):
            raise VersionDamaged("a version on this host is cut off")
        num_bytes -= len(wanted)
        yield wanted


def _check_full(path: Path, header: Header, index: Index, is_given_up: Callable[[], bool]) -> None:
    """Compare a full version's tensors with its checksums, if it has any."""
    if index.checksum is None:
        return
    buffer: Bytes = np.empty(READ_CHUNK_BYTES, np.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(header.data_at)
        for name, entry in header.entries.items():
            if is_given_up():
                raise _given_up()
            state = CHECKSUMS[index.checksum]()
            for piece in _pieces(file, entry.data_offsets[1] - entry.data_offsets[0], buffer):
                state.update(piece)
            check_sum(name, state, header.metadata.get(name))


def _given_up() -> CheckpointUnreadable:
    return CheckpointUnreadable("the update was given up")
