"""A run's versions in a store: `RUN/weight_v000007/` with its files, and the pointer `RUN/latest`.

The store is a directory, or what fsspec knows by a URL, with credentials from the environment. A version counts
once the pointer names it: files come first, then their index, then the pointer, which moves forward only. In a
directory each file is written under another name, synced and renamed; in a bucket an object appears whole. One
publisher a run. All calls block, and their errors are ours.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from agentloop.errors import (
    AgentLoopError,
    InvalidRequest,
    PointerMissing,
    PointerWentBack,
    StorageFull,
    StoreRefused,
    StoreUnreachable,
    VersionDamaged,
    VersionMissing,
    WrongBase,
    WrongRun,
    error_line,
)
from agentloop_store.format import INDEX_NAME, Index, digest, read_index

POINTER = "latest"
MAX_INDEX_BYTES = 64 << 20
MIN_FREE_BYTES = 256 << 20  # on the local disk, after a fetch
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_POINTER_TEXT = re.compile(r"(?:([^/]{1,128})/)?weight_v(\d{1,18})\s*")
_MAX_POINTER_BYTES = 256
_NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "InvalidAccessKeyId",
    "CredentialRetrievalError",
)


def folder_of(version: int) -> str:
    """Return the name of a version's folder."""
    return f"weight_v{version:06d}"


