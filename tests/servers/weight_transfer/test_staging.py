"""A worker's stager over a small torch model: the path that an update takes, and verification by the commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentloop.engine.interface import CommitReport, PushSource, TensorInfo
from agentloop.errors import CheckpointUnreadable, WeightUpdateFailed
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.copy_plan import QuantisedLayer
from agentloop_servers.weight_transfer.layout import lay_out
from agentloop_servers.weight_transfer.receiver import AttemptRestarted, receive
from agentloop_servers.weight_transfer.sender import WeightSender
from agentloop_servers.weight_transfer.staged_weights import Tensors
from agentloop_servers.weight_transfer.staging import WeightStager
from agentloop_servers.weight_transfer.verify import Read
from agentloop_servers.weight_transfer.worker_calls import CheckedFolder, StageOrder, StageProgress, StageState

ROWS, COLUMNS = 12, 8
NAMES = ("left.weight", "right.weight", "norm.weight")


class TwoInOne(torch.nn.Module):
    """Fuses two checkpoint matrices into one parameter, with four rows of padding, like engines do."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(2 * ROWS + 4, COLUMNS))
        self.norm = torch.nn.Parameter(torch.zeros(COLUMNS))

    def load_weights(self, tensors: Tensors) -> None:
        rows = {"left.weight": 0, "right.weight": ROWS}
        for name, tensor in tensors:
            if name == "norm.weight":
                self.norm.data.copy_(tensor)
            else:
                self.fused.data[rows[name] : rows[name] + ROWS].copy_(tensor)
        self.fused.data[2 * ROWS :].fill_(0)


class PlainModel:
    """See `ServedModel`. `num_reloads` counts the loads through the model's own loader."""

    def __init__(self, module: TwoInOne) -> None:
        self.module = module
        self.num_reloads = 0

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self.module.named_parameters()}

    def quantised_layers(self) -> Sequence[QuantisedLayer]:
        return ()

    def reload(self, tensors: Tensors) -> None:
        self.num_reloads += 1
        self.module.load_weights(tensors)

    def compare(self, names: Sequence[str], read: Read) -> tuple[int, int]:
        if not torch.equal(self.module.norm.data, read("norm.weight")[:]):
            raise RuntimeError("the norm is not what was loaded")
        return 1, 2

    def synchronize(self) -> None: ...


class StaleModel(PlainModel):
    """Computes with a copy of its parameters that no update reaches."""

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in super().parameters.items()}


class WipedModel(PlainModel):
    """Loses a row at every read of its parameters, once the test enables it."""

    is_losing = False

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        if self.is_losing:
            self.module.fused.data[3].zero_()
        return super().parameters


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {"left.weight": (ROWS, COLUMNS), "right.weight": (ROWS, COLUMNS), "norm.weight": (COLUMNS,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def infos() -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, "float32", tuple(tensor.shape)) for name, tensor in weights(0).items())


class StagingSite:
    """A stager, its model, and a trainer that listens."""

    def __init__(
        self, kind: type[PlainModel] = PlainModel, *, policy: str = "auto", can_trace: bool = True
    ) -> None:
        self.module = TwoInOne()
        self.model = kind(self.module)
        self.stager = WeightStager(
            self.model, self.module, torch.device("cpu"), 0, policy=policy, can_trace=can_trace, timeout_s=20.0
        )
        self.sender = WeightSender(bucket_bytes=1024)
        self.num_stages = 0
        self.trainer: threading.Thread | None = None
        self.trainer_error: WeightUpdateFailed | None = None

    def load(self, directory: Path, seed: int) -> None:
        """Load the model like an engine's start does."""
        save_file(weights(seed), directory / "model.safetensors")
        self.module.load_weights(iter(weights(seed).items()))
        self.stager.prepare(CheckedFolder(str(directory), infos()))

    def offer(self, seed: int, *, is_reversed: bool = False, bad: float | None = None) -> PushSource:
        tensors = weights(seed)
        if bad is not None:
            tensors["right.weight"][7, 3] = bad
        items = [
            Outgoing(TensorInfo(name, "float32", tuple(tensor.shape)), lambda tensor=tensor: tensor)
            for name, tensor in tensors.items()
        ]
        items = items[::-1] if is_reversed else items
        offer = replace(self.sender.offer(items), num_receivers=1)
        self.trainer = threading.Thread(target=self.train)
        self.trainer.start()
        return offer

    def train(self) -> None:
        try:
            self.sender.run(20.0)
        except WeightUpdateFailed as error:  # expected if a test closes the sender during a push
            self.trainer_error = error

    def stage(self, source: PushSource | CheckedFolder) -> StageProgress:
        self.num_stages += 1
        is_push = isinstance(source, PushSource)
        push, folder = (source, None) if is_push else (None, source)
        self.stager.stage(StageOrder(self.num_stages, push, folder))
        return self.wait()

    def wait(self) -> StageProgress:
        deadline_at = time.monotonic() + 20.0
        while (progress := self.stager.poll(self.num_stages)).state is StageState.RECEIVING:
            assert time.monotonic() < deadline_at
            time.sleep(0.005)
        return progress

    def commit(self) -> CommitReport:
        report = self.stager.commit(self.num_stages)
        if self.trainer is not None:
            self.trainer.join(20.0)
            assert not self.trainer.is_alive()
            assert self.trainer_error is None
        return report

    def assert_holds(self, seed: int) -> None:
        expected = weights(seed)
        fused = torch.cat([expected["left.weight"], expected["right.weight"], torch.zeros(4, COLUMNS)])
        assert torch.equal(self.module.fused.data, fused)
        assert torch.equal(self.module.norm.data, expected["norm.weight"])

    def close(self) -> None:
        self.stager.release()
        self.sender.close()
        if self.trainer is not None:
            self.trainer.join(20.0)


