"""Versions through a store: byte for byte in every format, an error for each fault, and kills at any point."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zstandard", reason="needs zstandard (the extra store)")

from agentloop.client.publish import PublishOptions, PublishReport
from agentloop.engine.interface import PublishedSource, PullVersion, WeightUpdate
from agentloop.engine.weight_digest import folder_stamps, read_files
from agentloop.errors import (
    AgentLoopError,
    CheckpointUnreadable,
    ChecksumMismatch,
    InvalidRequest,
    LayoutMismatch,
    PointerMissing,
    PointerWentBack,
    StorageFull,
    StoreUnreachable,
    VersionDamaged,
    VersionMissing,
    WrongBase,
    WrongRun,
)
from agentloop.simulation.engine import SimulatedEngine
from agentloop_servers.weight_transfer.checkpoint import inspect_checkpoint
from agentloop_store.format import stored_tensors
from agentloop_store.local_versions import CONTENT, LocalVersions
from agentloop_store.publisher import VersionPublisher
from agentloop_store.serving import ServedVersions, pull_version
from agentloop_store.store import VersionStore
from tests.support.versions import HASHES, RUN, Tensors, bytes_of, given, held, policy, publish_plainly, train

INDEX = "model.safetensors.index.json"
ENCODINGS = ("xor", "overwrite")


def publisher(tmp_path: Path, **options: object) -> VersionPublisher:
    known = {"cache": str(tmp_path / "cache"), **options}
    return VersionPublisher(PublishOptions(str(tmp_path / "store"), RUN, **known))  # type: ignore[arg-type]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def store_in(tmp_path: Path) -> VersionStore:
    return VersionStore(str(tmp_path / "store"), RUN)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", HASHES)
def test_ours_is_read_back_byte_for_byte_and_a_late_host_takes_the_full_version_and_the_deltas(
    tmp_path: Path, encoding: str, checksum: str
) -> None:
    weights, rng = policy(), np.random.default_rng(1)
    publishing = publisher(tmp_path, encoding=encoding, checksum=checksum, full_every=4)
    follower, reports = LocalVersions(tmp_path / "host"), list[PublishReport]()
    for version in range(7):
        train(weights, rng)
        reports.append(publishing.publish(given(weights), version))
        if version in (1, 2, 4, 6):  # 4 is full; 3 and 5 are skipped
            folder = follower.folder(store_in(tmp_path), version)
            assert held(folder) == bytes_of(weights)
            inspect_checkpoint(str(folder))
    late = LocalVersions(tmp_path / "late").folder(store_in(tmp_path), 6)
    assert held(late) == bytes_of(weights)
    assert [report.base_version for report in reports] == [None, 0, 1, 2, None, 4, 5]
    assert reports[1].num_changed == 3
    assert reports[1].num_bytes < 0.25 * reports[0].num_bytes
    assert sorted(path.name for path in (tmp_path / "host").iterdir()) == [
        "lock",
        "weight_v000004",
        "weight_v000006",
    ]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", HASHES)
def test_a_version_of_another_publisher_is_read_by_the_page_of_its_format(
    tmp_path: Path, encoding: str, checksum: str
) -> None:
    weights, rng = policy(), np.random.default_rng(2)
    old: Tensors | None = None
    for version in range(3):
        publish_plainly(tmp_path / "store", version, weights, old, encoding, checksum)
        old = {name: value.copy() for name, value in weights.items()}
        train(weights, rng)
    assert old is not None
    assert store_in(tmp_path).latest() == 2
    assert held(LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 2)) == bytes_of(old)
    assert publisher(tmp_path).publish(given(weights), 3).base_version == 2, "and ours goes on from it"
    assert held(LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 3)) == bytes_of(weights)


def test_a_publisher_that_begins_anew_goes_on_with_deltas_to_what_the_store_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, rng = policy(), np.random.default_rng(3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for version in range(3):
        train(weights, rng)
        report = publisher(tmp_path, cache=None).publish(given(weights), version)
        assert report.base_version == (version - 1 if version else None)
        # one cache for all publishers of the run
        (cache,) = (tmp_path / "user" / "agentloop" / "publish").iterdir()
        assert held(cache / f"weight_v{version:06d}") == bytes_of(weights)
        if version == 1:
            shutil.rmtree(cache)
    assert not (tmp_path / "tmp").exists()
    assert held(LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 2)) == bytes_of(weights)


def test_a_folder_is_published_and_one_run_does_not_take_another_for_its_own(tmp_path: Path) -> None:
    first, second = policy(1), policy(2)
    (tmp_path / "cache" / "weight_v000001.bak").mkdir(parents=True)  # not one of the store's folders
    publisher(tmp_path).publish(given(first), 1)
    assert "weight_v000001.bak" in names_in(tmp_path / "cache")
    made = LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 1)
    (tmp_path / "store").rename(tmp_path / "gone")
    (tmp_path / "cache").rename(tmp_path / "gone-cache")
    publisher(tmp_path).publish(given(second), 1)
    again = LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 1)
    assert held(again) == bytes_of(second), "the same number of a run that began anew"
    publisher(tmp_path).publish(made, 2)
    assert held(LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 2)) == bytes_of(second)


# Faults


def _edited(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _file(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def _swap_base(folder: Path) -> None:
    """Publish another version 1, as valid as the one that delta 2 is based on."""
    _edited(folder.parent / "weight_v000001" / INDEX, lambda index: index["metadata"].update(content="other"))


FAULTS: dict[str, tuple[Callable[[Path], object], type[AgentLoopError]]] = {
    "torn file": (lambda folder: _cut(_file(folder)), VersionDamaged),
    "flipped bit": (lambda folder: _flip(_file(folder)), CheckpointUnreadable),  # in the frame or its checksum
    "torn index": (lambda folder: _cut(folder / INDEX), VersionDamaged),
    "no file": (lambda folder: _file(folder).unlink(), VersionMissing),
    "no index": (lambda folder: (folder / INDEX).unlink(), VersionMissing),
    "gap": (lambda folder: (folder.parent / "weight_v000001" / INDEX).unlink(), VersionMissing),
    "another base": (_swap_base, WrongBase),
    "base after it": (
        lambda folder: _edited(folder / INDEX, lambda index: index["metadata"].update(base_version="000002")),
        WrongBase,
    ),
    "another number": (
        lambda folder: _edited(folder / INDEX, lambda index: index["metadata"].update(version="000009")),
        VersionDamaged,
    ),
    "path in a name": (
        lambda folder: _edited(folder / INDEX, lambda index: index["weight_map"].update(x="../../x.safetensors")),
        VersionDamaged,
    ),
    "absolute path": (
        lambda folder: _edited(folder / INDEX, lambda index: index["weight_map"].update(x="/etc/x.safetensors")),
        VersionDamaged,
    ),
    "unknown encoding": (
        lambda folder: _edited(folder / INDEX, lambda index: index["metadata"].update(delta_encoding="sum")),
        VersionDamaged,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_an_error_of_its_own_and_nothing_is_activated(tmp_path: Path, fault: str) -> None:
    weights, rng = policy(), np.random.default_rng(4)
    publishing, host = publisher(tmp_path), LocalVersions(tmp_path / "host")
    for version in range(3):
        train(weights, rng)
        publishing.publish(given(weights), version)
        if version == 0:
            before = held(host.folder(store_in(tmp_path), 0))
    spoil, expected = FAULTS[fault]
    folder = tmp_path / "store" / RUN / "weight_v000002"
    spoil(folder)
    with pytest.raises(expected) as raised:
        host.folder(store_in(tmp_path), 2)
    assert "\n" not in raised.value.message
    assert names_in(tmp_path / "host") == ["lock", "weight_v000000"]
    assert held(tmp_path / "host" / "weight_v000000") == before


def test_a_delta_that_is_not_its_bases_is_told_by_its_checksum_or_its_layout(tmp_path: Path) -> None:
    weights, larger = policy(), policy(rows=301)
    cases: dict[str, tuple[Tensors, Tensors, type[AgentLoopError]]] = {
        "other bytes": (flipped(weights, 257), flipped(weights, 256), ChecksumMismatch),
        "larger": (flipped(larger, 1), larger, LayoutMismatch),
        "another name": ({"more": weights["layer.1"] ^ 1}, {"more": weights["layer.1"]}, LayoutMismatch),
    }
    for encoding in ENCODINGS:
        for name, (new, base, expected) in cases.items():
            store = tmp_path / encoding / name
            publish_plainly(store, 1, weights, None)
            publish_plainly(store, 2, new, base, encoding)
            with pytest.raises(expected):
                LocalVersions(tmp_path / "host").folder(VersionStore(str(store), RUN), 2)


def flipped(weights: Tensors, bit: int) -> Tensors:
    return {name: value ^ bit for name, value in weights.items()}


def test_the_pointer_and_the_store_have_their_own_errors(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    with pytest.raises(PointerMissing):
        store.latest()
    publisher(tmp_path).publish(given(policy()), 3)
    with pytest.raises(WrongRun, match=RUN):
        VersionStore(str(tmp_path / "store"), "run-2").latest()
    with pytest.raises(PointerWentBack):
        publisher(tmp_path).publish(given(policy()), 3)
    before = sorted((tmp_path / "store").rglob("*"))
    for every in (1, 16):
        for other in (policy(rows=8), {"layer.0": policy()["layer.0"]}):
            with pytest.raises(LayoutMismatch, match=r"layer\."):
                publisher(tmp_path, full_every=every).publish(given(other), 4)
        as_float16 = [replace(one, dtype="float16") for one in given(policy())]
        with pytest.raises(LayoutMismatch, match=r"layer\.0"):
            publisher(tmp_path, full_every=every).publish(as_float16, 4)
    assert sorted((tmp_path / "store").rglob("*")) == before
    assert store.latest() == 3
    pointer = tmp_path / "store" / RUN / "latest"
    pointer.write_text("run-2/weight_v000004")
    for ask in (store.latest, lambda: publisher(tmp_path).publish(given(policy()), 4)):
        with pytest.raises(WrongRun):
            ask()
    assert pointer.read_text() == "run-2/weight_v000004"
    assert VersionPublisher(PublishOptions(store.url, "run-3", cache=str(tmp_path))).publish(given(policy()), 1)
    for text in ("", "weight_v", f"{RUN}/../weight_v000003", "x" * 300):
        pointer.write_text(text)
        with pytest.raises(VersionDamaged):
            store.latest()
    pointer.unlink()
    pointer.mkdir()
    with pytest.raises(StoreUnreachable):
        store.latest()
    for url, run in (("nothing://x", RUN), (str(tmp_path), "../up"), (str(tmp_path), "")):
        with pytest.raises(InvalidRequest):
            VersionStore(url, run)


def test_a_frame_that_unpacks_to_more_than_the_tensor_takes_no_memory(tmp_path: Path) -> None:
    weights = policy()
    publish_plainly(tmp_path / "store", 1, weights, None)
    bomb = np.zeros(1 << 26, np.uint16)
    publish_plainly(tmp_path / "store", 2, {"layer.0": bomb + 1}, {"layer.0": bomb})
    with pytest.raises(LayoutMismatch, match="larger"):
        LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 2)


def test_a_host_without_room_says_so(tmp_path: Path) -> None:
    publisher(tmp_path).publish(given(policy()), 1)
    (tmp_path / "host").write_text("a file is no folder")
    with pytest.raises(StorageFull):
        LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 1)


def test_a_file_has_its_name_once_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a host loses power before that, no reader finds an incomplete file, pointer or index."""
    published = publisher(tmp_path)
    published.publish(given(policy()), 1)

    def fails(path: Path) -> None:
        raise OSError("no power")

    monkeypatch.setattr("agentloop_store.store.sync_path", fails)
    with pytest.raises(StoreUnreachable, match="no power"):
        published.publish(given(policy(1)), 2)
    assert store_in(tmp_path).latest() == 1
    assert all(name.endswith(".part") for name in names_in(tmp_path / "store" / RUN / "weight_v000002"))