class VersionStore:
    """The versions of one run. Raises InvalidRequest for a URL or a run's name that cannot be."""

    def __init__(self, url: str, run: str) -> None:
        if RUN_NAME.fullmatch(run) is None:
            raise InvalidRequest("a run's name is letters, digits, `.`, `_` and `-`", param="run")
        self.url, self.run = url, run
        try:
            # Listings are cached by default, and instances too, with what they have listed.
            self._fs, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError, OSError) as error:
            raise InvalidRequest(f"no store {url}: {error_line(error)}", param="store") from error
        self._root = root.rstrip("/")
        self._folder = f"{self._root}/{run}"
        self.place = str(self._fs.unstrip_protocol(self._folder))  # the run's
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self.local_folder = Path(self._folder) if self._is_local else None  # the run's, if it is on this host

    # --- for readers ---

    def latest(self) -> int:
        """Return the version that the pointer names. Raises PointerMissing, WrongRun."""
        if (latest := self._pointed()) is not None:
            return latest
        if others := self._other_runs():
            raise WrongRun(f"{self.url} has no run {self.run}, but {', '.join(others)}", param="run")
        raise PointerMissing(f"{self.url} has no pointer {self.run}/{POINTER}: nothing is published", param="store")

    def index(self, version: int) -> Index:
        """Read a version's index. Raises VersionMissing, VersionDamaged, WrongBase."""
        data = self._read(f"{self._folder}/{folder_of(version)}/{INDEX_NAME}", MAX_INDEX_BYTES)
        if data is None:
            raise VersionMissing(f"version {version} of run {self.run} is not in the store")
        return read_index(data, version)

    def fetch(self, index: Index, target: Path) -> None:
        """Copy a version's files into a folder. Raises VersionMissing, StorageFull."""
        names = sorted(set(index.files.values()))
        places = [f"{self._folder}/{folder_of(index.version)}/{name}" for name in names]
        with self._asked(f"version {index.version}", VersionMissing):
            num_bytes = sum(int(self._fs.size(place)) for place in places)
            if num_bytes + MIN_FREE_BYTES > shutil.disk_usage(target).free:
                raise StorageFull(f"no room for the {num_bytes >> 20} MiB of version {index.version} in {target}")
            self._fs.get(places, [str(target / name) for name in names])

    # --- for the publisher ---

    def latest_before(self, version: int) -> int | None:
        """Return the latest version, None before the first.

        Raises PointerWentBack if `version` is not beyond, WrongRun.
        """
        latest = self._pointed()
        if latest is not None and version <= latest:
            back = f"version {version} after {latest}: a pointer moves forward only"
            raise PointerWentBack(back, param="version")
        return latest

    def put(self, index: Index, files: Sequence[Path]) -> int:
        """Store a version's files, and its index last; returns their bytes."""
        folder = f"{self._folder}/{folder_of(index.version)}"
        data = index.to_json()
        with self._asked(f"version {index.version}", StoreUnreachable):
            self._fs.makedirs(folder, exist_ok=True)
            for path in files:
                self._put(path, f"{folder}/{path.name}")
            self._put(data, f"{folder}/{INDEX_NAME}")
        return len(data) + sum(path.stat().st_size for path in files)

    def advance(self, version: int) -> None:
        """Move the pointer to a version. Raises PointerWentBack unless it is beyond the one that is there."""
        self.latest_before(version)
        with self._asked("the pointer", StoreUnreachable):
            self._put(f"{self.run}/{folder_of(version)}\n".encode(), f"{self._folder}/{POINTER}")

    # --- inside ---

    def _pointed(self) -> int | None:
        """Return the version that the pointer names, None without one. Raises WrongRun, VersionDamaged."""
        text = self._read(f"{self._folder}/{POINTER}", _MAX_POINTER_BYTES)
        if text is None:
            return None
        found = _POINTER_TEXT.fullmatch(text.decode(errors="replace"))
        if found is None:
            raise VersionDamaged(f"the pointer of run {self.run} names no version")
        if found[1] not in (None, self.run):
            raise WrongRun(f"the pointer of run {self.run} names a version of run {found[1]}", param="run")
        return int(found[2])

    def _put(self, data: bytes | Path, place: str) -> None:
        """Write an object, or a file that a kill or a power cut leaves whole, or not there."""
        if not self._is_local:
            _ = self._fs.pipe_file(place, data) if isinstance(data, bytes) else self._fs.put_file(str(data), place)
            return
        made = Path(f"{place}.part")
        _ = made.write_bytes(data) if isinstance(data, bytes) else shutil.copyfile(data, made)
        sync_path(made)
        os.replace(made, place)
        sync_path(made.parent)

    def _read(self, place: str, most: int) -> bytes | None:
        """Return an object; None if there is none. Raises VersionDamaged for one that is too large."""
        with self._asked(place.removeprefix(self._root + "/"), None):
            try:
                data: bytes = self._fs.cat_file(place, start=0, end=most + 1)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if len(data) > most:
            raise VersionDamaged(f"{place.removeprefix(self._root + '/')} has more than {most} bytes")
        return data

    def _other_runs(self) -> list[str]:
        with self._asked("its runs", None):
            try:
                listed = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            names = sorted(str(one).rstrip("/").rpartition("/")[2] for one in listed)[:8]
            return [
                name for name in names if name != self.run and self._fs.exists(f"{self._root}/{name}/{POINTER}")
            ]

    @contextmanager
    def _asked(self, what: str, missing: type[AgentLoopError] | None) -> Iterator[None]:
        """Give the errors of the store's own library as ours."""
        try:
            yield
        except AgentLoopError:
            raise
        except FileNotFoundError as error:
            raise (missing or StoreUnreachable)(f"{what} is not in {self.url}, or not all of it") from error
        except Exception as error:  # each kind of store has its own
            said = f"{self.url}, {what}: {error_line(error)}"
            is_refused = isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS
            raise (StoreRefused if is_refused else StoreUnreachable)(said, param="store") from error


def sync_path(path: Path) -> None:
    """Write a file, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def chain_of(
    store: VersionStore, version: int, ends_at: Callable[[Index], bool] = lambda index: False
) -> list[Index]:
    """Return the indexes from `version` back to its full version, or to a base where `ends_at` is true.

    That base is not among them. Raises VersionMissing for a gap, WrongBase if a base is not what its delta names.
    """
    chain: list[Index] = []
    wanted: int | None = version
    while wanted is not None:
        try:
            index = store.index(wanted)
        except VersionMissing as error:
            if not chain:
                raise
            gap = (
                f"version {chain[-1].version} is a delta to {wanted}, which is not in the store: a gap in the chain"
            )
            raise VersionMissing(gap) from error
        named = chain[-1].base_index if chain else None
        if named not in (None, digest(index.raw)):
            raise WrongBase(f"version {chain[-1].version} is a delta to another version {wanted} than the store's")
        if ends_at(index):
            break
        chain.append(index)
        wanted = index.base_version
    return chain