@pytest.fixture
def site() -> Iterator[StagingSite]:
    site = StagingSite()
    yield site
    site.close()


def test_a_proved_plan_is_staged_as_a_shadow_and_swapped_by_copies(site: StagingSite, tmp_path: Path) -> None:
    site.load(tmp_path, seed=1)
    progress = site.stage(site.offer(seed=2))
    assert progress.state == "held"
    assert progress.report is not None
    assert (progress.report.staging_device, progress.report.transport) == ("host", "shm")
    site.assert_holds(1)
    report = site.commit()
    assert report.num_verified == 2
    site.assert_holds(2)
    assert site.model.num_reloads == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("has_plan", [False, True])
def test_values_that_are_no_numbers_are_refused_while_they_are_staged(
    site: StagingSite, tmp_path: Path, has_plan: bool, bad: float
) -> None:
    if has_plan:
        site.load(tmp_path, seed=1)
    progress = site.stage(site.offer(seed=2, bad=bad))
    assert progress.state == "failed"
    assert ("fused" if has_plan else "right.weight") in progress.error
    assert "not finite" in progress.error
    if has_plan:
        site.assert_holds(1)
    site.trainer.join(20.0)
    assert site.trainer_error is None  # its part is done: it receives the update's outcome later
    assert site.stage(site.offer(seed=3)).state == "held"
    site.commit()
    site.assert_holds(3)


@pytest.mark.parametrize("has_plan", [False, True])
def test_values_that_are_no_numbers_fail_a_commit_in_one_phase(tmp_path: Path, has_plan: bool) -> None:
    site = StagingSite(policy="none")
    try:
        if has_plan:
            site.load(tmp_path, seed=1)
        assert site.stage(site.offer(seed=2, bad=float("nan"))).report.staging_device == "nowhere"
        with pytest.raises(CheckpointUnreadable, match="fused has values that are not finite"):
            site.commit()
        site.trainer.join(20.0)
        site.trainer_error = None  # it may have received the error
        site.stage(site.offer(seed=3))
        site.commit()
        site.assert_holds(3)
    finally:
        site.close()


class DividingModel(PlainModel):
    """Divides by a norm that may be zero, like a loader that quantizes."""

    def reload(self, tensors: Tensors) -> None:
        super().reload(tensors)
        self.module.fused.data /= self.module.norm.data.sum() - self.module.norm.data.sum()


def test_values_that_a_loader_makes_of_numbers_fail_the_commit() -> None:
    site = StagingSite(DividingModel, can_trace=False)
    try:
        assert site.stage(site.offer(seed=2)).state == "held"
        with pytest.raises(CheckpointUnreadable, match="fused has values that are not finite"):
            site.commit()
    finally:
        site.close()


def test_a_plan_serves_tensors_in_any_order(site: StagingSite, tmp_path: Path) -> None:
    site.load(tmp_path, seed=1)
    source = site.offer(seed=2, is_reversed=True)
    site.stager.stage(StageOrder(1, source))
    site.num_stages = 1
    assert site.wait().state == "held"
    site.commit()
    site.assert_holds(2)
    assert site.model.num_reloads == 0


def test_a_directory_is_staged_the_same_way(site: StagingSite, tmp_path: Path) -> None:
    site.load(tmp_path, seed=1)
    (tmp_path / "next").mkdir()
    save_file(weights(2), tmp_path / "next" / "model.safetensors")
    assert site.stage(CheckedFolder(str(tmp_path / "next"), infos())).report.staging_device == "host"
    site.assert_holds(1)
    site.commit()
    site.assert_holds(2)
    assert site.model.num_reloads == 0