def test_work_that_is_given_up_ends_and_leaves_nothing(tmp_path: Path) -> None:
    def check() -> None:
        raise CheckpointUnreadable("given up")

    publisher(tmp_path).publish(given(policy()), 1)
    with pytest.raises(CheckpointUnreadable, match="given up"):
        LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 1, check)
    assert names_in(tmp_path / "host") == ["lock"]


# Kills

STEPS = """
import sys
from pathlib import Path
import numpy as np
from agentloop_store.local_versions import LocalVersions
from tests.parts.store.test_versions import publisher, store_in
from tests.support.versions import given, policy, train
folder, what, version = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if what == "publish":
    weights, rng = policy(), np.random.default_rng(9)
    for _ in range(version):
        train(weights, rng)
    one = publisher(folder)
    print("begun", flush=True)
    one.publish(given(weights), version)
else:
    print("begun", flush=True)
    LocalVersions(folder / "host").folder(store_in(folder), version)
"""


def _begun(folder: Path, what: str, version: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", STEPS, str(folder), what, str(version)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.slow
def test_whatever_is_killed_the_next_start_goes_on(tmp_path: Path) -> None:
    weights, rng, delays = policy(), np.random.default_rng(9), np.random.default_rng(5)
    for version in range(1, 9):
        train(weights, rng)
        for what in ("publish", "follow"):
            process = _begun(tmp_path, what, version)
            time.sleep(float(delays.uniform(0, 0.03)))
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            store = store_in(tmp_path)
            if what == "publish":
                is_there = (tmp_path / "store" / RUN / "latest").exists() and store.latest() == version
                if not is_there:
                    publisher(tmp_path).publish(given(weights), version)
                assert store.latest() == version
            elif (tmp_path / "host" / f"weight_v{version:06d}").exists():
                assert held(tmp_path / "host" / f"weight_v{version:06d}") == bytes_of(weights), (
                    "complete, or not there"
                )
        assert held(LocalVersions(tmp_path / "host").folder(store_in(tmp_path), version)) == bytes_of(weights)


# A host's copies


def _flip_tensor(folder: Path, name: str, *, keeps_mtime: bool = False) -> None:
    one = stored_tensors(folder)[name]
    before = one.path.stat()
    with one.path.open("r+b") as file:
        file.seek(one.at + 5)
        byte = file.read(1)[0]
        file.seek(one.at + 5)
        file.write(bytes([byte ^ 4]))
    if keeps_mtime:
        os.utime(one.path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _hide(folder: Path) -> None:
    """Make the recorded stamps of a version's files current, as if the disk had changed without a trace."""
    content = json.loads((folder / CONTENT).read_text())
    (folder / CONTENT).write_text(json.dumps({**content, "stamps": folder_stamps(str(folder))}))


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("name", ["layer.0", "layer.2"])  # no delta contains the first one
@pytest.mark.parametrize("damaged", [1, 2])
def test_a_flipped_byte_in_a_hosts_copy_is_found_and_the_copy_is_made_again(
    tmp_path: Path, damaged: int, name: str, is_hidden: bool
) -> None:
    weights, rng = policy(), np.random.default_rng(4)
    publishing, follower = publisher(tmp_path, checksum="blake3"), LocalVersions(tmp_path / "host")
    for version in range(3):
        train(weights, rng)
        publishing.publish(given(weights), version)
        if version:
            follower.folder(store_in(tmp_path), version)
    copy = tmp_path / "host" / f"weight_v{damaged:06d}"
    _flip_tensor(copy, name, keeps_mtime=True)
    if is_hidden:
        _hide(copy)
    train(weights, rng)
    if damaged == 1:
        shutil.rmtree(tmp_path / "host" / "weight_v000002")
        train(weights, rng)
    publishing.publish(given(weights), 3)
    assert held(follower.folder(store_in(tmp_path), 3)) == bytes_of(weights)
    copy = follower.folder(store_in(tmp_path), 3)
    _flip_tensor(copy, name)
    if is_hidden:
        _hide(copy)
    assert held(follower.folder(store_in(tmp_path), 3, is_doubted=is_hidden)) == bytes_of(weights)


@pytest.mark.parametrize("name", ["layer.0", "layer.2"])
def test_a_publishers_damaged_base_makes_no_delta(tmp_path: Path, name: str) -> None:
    weights, rng = policy(), np.random.default_rng(5)
    for version in range(2):
        train(weights, rng)
        publisher(tmp_path).publish(given(weights), version)
    _flip_tensor(tmp_path / "cache" / "weight_v000001", name)
    _hide(tmp_path / "cache" / "weight_v000001")
    train(weights, rng)
    assert publisher(tmp_path).publish(given(weights), 2).base_version == 1
    assert held(LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 2)) == bytes_of(weights)


async def test_an_engine_that_reads_other_bytes_than_were_made_gets_them_made_again(tmp_path: Path) -> None:
    publisher(tmp_path).publish(given(policy()), 1)
    source = PublishedSource(str(tmp_path / "store"), RUN)
    served, update = ServedVersions(source, tmp_path / "host"), WeightUpdate(1, published=source)
    located = await served.located(update)
    assert located.digest == (await read_files(str(located.directory))).digest
    _flip_tensor(Path(str(located.directory)), "layer.0")
    _hide(Path(str(located.directory)))
    engine = SimulatedEngine()
    await engine.start()
    with pytest.raises(ChecksumMismatch):
        await engine.stage(located)
    assert (await engine.stage(await served.located(update))).digest == located.digest
    await engine.close()


def test_a_tensor_without_a_checksum_is_named(tmp_path: Path) -> None:
    publisher(tmp_path).publish(given(policy()), 1)
    path = _file(tmp_path / "store" / RUN / "weight_v000001")
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    del header["__metadata__"]["layer.1"]
    path.write_bytes(data[:8] + json.dumps(header).encode().ljust(start - 8) + data[start:])
    with pytest.raises(VersionDamaged, match=r"no checksum of tensor layer\.1"):
        LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 1)


