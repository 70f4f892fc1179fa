"""Evaluations on a simulated service: samples, errors, files, and the command."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import orjson
import pytest
from safetensors.torch import load_file

from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest
from agentloop.rollout import Environment
from agentloop.rollout.environment import tasks_of
from agentloop.types import Limits, Message, RolloutTask, StopReason
from agentloop_eval import Evaluation, evaluate, figures_of
from agentloop_eval.evaluation import sample_of
from agentloop_servers.config.service import CHECKOUT
from tests.support.records.samples import make_trajectory
from tests.support.service.whole_service import simulated_config, whole_service, whole_site

HERE = "tests.parts.eval.test_evaluation"


class Parity(Environment):
    """Rewards an answer with an even number of characters. The reward raises for the task `broken`."""

    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        limits = Limits(max_turns=1, max_tokens_per_turn=12)
        for name in ("first", "second", "broken"):
            yield RolloutTask(name, (Message("user", f"Answer {name}."),), limits=limits)

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        if task.task_id == "broken":
            raise RuntimeError("the checker failed")
        return float(len(messages[-1].content) % 2 == 0)


class Even(Parity):
    """A second category with different ids."""

    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        for task in super().tasks():
            if task.task_id != "broken":
                yield replace(task, task_id=f"even-{task.task_id}")


async def test_each_task_has_its_samples_and_a_failed_checker_is_an_error(tmp_path: Path) -> None:
    tasks = [*tasks_of(f"{HERE}:Parity"), *tasks_of(f"{HERE}:Even")]
    num_reported = 0

    def on_sample() -> None:
        nonlocal num_reported
        num_reported += 1

    async with whole_service(simulated_config(), tmp_path) as url, RolloutClient(url) as client:
        result = await evaluate(client, tasks, num_samples=4, on_sample=on_sample)
    assert num_reported == 20
    assert [task.task_id for task in result.tasks] == ["first", "second", "broken", "even-first", "even-second"]
    by_id = {task.task_id: task.samples for task in result.tasks}
    assert all(len(samples) == 4 for samples in by_id.values())
    assert all(sample.reward is None and "the checker failed" in sample.error for sample in by_id["broken"])
    judged = [sample for name, samples in by_id.items() if name != "broken" for sample in samples]
    assert all(sample.reward in (0.0, 1.0) and not sample.error for sample in judged)
    assert all(0 < sample.num_tokens <= 12 and sample.versions == {"0": sample.num_tokens} for sample in judged)
    everything, broken = figures_of(result), figures_of(result, f"{HERE}:Parity")
    assert (everything.num_judged, everything.num_errors, broken.num_errors) == (16, 4, 4)
    assert everything.pass_at_1 is not None
    assert everything.pass_at_1.mean == pytest.approx(sum(sample.reward for sample in judged) / 16)
    path = result.save(tmp_path / "out")
    assert Evaluation.load(path) == Evaluation.load(path.parent) == result
    with pytest.raises(FileExistsError):
        result.save(tmp_path / "out")


class Gated(Parity):
    """Its samples end after the test has opened the gate."""

    gate: ClassVar[asyncio.Event]

    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        for task in super().tasks():
            yield replace(task, task_id=f"gated-{task.task_id}")

    async def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        await self.gate.wait()
        return 1.0


@pytest.mark.parametrize("is_pushed", [False, True])
async def test_held_replicas_sample_one_version_while_a_trainer_updates_the_others(
    tmp_path: Path, is_pushed: bool
) -> None:
    """They catch up from the folder. Simulated engines send no weights, so after pushes they need another one."""
    Gated.gate, folder = asyncio.Event(), CHECKOUT / "examples" / "tiny_policy" / "v1"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = simulated_config(mode="standalone", replicas=3)
    async with (
        whole_site(config, run_dir) as site,
        RolloutClient(site.urls[0]) as client,
        RolloutClient(site.urls[0]) as trainer,
    ):
        evaluating = asyncio.create_task(
            evaluate(client, tasks_of(f"{HERE}:Gated"), num_samples=40, hold=1, on_sample=lambda: None)
        )
        while not (held := (await trainer.status()).holds):
            await asyncio.sleep(0.01)
        weights = load_file(folder / "model.safetensors") if is_pushed else str(folder)
        for version in range(1, 6):
            report = await trainer.update_weights(weights, version=version)
            assert {one.error for one in report.replicas} == {None}
            assert {one.replica_id for one in report.replicas}.isdisjoint(held[0].replicas)
        status = await trainer.status()
        assert [one.replica_id for one in status.replicas if one.weight_version == 0] == [*held[0].replicas]
        Gated.gate.set()
        result = await evaluating
        async with asyncio.timeout(60):
            while {one.weight_version for one in status.replicas} != {version}:
                if is_pushed:
                    version += 1
                    await trainer.update_weights(weights, version=version)
                status = await trainer.status()
        assert status.holds == ()
    figures = figures_of(result)
    assert (result.held_version, result.hold_note) == (0, "")
    assert (figures.num_judged, figures.num_errors, set(figures.version_shares)) == (120, 0, {"0"})


async def test_the_command_writes_what_compare_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    async def run(*arguments: str) -> tuple[int | None, str]:
        command = sys.executable, "-c", "from agentloop_servers.cli import main; main()", "eval", *arguments
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        process = await asyncio.create_subprocess_exec(*command, **pipes)
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    async with whole_service(simulated_config(), tmp_path) as url:
        for name in ("a", "b"):
            common = ("-k", "2", "--url", url, "--out", str(tmp_path / name))
            code, output = await run(f"{HERE}:Parity", f"{HERE}:Even", *common)
            assert code == 0, output
            assert "4 errors" not in output
            assert "2 errors" in output
            assert "pass@2" in output
        code, output = await run(f"{HERE}:Even", "-k", "2", "--url", url, "--out", str(tmp_path / "a"))
        assert code == 1
        code, output = await run(
            f"{HERE}:Even", "-k", "2", "--url", url, "--hold", "1", "--out", str(tmp_path / "c")
        )
        assert code == 0, output
        assert "all samples are of weight version 0" in output
        code, output = await run(f"{HERE}:Even", "--url", url, "--hold", "2", "--out", str(tmp_path / "d"))
        assert (code, "cannot hold 2 replica(s): 2 are ready" in output, "at most 1" in output) == (1, True, True)
        code, output = await run(f"{HERE}:Even", "--url", url, "--model", "nobody", "--out", str(tmp_path / "d"))
        assert (code, "nobody" in output) == (1, True), output
    assert len(orjson.loads((tmp_path / "a" / "evaluation.json").read_bytes())["tasks"]) == 5
    code, output = await run("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0, output
    assert "95 % confidence interval" in output
    code, output = await run("compare", str(tmp_path / "a"), str(tmp_path / "c"))
    assert (code, "different tasks: 3" in output) == (1, True)
    code, output = await run("compare", str(tmp_path / "a"), str(tmp_path / "nothing"))
    assert (code, "cannot read the evaluation" in output) == (1, True)


async def test_tasks_without_distinct_ids_are_refused() -> None:
    [task, *_] = tasks_of(f"{HERE}:Parity")
    async with RolloutClient("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest, match="'first'"):
            await evaluate(client, [task, task])
        with pytest.raises(InvalidRequest, match="no tasks"):
            await evaluate(client, [])


@pytest.mark.parametrize(
    ("changes", "reward", "error"),
    [
        ({"reward": 0.5}, 0.5, ""),
        ({"reward": 0.0, "is_complete": False, "error": "no replica"}, None, "no replica"),
        ({"reward": None, "reward_error": "the judge did not answer"}, None, "the judge did not answer"),
        ({"reward": None, "stop_reason": StopReason.STALE, "is_complete": False}, None, "no reward (stale)"),
    ],
)
def test_a_sample_without_a_reward_is_an_error_and_no_zero(changes, reward, error) -> None:
    sample = sample_of(replace(make_trajectory(), **{"error": None, "reward_error": None, **changes}))
    assert (sample.reward, sample.error) == (reward, error)
