"""A weight version is a number and a content: a replica that has other bytes under the number does not serve."""

import asyncio
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agentloop.api.coordinator import ReplicaRegistration
from agentloop.engine.interface import Adapter, StageReport, StagingDevice, WeightUpdate
from agentloop.engine.weight_digest import ADAPTER_CONFIG, are_comparable, read_files
from agentloop.errors import CheckpointUnreadable, ChecksumMismatch, Conflict
from agentloop.fleet.desired_state import FleetWeights
from agentloop.fleet.registry import ReplicaState
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.types import KVPolicy
from agentloop_servers.weight_transfer.checkpoint import inspect_checkpoint, read_contents
from tests.support.fleet.pushes import Receiver, Wire
from tests.support.fleet.weights import FleetSite, virtual
from tests.support.versions import write_file

KEEP = KVPolicy.KEEP


def write(folder: Path, seed: int, name: str = "model.safetensors", **tensors: np.ndarray) -> Path:
    """Write random weights that are larger than one piece of a read."""
    rng = np.random.default_rng(seed)
    tensors = tensors or {key: rng.integers(0, 2**14, (600, 1000), np.uint16) for key in ("a", "b")}
    folder.mkdir(exist_ok=True)
    own = {key: ("BF16", list(value.shape), value.tobytes()) for key, value in tensors.items()}
    write_file(folder / name, own, {})
    return folder


class Site(FleetSite):
    """A fleet of simulated engines that read `model`. With `can_relay` they send each other their weights."""

    def __init__(self, clock, model: Path, *, can_relay: bool = True) -> None:
        super().__init__(clock, initial=(WeightUpdate(0, str(model)), KEEP))
        self.model = str(model)
        self.wire = Wire(clock, can_relay=can_relay)

    async def start(self, replica_id: str, **parts) -> SimulatedEngine:
        """Start a replica's process, or restart it."""
        self.fleet.deregister(replica_id)
        receiver = parts.setdefault("weight_source", Receiver(self.wire))
        engine = SimulatedEngine(SimulatedSpec(model=self.model), clock=self.clock, **parts)
        receiver.engine = self.engines[replica_id] = engine
        await engine.start()
        self.fleet.register(registration(replica_id, engine), self.clock.now())
        self.sync.keep_digest()
        return engine

    async def push_folder(self, version: int, folder: Path, force: bool = False):
        return await self.sync.update_weights(WeightUpdate(version, str(folder)), KEEP, force)


def registration(replica_id: str, engine: SimulatedEngine, digest: str | None = None) -> ReplicaRegistration:
    digest = engine.weight_digest if digest is None else digest
    return ReplicaRegistration(
        replica_id, f"fake://{replica_id}", engine.info, engine.weight_version, weight_digest=digest
    )


async def two_replicas(clock, tmp_path: Path, **options) -> Site:
    site = Site(clock, write(tmp_path / "model", 0), **options)
    for name in ("a", "b"):
        await site.start(name)
        assert await site.late.bring_up(name)
    return site


async def refusal(site: Site, replica_id: str) -> str:
    """Return the error that prevents a replica from joining."""
    with pytest.raises(CheckpointUnreadable):
        await site.late.bring_up(replica_id)
    assert site.state(replica_id) is ReplicaState.JOINING
    return site.fleet.get(replica_id).error or ""


