"""Published versions in a service: the pointer for the coordinator, and the local folders that engines stage."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentloop.concurrency.aio import in_daemon_thread
from agentloop.engine.interface import PublishedSource, PullVersion, WeightUpdate
from agentloop.errors import CheckpointUnreadable, InvalidRequest, VersionMissing
from agentloop_store.format import Index, stored_tensors
from agentloop_store.local_versions import LocalVersions
from agentloop_store.store import VersionStore


class ServedVersions:
    """The versions of one run on one host."""

    def __init__(self, source: PublishedSource, folder: Path) -> None:
        """`folder` is shared by all replicas of this host. Raises InvalidRequest for an invalid store."""
        self._store = VersionStore(source.store, source.run)
        self._local = LocalVersions(folder)
        self._staged: int | None = None  # the version that was staged last

    async def latest(self) -> int:
        """Return the latest published version. Raises the errors of `VersionStore.latest`."""
        latest: int = await in_daemon_thread(self._store.latest)
        return latest

    async def located(self, update: WeightUpdate) -> WeightUpdate:
        """Convert an update of a published version to an update of a local folder, which is assembled if needed.

        The digest is the update's, or that of the local version when it was written: an engine that reads different
        bytes refuses the folder.
        """
        # If the same version is staged again, an engine may have refused the folder: verify its bytes.
        is_doubted = update.version == self._staged and not update.is_probe
        if not update.is_probe:
            self._staged = update.version
        store = self._store if update.published is None else self._store.named(update.published.names)
        folder = await _made(self._local, store, update.version, is_doubted=is_doubted)
        digest = update.digest or await in_daemon_thread(self._local.digest, update.version)
        return replace(update, published=None, directory=str(folder), digest=digest)


class PulledStore(VersionStore):
    """The versions in one folder. If it has no version 0, the checkpoint `base` is version 0."""

    def __init__(self, folder: Path, base: Path) -> None:
        super().__init__(str(folder.parent), folder.name)
        self._base = base

    def index(self, version: int) -> Index:
        try:
            return super().index(version)
        except VersionMissing:
            if version:
                raise
            files = {name: tensor.path.name for name, tensor in stored_tensors(self._base).items()}
            return Index(0, files, None, raw=bytes(self._base))

    def fetch(self, index: Index, target: Path) -> None:
        if index.raw != bytes(self._base):
            super().fetch(index, target)
            return
        for name in set(index.files.values()):
            shutil.copyfile(self._base / name, target / name)


async def pull_version(order: PullVersion) -> None:
    """Assemble a version on this host, and link the order's path to it. Raises InvalidRequest for a used path."""
    folder, versions = Path(order.folder), Path(f"{order.folder}.versions")
    local = LocalVersions(versions, _pulled_before(folder, versions))
    store = PulledStore(Path(order.source), Path(order.base))
    LocalVersions(folder).check_apart(store)  # the link must not be inside the published store
    target = await _made(local, store, order.version)
    link = target.with_name("link")
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    link.replace(folder)


def _pulled_before(folder: Path, versions: Path) -> str:
    """Return the name of the linked version. Raises InvalidRequest if the path is not a link of an earlier pull."""
    target = folder.resolve()
    if os.path.lexists(folder) and target.parent != versions.resolve():
        raise InvalidRequest(
            f"{folder} exists and is not a link of an earlier pull: use another path", param="local_checkpoint_dir"
        )
    return target.name


async def _made(local: LocalVersions, store: VersionStore, version: int, *, is_doubted: bool = False) -> Path:
    """Run `LocalVersions.folder` in a thread, which stops if the caller is cancelled."""
    is_given_up = threading.Event()

    def check() -> None:
        if is_given_up.is_set():
            raise CheckpointUnreadable("the update was cancelled")

    try:
        make = partial(local.folder, is_doubted=is_doubted)
        folder: Path = await in_daemon_thread(make, store, version, check)
        return folder
    except asyncio.CancelledError:
        is_given_up.set()
        raise