def test_dummy_weights_are_loaded_once_by_the_model_itself_which_proves_the_plan(site: StagingSite) -> None:
    for seed, num_reloads in ((1, 1), (2, 1), (3, 1)):
        assert site.stage(site.offer(seed)).report.staging_device == "host"
        site.commit()
        site.assert_holds(seed)
        assert site.model.num_reloads == num_reloads


def test_a_model_that_computes_with_copies_goes_through_its_loader(tmp_path: Path) -> None:
    site = StagingSite(can_trace=False)
    try:
        site.load(tmp_path, seed=1)
        site.stage(site.offer(seed=2))
        site.assert_holds(1)
        assert site.commit().num_unverified == 2
        site.assert_holds(2)
        assert site.model.num_reloads == 1
    finally:
        site.close()


@pytest.mark.parametrize("can_trace", [True, False])
def test_one_phase_receives_in_the_commit(can_trace: bool, tmp_path: Path) -> None:
    site = StagingSite(policy="none", can_trace=can_trace)
    try:
        site.load(tmp_path, seed=1)
        progress = site.stage(site.offer(seed=2))
        assert progress.state == "held"
        assert (progress.report.staging_device, progress.report.transfer_ms) == ("nowhere", 0.0)
        site.assert_holds(1)
        assert site.commit().transfer_ms > 0
        site.assert_holds(2)
        assert site.model.num_reloads == (0 if can_trace else 1)
    finally:
        site.close()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(StaleModel, "was replaced"), (WipedModel, "parameter fused differs from the staged weights")],
)
def test_a_commit_that_did_not_arrive_is_found(kind: type[PlainModel], reason: str, tmp_path: Path) -> None:
    site = StagingSite(kind)
    try:
        site.load(tmp_path, seed=1)
        site.stage(site.offer(seed=2))
        if isinstance(site.model, WipedModel):
            site.model.is_losing = True
        with pytest.raises(RuntimeError, match=reason):
            site.commit()
    finally:
        site.close()


def test_a_trainer_that_goes_away_fails_the_stage_and_nothing_else(site: StagingSite, tmp_path: Path) -> None:
    site.load(tmp_path, seed=1)
    offer = site.sender.offer([Outgoing(info, lambda: torch.zeros(0)) for info in infos()])
    site.num_stages += 1
    site.stager.stage(StageOrder(site.num_stages, replace(offer, num_receivers=1)))
    site.sender.close()
    progress = site.wait()
    assert progress.state == "failed"
    assert progress.error
    with pytest.raises(RuntimeError, match="is not held"):
        site.stager.commit(site.num_stages)
    site.assert_holds(1)


def test_a_dropped_stage_lets_go_of_the_trainer(site: StagingSite, tmp_path: Path) -> None:
    site.load(tmp_path, seed=1)
    offer = site.sender.offer([Outgoing(info, lambda: torch.zeros(0)) for info in infos()])
    site.stager.stage(StageOrder(1, replace(offer, num_receivers=2)))  # the other receiver never joins
    site.stager.drop(1)
    assert site.stager.poll(1).state == "failed"
    site.num_stages = 1
    assert site.stage(site.offer(seed=3)).state == "held"
    site.commit()
    site.assert_holds(3)


@pytest.mark.parametrize("can_trace", [True, False])
def test_what_was_pushed_can_be_given_on(can_trace: bool, tmp_path: Path) -> None:
    """The source are the parameters or, where they cannot be read back, the tensors that the push delivered."""
    site, other = StagingSite(can_trace=can_trace), StagingSite(can_trace=can_trace)
    try:
        site.load(tmp_path, seed=1)
        other.load(tmp_path, seed=1)
        site.stage(site.offer(seed=2))
        site.commit()
        given = site.stager.offer("a token")
        assert given is not None
        assert other.stage(replace(given, num_receivers=1)).state == "held"
        other.commit()
        other.assert_holds(2)
    finally:
        site.close()
        other.close()


def test_a_pass_that_restarts_while_it_is_compared_is_received_again() -> None:
    """Another worker can be lost after this one has received every bucket."""
    info = TensorInfo("a", "float32", (2,))
    data = view_bytes(torch.tensor([1.0, 2.0]))

    class Restarting:
        layout = lay_out([info])
        num_attempts = 0

        def receive_attempt(self) -> Iterator[tuple[int, torch.Tensor]]:
            self.num_attempts += 1
            yield 0, data

        def finish(self) -> None:
            if self.num_attempts == 1:
                raise AttemptRestarted("another worker was lost")

    incoming, found = Restarting(), []
    receive(incoming, lambda name, tensor: found.append((name, tensor.tolist())))  # type: ignore[arg-type]
    assert found == [("a", [1.0, 2.0])] * 2
    assert incoming.num_attempts == 2


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tensor.view(torch.uint8), (0, 4096 - tensor.nbytes))