# Changes that a trainer makes to the folder after the push of version 5. The second keeps size, mtime and inode.
CHANGES = {
    "rewritten": lambda folder: write(folder, 2),
    "one bit": lambda folder: flip(folder / "model.safetensors"),
    "another shape": lambda folder: write(folder, 2, a=np.zeros((3, 4), np.uint16)),
    "one more file": lambda folder: write(folder, 2, "more.safetensors", c=np.ones(3, np.uint16)),
    "gone": shutil.rmtree,
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("can_relay", [True, False])
def test_a_late_replica_of_a_rewritten_folder_copies_from_a_peer_or_is_refused(tmp_path, change, can_relay):
    @virtual
    async def test(clock):
        site = await two_replicas(clock, tmp_path, can_relay=can_relay)
        latest = write(tmp_path / "latest", 1)
        await site.push_folder(5, latest)
        digest = site.engines["a"].weight_digest
        CHANGES[change](latest)
        late = await site.start("b")
        if can_relay:
            assert await site.late.bring_up("b")
            assert (late.weight_version, late.weight_digest) == (5, digest)
        else:
            error = await refusal(site, "b")
            assert "version 5" in error
            assert str(latest.name) in error
            assert site.placeable() == ["a"]
            await site.push_folder(6, write(tmp_path / "next", 3))  # a new version resolves the refusal
            assert site.placeable() == ["a", "b"]

    test()


@pytest.mark.parametrize("can_relay", [True, False])
def test_the_model_folder_is_version_0_with_its_content(tmp_path, can_relay):
    @virtual
    async def test(clock):
        site = await two_replicas(clock, tmp_path, can_relay=can_relay)
        assert site.sync.desired.weights.served.update.digest == site.engines["a"].weight_digest
        late = await site.start("b")
        assert await site.late.bring_up("b")  # the same bytes
        write(tmp_path / "model", 9)
        late = await site.start("b")
        assert site.placeable() == ["a"]
        if can_relay:
            assert await site.late.bring_up("b")
            assert late.weight_digest == site.engines["a"].weight_digest
        else:
            assert "model has changed: its digest is" in await refusal(site, "b")

    test()


def test_a_repeat_is_recognized_by_its_content(tmp_path):
    @virtual
    async def test(clock):
        site = await two_replicas(clock, tmp_path)
        latest = write(tmp_path / "latest", 1)
        report = await site.push_folder(5, latest)
        assert await site.push_folder(5, latest) == report
        write(latest, 1)  # the same bytes with another mtime
        assert await site.push_folder(5, latest) == report
        assert await site.push_folder(5, write(tmp_path / "copy", 1)) == report
        served = site.engines["a"].weight_digest
        found = (await read_files(str(write(latest, 2)))).digest
        with pytest.raises(Conflict, match="version 5") as caught:
            await site.push_folder(5, latest)
        assert served in str(caught.value)
        assert found in str(caught.value)
        assert site.engines["b"].weight_digest == served
        await site.push_folder(5, latest, force=True)
        assert {engine.weight_digest for engine in site.engines.values()} == {found}

    test()


class SummedReceiver(Receiver):
    """A receiver of pushes whose tokens are a number followed by their content."""

    async def stage(self, update: WeightUpdate) -> StageReport:
        return StageReport(StagingDevice.HOST, "shm", digest=f"sums:{update.push.token.partition(' ')[2]}")


def test_a_version_that_no_replica_holds_any_more_keeps_its_content(tmp_path):
    """Otherwise records of one version could have two contents."""

    @virtual
    async def test(clock):
        site = await two_replicas(clock, tmp_path)
        latest = write(tmp_path / "latest", 1)
        await site.push_folder(5, latest)
        await site.sync.sleep(2)
        write(latest, 2)
        with pytest.raises(CheckpointUnreadable, match="has changed: its digest is"):
            await site.push_folder(5, latest)
        write(latest, 1)
        await site.push_folder(5, latest)
        await site.sync.sleep(2)
        write(latest, 2)
        await site.push_folder(5, latest, force=True)

    test()


def test_a_repeated_push_is_compared_by_its_senders_checksums(tmp_path):
    @virtual
    async def test(clock):
        site = await two_replicas(clock, tmp_path)
        for name in ("a", "b"):
            await site.start(name, weight_source=SummedReceiver(site.wire))
            assert await site.late.bring_up(name)
        report = await site.push(5, token="1 good")
        assert await site.push(5, token="1 good") == report  # the repeated call sends nothing
        assert await site.push(5, token="2 good") == report
        with pytest.raises(Conflict, match=r"version 5 is served with digest sums:good.*sums:other"):
            await site.push(5, token="3 other")
        assert {engine.weight_digest for engine in site.engines.values()} == {"sums:good"}
        assert (await site.push(6, token="4 other")).version == 6

    test()


def test_a_repeat_reads_contents_only_if_a_files_stamp_changed(tmp_path):
    @virtual
    async def test(clock):
        site = await two_replicas(clock, tmp_path)
        latest, reads = write(tmp_path / "latest", 1), []

        async def counted(directory):
            reads.append(directory)
            return await read_files(directory)

        for name in ("a", "b"):
            await site.start(name, read_folder=counted)
            assert await site.late.bring_up(name)
        await site.push_folder(5, latest)
        assert len(reads) == 2
        await site.push_folder(5, latest)
        assert len(reads) == 2
        write(latest, 1)
        await site.push_folder(5, latest)
        assert len(reads) == 3

    test()


@pytest.mark.parametrize("at", ["model.safetensors", "more.safetensors"])
def test_a_folder_that_changes_while_it_is_staged_is_refused_by_its_file(tmp_path, at):
    latest = write(tmp_path / "latest", 1)
    reading = read_files(str(latest))
    reading.send(None)  # reads the first piece
    checkpoint = inspect_checkpoint(str(latest))
    write(latest, 2, at, c=np.ones(3, np.uint16))
    with pytest.raises(CheckpointUnreadable, match=f"{at} in .*latest changed"):
        list(iter(partial(reading.send, None), read_files))  # reads the rest
    if at == "more.safetensors":  # otherwise the header that was read belongs to another file
        with pytest.raises(CheckpointUnreadable, match=f"{at} in .*latest changed"):
            read_contents(str(latest), checkpoint)


def test_replicas_that_read_different_bytes_refuse_the_update(tmp_path):
    @virtual
    async def test(clock):
        site = await two_replicas(clock, tmp_path)

        async def late_reader(directory):
            await clock.sleep(1.0)
            return await read_files(directory)

        await site.start("b", read_folder=late_reader)
        assert await site.late.bring_up("b")
        latest = write(tmp_path / "latest", 1)
        pushing = asyncio.create_task(site.push_folder(5, latest))
        await clock.sleep(0.5)
        write(latest, 2)
        with pytest.raises(CheckpointUnreadable, match="different weights for version 5"):
            await pushing
        assert site.fleet.weight_version == 0
        assert site.placeable() == ["a", "b"]

    test()


@virtual
async def test_a_stored_version_without_a_digest_takes_that_of_the_first_replica(clock):
    site = FleetSite(clock)
    served = FleetSite(clock, initial=(WeightUpdate(3, "dir"), KEEP)).sync.desired.weights.served
    site.sync.restore(FleetWeights(served=served), None)
    engine = SimulatedEngine(SimulatedSpec(initial_version=3), clock=clock)
    await engine.start()
    site.engines["a"] = engine
    site.fleet.register(registration("a", engine, "xxh3:1"), 0.0)
    site.sync.keep_digest()
    assert site.sync.desired.weights.served.update.digest == "xxh3:1"
    assert await site.late.bring_up("a")
    site.engines["b"] = engine
    assert site.fleet.register(registration("b", engine, "xxh3:2"), 0.0).weight_version is None


def test_an_adapters_name_and_version_are_of_one_content(tmp_path):
    """The adapter's scaling is part of its configuration, so the digest covers the configuration."""

    @virtual
    async def test(clock):
        engine = SimulatedEngine(SimulatedSpec(max_loras=2, lora_rank=8), clock=clock)
        await engine.start()
        folder = write(tmp_path / "adapter", 1)
        (folder / ADAPTER_CONFIG).write_text('{"lora_alpha": 8}')
        push = partial(Adapter, "a", 1, str(folder))
        digest = (await engine.load_adapter(push())).digest
        (folder / ADAPTER_CONFIG).write_text('{"lora_alpha": 16}')
        # the adapter is loaded, so nothing is read
        assert (await engine.load_adapter(push(digest))).digest == digest
        await engine.unload_adapter("a")
        with pytest.raises(ChecksumMismatch, match="has changed: its digest is"):
            await engine.load_adapter(push(digest))

    test()


def test_digests_are_of_tensors_and_not_of_files(tmp_path):
    @virtual
    async def test(clock):
        one, two = np.arange(6, dtype=np.uint16).reshape(2, 3), np.ones(4, np.uint16)
        whole = write(tmp_path / "whole", 0, a=one, b=two)
        parts = write(tmp_path / "parts", 0, "1.safetensors", b=two)
        write(parts, 0, "2.safetensors", a=one)
        others = [
            write(tmp_path / "shape", 0, a=one.T.copy().reshape(3, 2), b=two),
            write(tmp_path / "name", 0, c=one, b=two),
            write(tmp_path / "value", 0, a=one + 1, b=two),
        ]
        digest = (await read_files(str(whole))).digest
        assert (await read_files(str(parts))).digest == digest
        assert digest not in [(await read_files(str(other))).digest for other in others]
        assert not are_comparable(digest, "sums:1")

    test()
