"""A run's versions in a store: folders such as `RUN/weight_v000007/`, and the pointer `RUN/latest`.

The store is a directory or an fsspec URL, with credentials from the environment. A version is published when the
pointer names it: the files are written first, then their index, then the pointer, which only moves forward. Files
in a directory are written under a temporary name, synced and renamed; objects in a bucket appear atomically. A run
has one publisher. All calls block. Errors of the store's library are converted to AgentLoopErrors.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
MIN_FREE_BYTES = 256 << 20  # free space that a fetch leaves on the local disk
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
    """The versions of one run. Raises InvalidRequest for an invalid URL or run name."""

    def __init__(self, url: str, run: str) -> None:
        if RUN_NAME.fullmatch(run) is None:
            raise InvalidRequest(
                f"invalid run name {run[:128]!r}: expected letters, digits, '.', '_' and '-'", param="run"
            )
        self.url, self.run = url, run
        try:
            # fsspec caches listings and instances by default, and would not see new versions.
            self._fs, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError, OSError) as error:
            raise InvalidRequest(f"the store {url} cannot be opened: {error_line(error)}", param="store") from error
        self._root = root.rstrip("/")
        self._folder = f"{self._root}/{run}"
        self.place = str(self._fs.unstrip_protocol(self._folder))  # the URL of the run
        self._names: Mapping[int, str] = {}
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self.local_folder = Path(self._folder) if self._is_local else None  # the run's folder if the store is local

    def named(self, names: Iterable[tuple[int, str]]) -> VersionStore:
        """Return this store with the folders of `PublishedSource.names`."""
        store = copy.copy(self)
        store._names = dict(names)
        return store

    # For readers

    def latest(self) -> int:
        """Return the version that the pointer names. Raises PointerMissing or WrongRun."""
        if (latest := self._pointed()) is not None:
            return latest
        if others := self._other_runs():
            raise WrongRun(f"{self.url} has no run {self.run}; it has the runs {', '.join(others)}", param="run")
        raise PointerMissing(
            f"{self.url} has no pointer {self.run}/{POINTER}: no version is published", param="store"
        )

    def index(self, version: int) -> Index:
        """Read a version's index. Raises VersionMissing, VersionDamaged or WrongBase."""
        name = self._name(version)
        data = self._read(f"{self._folder}/{name}/{INDEX_NAME}", MAX_INDEX_BYTES)
        if data is None:
            raise VersionMissing(f"version {version} of run {self.run} is not in the store: {name}/{INDEX_NAME}")
        index = read_index(data, version, self._names)
        # Indexes without checksums are equal for all versions of a model, so the name identifies the version.
        return replace(index, raw=data + name.encode()) if version in self._names else index

    def fetch(self, index: Index, target: Path) -> None:
        """Copy a version's files into a folder. Raises VersionMissing or StorageFull."""
        names = sorted(set(index.files.values()))
        paths = [f"{self._folder}/{self._name(index.version)}/{name}" for name in names]
        with self._asked(f"version {index.version}", VersionMissing):
            num_bytes = sum(int(self._fs.size(path)) for path in paths)
            if num_bytes + MIN_FREE_BYTES > shutil.disk_usage(target).free:
                raise StorageFull(
                    f"{target} has too little space for the {num_bytes >> 20} MiB of version {index.version}: free "
                    "disk space"
                )
            self._fs.get(paths, [str(target / name) for name in names])

    # For the publisher

    def latest_before(self, version: int) -> int | None:
        """Return the latest version, or None. Raises WrongRun, and PointerWentBack if `version` is not greater."""
        latest = self._pointed()
        if latest is not None and version <= latest:
            back = f"version {version} is not greater than the published version {latest}: use a greater version"
            raise PointerWentBack(back, param="version")
        return latest

    def put(self, index: Index, files: Sequence[Path]) -> int:
        """Store a version's files, then its index. Returns the number of bytes."""
        folder = f"{self._folder}/{folder_of(index.version)}"
        data = index.to_json()
        with self._asked(f"version {index.version}", StoreUnreachable):
            self._fs.makedirs(folder, exist_ok=True)
            for path in files:
                self._put(path, f"{folder}/{path.name}")
            self._put(data, f"{folder}/{INDEX_NAME}")
        return len(data) + sum(path.stat().st_size for path in files)

    def advance(self, version: int) -> None:
        """Move the pointer to a version. Raises PointerWentBack unless it is greater than the current one."""
        self.latest_before(version)
        with self._asked("the pointer", StoreUnreachable):
            self._put(f"{self.run}/{folder_of(version)}\n".encode(), f"{self._folder}/{POINTER}")

    # Helpers

    def _name(self, version: int) -> str:
        return self._names.get(version) or folder_of(version)

    def _pointed(self) -> int | None:
        """Return the version in the pointer file; None without the file. Raises WrongRun or VersionDamaged."""
        text = self._read(f"{self._folder}/{POINTER}", _MAX_POINTER_BYTES)
        if text is None:
            return None
        match = _POINTER_TEXT.fullmatch(text.decode(errors="replace"))
        if match is None:
            raise VersionDamaged(f"the pointer of run {self.run} is not the name of a version")
        if match[1] not in (None, self.run):
            raise WrongRun(f"the pointer of run {self.run} names a version of run {match[1]}", param="run")
        return int(match[2])

    def _put(self, data: bytes | Path, path: str) -> None:
        """Write an object or a file atomically and durably."""
        if not self._is_local:
            _ = self._fs.pipe_file(path, data) if isinstance(data, bytes) else self._fs.put_file(str(data), path)
            return
        part = Path(f"{path}.part")
        _ = part.write_bytes(data) if isinstance(data, bytes) else shutil.copyfile(data, part)
        sync_path(part)
        os.replace(part, path)
        sync_path(part.parent)

    def _read(self, path: str, max_bytes: int) -> bytes | None:
        """Return the contents of an object; None if it is missing. Raises VersionDamaged if it is too large."""
        with self._asked(path.removeprefix(self._root + "/"), None):
            try:
                data: bytes = self._fs.cat_file(path, start=0, end=max_bytes + 1)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if len(data) > max_bytes:
            raise VersionDamaged(f"{path.removeprefix(self._root + '/')} has more than {max_bytes} bytes")
        return data

    def _other_runs(self) -> list[str]:
        with self._asked("its runs", None):
            try:
                listed = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            names = sorted(str(path).rstrip("/").rpartition("/")[2] for path in listed)[:8]
            return [
                name for name in names if name != self.run and self._fs.exists(f"{self._root}/{name}/{POINTER}")
            ]

    @contextmanager
    def _asked(self, what: str, missing: type[AgentLoopError] | None) -> Iterator[None]:
        """Convert the errors of the store's library. A missing file raises `missing`."""
        try:
            yield
        except AgentLoopError:
            raise
        except FileNotFoundError as error:
            raise (missing or StoreUnreachable)(f"{what} is missing or incomplete in {self.url}") from error
        except Exception as error:  # each kind of store has its own exceptions
            message = f"{self.url}, {what}: {error_line(error)}"
            is_refused = isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS
            raise (StoreRefused if is_refused else StoreUnreachable)(message, param="store") from error


def sync_path(path: Path) -> None:
    """Call fsync on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def chain_of(
    store: VersionStore, version: int, ends_at: Callable[[Index], bool] = lambda index: False
) -> list[Index]:
    """Return the indexes from `version` back to its full version, or until `ends_at` is true for a base (excluded).

    Raises VersionMissing for a gap, and WrongBase if the store's base is not the one that its delta names.
    """
    chain: list[Index] = []
    wanted: int | None = version
    while wanted is not None:
        try:
            index = store.index(wanted)
        except VersionMissing as error:
            if not chain:
                raise
            gap = f"version {chain[-1].version} is a delta to version {wanted}, which is not in the store"
            raise VersionMissing(gap) from error
        named = chain[-1].base_index if chain else None
        if named not in (None, digest(index.raw)):
            raise WrongBase(
                f"version {chain[-1].version} is a delta to a version {wanted} that differs from the store's"
            )
        if ends_at(index):
            break
        chain.append(index)
        wanted = index.base_version
    return chain
