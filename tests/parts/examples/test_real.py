"""The training of published models: its tasks, its checkpoints, and a trainer that is killed and continues."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console

from agentloop.api.facts import FactsQuery
from agentloop.client import RolloutClient
from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText
from agentloop.rollout import Environment
from agentloop.types import Limits, Message, RolloutTask
from agentloop.values.mismatch import mismatch
from agentloop_servers.chat_format.load import load_chat_format
from agentloop_servers.config.service import ServiceConfig
from examples.train import grpo
from examples.train.checkpoint import load_checkpoint, save_checkpoint, serve_weights
from examples.train.grpo import Recipe, Step, Training, logprobs_of, optimizer_of, train_step
from examples.train.tasks import environment_tasks, training_tasks
from tests.parts.examples.test_train import ablations, groups, rows, service  # noqa: F401 - fixtures
from tests.support.families.table import write_family
from tests.support.service.whole_service import simulated_config, whole_service
from tests.support.transfer.adapters import POLICY, shipped_policy

# Plots take seconds to import.
real, results = (importlib.import_module(f"examples.train.{name}") for name in ("real", "results"))
pytestmark = pytest.mark.usefixtures("one_thread")

ENVIRONMENT = f"{__name__}:Evenness"
SMALL = (
    "--steps",
    "7",
    "--groups",
    "2",
    "--group-size",
    "2",
    "--held-out",
    "2",
    "--samples",
    "1",
    "--eval-every",
    "3",
)


class Evenness(Environment):
    """Sixty questions; an answer of odd length has the reward 1."""

    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        for task in islice(training_tasks(seed=3), 60):
            limits = Limits(max_turns=1, max_tokens_per_turn=12)
            yield RolloutTask(
                task.task_id, task.messages, loop="single_turn", reference=task.task_id, limits=limits
            )

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[str] | None:
        return ["odd"]

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        return float(len(messages[-1].content) % 2)


def trained_step(version: int) -> Step:
    names = dict.fromkeys(Step.__dataclass_fields__, 0)
    return Step(
        **{**names, "version": version, "mismatch": mismatch([], []), "k3_by_lag": {"0": 0.5}, "tasks": ("a",)}
    )


def test_held_out_tasks_shown_tasks_and_trained_tasks_share_no_question() -> None:
    held_out, stream = environment_tasks(ENVIRONMENT, 16, num_shown=2, max_tokens=5)
    trained = list(islice(stream, 42 + 42))  # two epochs of the other tasks
    questions = [{task.messages[-1].content for task in tasks} for tasks in (held_out, trained)]
    shown = {held_out[0].messages[0].content, held_out[0].messages[2].content}
    assert [len(one) for one in (*questions, shown)] == [16, 42, 2]
    assert not questions[0] & questions[1]
    assert not shown & (questions[0] | questions[1])
    assert len({task.task_id for task in (*held_out, *trained)}) == 16 + 84
    for task in (held_out[0], trained[0]):
        assert [message.role for message in task.messages] == ["user", "assistant"] * 2 + ["user"]
        assert (task.messages[1].content, task.limits.max_tokens_per_turn) == ("odd", 5)


def test_generated_tasks_come_from_other_seeds() -> None:
    pytest.importorskip("reasoning_gym")
    held_out, stream = environment_tasks("reasoning_gym:letter_counting", 8, seed=1, num_shown=1)
    assert {task.task_id for task in held_out} < {f"letter_counting/1/{number}" for number in range(9)}
    assert [task.task_id for task in islice(stream, 2)] == ["letter_counting/1002/0-0", "letter_counting/1002/1-0"]
    assert [message.role for message in held_out[0].messages] == ["system", "user", "assistant", "user"]


def test_shown_answers_may_be_tool_calls() -> None:
    pytest.importorskip("bfcl_eval")
    [held_out], _ = environment_tasks("bfcl:simple_python", 1, num_shown=1)
    assert [message.role for message in held_out.messages] == ["user", "assistant", "user"]
    [call] = held_out.messages[1].tool_calls
    assert call.id.endswith("-0")
    assert call.name
    assert call.arguments


def test_the_gpu_config_reads_the_calls_that_the_coder_models_write(tmp_path: Path) -> None:
    family = write_family(tmp_path, "qwen2_5")
    config = ServiceConfig.load(real.HERE / "real_gpu.yaml")
    chat = load_chat_format(family, config.chat)
    assert (chat.name, chat.renderer.facts.supports_tools) == ("derived", True)
    text = '```json\n{\n  "name": "area",\n  "arguments": {\n    "base": 10\n  }\n}\n```'
    turn = chat.parser.parse(DecodedText(text, ()), (), 0)
    assert [(call.name, call.arguments) for call in turn.calls] == [("area", {"base": 10})]


def test_task_sets_that_cannot_be_split_or_shown_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"all 60 tasks of .* are held out: choose a lower --held-out"):
        next(environment_tasks(ENVIRONMENT, 60)[1])
    with pytest.raises(InvalidRequest, match="has no published answer of one turn: use --shots 0"):
        environment_tasks("examples.14_shop:Shop", 1, num_shown=1)


def test_logprobs_in_chunks_and_their_gradients_equal_those_at_once(
    rows: list[grpo.TrainingRow],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for chunk in (4096, 5):
        monkeypatch.setattr(grpo, "CHUNK", chunk)
        model = shipped_policy()
        logprobs = logprobs_of(model, rows[:4])
        logprobs.sum().backward()
        found.append((logprobs.detach(), model.lm_head.weight.grad, model.model.layers[0].mlp.up_proj.weight.grad))
    assert len(found[0][0]) > 5
    for at_once, in_chunks in zip(*found, strict=True):
        torch.testing.assert_close(in_chunks, at_once, atol=1e-4, rtol=1e-4)


def test_bfloat16_is_for_computing_and_the_weights_stay_float32(rows: list[grpo.TrainingRow]) -> None:  # noqa: F811
    found = {}
    for compute in ("float32", "bfloat16"):
        model = shipped_policy()
        recipe = Recipe(compute=compute)
        found[compute] = train_step(model, optimizer_of(model, recipe), rows, recipe)["mismatch"]
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert found["float32"].k3_kl < 1e-6 < found["bfloat16"].k3_kl < 1e-3


def test_a_checkpoint_restores_everything_and_a_failed_one_leaves_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = shipped_policy(), tmp_path / "checkpoint.pt"
    training = Training(optimizer_of(model, Recipe()), 4, [trained_step(3), trained_step(4)], "position")
    model.lm_head.weight.sum().backward()
    training.optimizer.step()
    save_checkpoint(file, model, training)
    other = shipped_policy()
    found = load_checkpoint(file, other, optimizer_of(other, Recipe()))
    assert (found.version, found.position, found.steps) == (4, "position", training.steps)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert found.optimizer.state_dict()["state"][0]["step"] == 1

    def fail(state: object, stream: io.BufferedWriter) -> None:
        stream.write(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="full"):
        save_checkpoint(file, model, training)
    assert load_checkpoint(file, other, optimizer_of(other, Recipe())).version == 4


async def test_the_versions_of_a_lost_process_are_not_used_again(tmp_path: Path) -> None:
    model = shipped_policy()
    async with whole_service(simulated_config(mode="standalone"), tmp_path) as url, RolloutClient(url) as client:
        training = Training(optimizer_of(model, Recipe()), 2)
        assert await serve_weights(client, model, training)
        assert (training.version, (await client.status()).weight_version) == (3, 3)
        assert not await serve_weights(client, model, training)
        training.version = 1  # as in an older checkpoint
        assert await serve_weights(client, model, training)
        assert training.version == 4


def test_a_missing_logger_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    printed = io.StringIO()
    log = results.log_of("wandb", tmp_path, Console(file=printed, width=200))
    log(1, {"train/reward": 0.5})
    assert printed.getvalue().count("\n") == 1
    assert "pip install -e '.[wandb]'" in printed.getvalue()


def test_tensorboard_gets_the_numbers_of_a_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = results.log_of("tensorboard", tmp_path, Console())
    log(1, {"train/reward": 0.5})
    assert any((tmp_path / "tensorboard").iterdir())


def test_a_dry_run_checks_what_it_can_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = ("--config", "examples/train/real_gpu.yaml")
    real.main(["--dry-run", *gpu, "--environment", ENVIRONMENT, "--held-out", "16"])
    printed = capsys.readouterr().out
    assert "qwen2.5-coder-1.5b-instruct-q4_k_m\n" in printed
    assert "trainer on cuda: bfloat16" in printed
    with pytest.raises(SystemExit, match="1"):
        real.main(["--dry-run", "--environment", "nowhere:Nothing"])
    assert "error: " in capsys.readouterr().err


def test_a_folder_without_a_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="not a run of"):
        real.options_of(["--resume", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.timeout(700)  # three processes import torch and transformers, a minute each on a busy machine
async def test_a_killed_trainer_continues_without_a_lost_or_repeated_group(tmp_path: Path) -> None:
    """The kill is before the second checkpoint. Ctrl-C follows, between two steps with checkpoints."""
    (tmp_path / "service").mkdir()
    config = simulated_config(mode="standalone", engine={"max_context_tokens": 512})
    async with whole_service(config, tmp_path / "service") as url, RolloutClient(url) as client:
        start = ["--url", url, "--model", str(POLICY), "--environment", ENVIRONMENT]
        start += ["--out", str(tmp_path / "runs")]
        rare, often = ("--checkpoint-every-s", "1000"), ("--checkpoint-every-s", "0")
        await run_trainer(*SMALL, *start, *rare, until=lambda lines: "step     3/7" in lines)
        [run_dir] = (tmp_path / "runs").iterdir()
        resume = ("--resume", str(run_dir), "--url", url)
        lines = await run_trainer(*resume, *often, until=lambda lines: "step     4/7" in lines, kill=signal.SIGINT)
        # The lost process had pushed version 4 after its third step, and maybe later ones.
        version = re.search(r"resume   after step 0 as version (\d+), pushed", lines)
        assert version is not None
        assert int(version[1]) >= 5
        lines = await run_trainer(*resume)
        assert re.search(r"resume   after step [3-6] as version", lines)
        records = await listed(client)
        versions = [update.version for update in (await client.status()).updates]
    steps = json.loads((run_dir / "learn.json").read_text())["steps"]
    assert [len(step["tasks"]) for step in steps] == [2] * 7
    trained = [name for step in steps for name in step["tasks"]]
    assert len(set(trained)) == len(trained)
    offered = [task.task_id for task in islice(environment_tasks(ENVIRONMENT, 2)[1], 16)]
    assert set(trained) <= set(offered)  # the first ones, but for two that were unfinished at the end
    assert set(offered[:10]) <= set(trained)
    # No task was submitted twice: each has one record for each sample.
    assert set(Counter(name for name in records if name in trained).values()) == {2}
    assert versions == sorted(set(versions))
    # An evaluation next to the training that was interrupted is left out.
    evaluations = {path.name for path in (run_dir / "evaluations").iterdir()}
    assert {"before", "after"} <= evaluations <= {"before", "after", "step-3", "step-6"}


async def run_trainer(
    *options: str, until: Callable[[str], bool] = lambda lines: False, kill: signal.Signals = signal.SIGKILL
) -> str:
    """Run the trainer, and send a signal once its output satisfies `until`. Returns the output."""
    command = (sys.executable, "-u", "-m", "examples.train.real", *options)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    lines = ""
    try:
        async with asyncio.timeout(240):
            while line := await process.stdout.readline():
                lines += line.decode()
                if until(lines):
                    process.send_signal(kill)
                    break
            status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    assert status == (0 if not until(lines) else -kill if kill is signal.SIGKILL else 130), lines
    return lines


async def listed(client: RolloutClient) -> list[str]:
    """Return the task ids of all records."""
    names, cursor = list[str](), ""
    while True:
        page = await client.list_records(FactsQuery(limit=200, cursor=cursor))
        names += [one.task_id for one in page.records]
        if not (cursor := page.cursor):
            return names