@pytest.mark.parametrize("place", ["same", "inside", "link", "others' folders", "a version"])
async def test_a_pull_deletes_nothing_that_it_has_not_made(tmp_path: Path, place: str) -> None:
    """X is `local_checkpoint_dir`; versions are stored in X.versions."""
    source = tmp_path / "X.versions"
    publishing = VersionPublisher(PublishOptions(str(tmp_path), source.name, cache=str(tmp_path / "cache")))
    for version in (1, 2, 3):
        publishing.publish(given(policy(version)), version)
    published = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    folder = {
        "same": tmp_path / "X",
        "inside": source / "mine",
        "link": tmp_path / "Y",
        "others' folders": tmp_path / "Z",
        "a version": source / "weight_v000004",
    }[place]
    if place == "link":
        (tmp_path / "Y.versions").symlink_to(source)
    if place == "others' folders":  # a version folder that is not ours
        (tmp_path / "Z.versions").mkdir()
        (tmp_path / "Z.versions" / "weight_v000001").symlink_to(source / "weight_v000001")
        shutil.copytree(source / "weight_v000002", tmp_path / "Z.versions" / "weight_v000002")
        published |= {path: path.read_bytes() for path in (tmp_path / "Z.versions").rglob("*") if path.is_file()}
    order = PullVersion(str(source), str(folder), 3, str(tmp_path / "base"))
    with pytest.raises(InvalidRequest, match=r"X\.versions is the published store|is not a local version"):
        await pull_version(order)
    assert {path: path.read_bytes() for path in published} == published


def test_a_folder_that_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    publisher(tmp_path).publish(given(policy()), 1)
    own = tmp_path / "host" / "weight_v000001"
    shutil.copytree(tmp_path / "store" / RUN / "weight_v000001", own)
    before = held(own)
    with pytest.raises(InvalidRequest, match="weight_v000001 is not a local version"):
        LocalVersions(tmp_path / "host").folder(store_in(tmp_path), 1)
    assert held(own) == before
