"""An evaluation as a run: it samples every task on a service and keeps one result per sample.

A sample without a reward is an error, never a failed sample: an engine, a tool or the reward function failed, or
its weight version was replaced. Results are stored as one JSON file, which `figures.py` reads.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from agentloop.api.requests import DEFAULT_HOLD_S
from agentloop.client.client import RolloutClient
from agentloop.client.hold import HeldReplicas
from agentloop.errors import InvalidRequest
from agentloop.types import RolloutTask, Trajectory, VersionDemand

FILE_NAME = "evaluation.json"
PRIORITY = -1
"""The default priority of an evaluation: its samples start when no training sample waits."""
HOLD_PRIORITY = 0
"""The default priority with held replicas: the evaluation and the training run take turns, so the hold ends."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One sample of a task. `reward` is None for an error, whose cause is `error`."""

    reward: float | None
    error: str = ""
    stop_reason: str = ""
    num_tokens: int = 0  # sampled tokens
    seconds: float = 0.0
    versions: Mapping[str, int] = field(default_factory=dict)  # sampled tokens by weight version


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The samples of one task. `category` is the environment that the task belongs to."""

    task_id: str
    category: str
    samples: tuple[SampleResult, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of an evaluation."""

    num_samples: int  # requested per task
    pass_at: float  # a sample passes with at least this reward
    started_at: str  # ISO 8601, UTC
    tasks: tuple[TaskResult, ...]
    held_version: int | None = None  # the only version of all samples; None: the samples followed weight updates
    hold_note: str = ""  # lost replicas, and the reason of a hold that ended too early

    def save(self, folder: Path) -> Path:
        """Write the evaluation to a new file in `folder`, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        with path.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)))
        return path

    @staticmethod
    def load(path: Path) -> Evaluation:
        """Read an evaluation from its file or folder. Raises InvalidRequest."""
        file = path / FILE_NAME if path.is_dir() else path
        try:
            return msgspec.json.decode(file.read_bytes(), type=Evaluation)
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequest(f"cannot read the evaluation {path}: {error}") from error


async def evaluate(
    client: RolloutClient,
    tasks: Sequence[RolloutTask],
    *,
    num_samples: int = 8,
    pass_at: float = 1.0,
    priority: int | None = None,
    hold: int = 0,
    hold_timeout_s: float = DEFAULT_HOLD_S,
    on_sample: Callable[[], None] | None = None,
) -> Evaluation:
    """Sample each task `num_samples` times and return the results. A task's category is its environment.

    The records stay in the service's store under their own rollout; no training run receives them. `on_sample` is
    called after each sample.

    With `hold`, that many replicas keep their weight version until the evaluation ends or `hold_timeout_s` has
    passed, and only they sample. Samples that are left then are errors. This needs the admin key. `priority` is by
    default `PRIORITY`, or `HOLD_PRIORITY` with a hold.

    Raises InvalidRequest if there are no tasks or two tasks have one id, and Conflict if too few replicas can be
    held.
    """
    categories = {task.task_id: task.environment or "" for task in tasks}
    if not tasks:
        raise InvalidRequest("there are no tasks to evaluate: name an environment, or a file of tasks")
    if len(categories) < len(tasks):
        repeated = next(name for name, count in Counter(task.task_id for task in tasks).items() if count > 1)
        raise InvalidRequest(f"two tasks have the id {repeated!r}: ids must be unique in an evaluation")
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    samples: dict[str, list[SampleResult]] = {task_id: [] for task_id in categories}
    if priority is None:
        priority = HOLD_PRIORITY if hold else PRIORITY
    async with client.hold(hold, timeout_s=hold_timeout_s) if hold else nullcontext() as held:
        if held is not None:
            demand = VersionDemand(exact_version=held.version)
            tasks = [replace(task, weight_version=demand) for task in tasks]
        run_id = f"eval-{uuid.uuid4().hex}"  # a separate run does not wait for the caller's other work
        rollout = await client.submit(tasks, num_samples=num_samples, priority=priority, run_id=run_id)
        async for record in rollout:
            samples[record.task_id].append(sample_of(record))
            if on_sample is not None:
                on_sample()
    results = tuple(
        TaskResult(task_id, category, tuple(samples[task_id])) for task_id, category in categories.items()
    )
    version, note = (None, "") if held is None else (held.version, _note_of(held))
    return Evaluation(num_samples, pass_at, started_at, results, version, note)


def _note_of(held: HeldReplicas) -> str:
    lost = f"{len(held.hold.lost)} of the held replicas were lost" if held.hold.lost else ""
    return "; ".join(filter(None, (lost, held.end_reason)))


def sample_of(record: Trajectory) -> SampleResult:
    """Return the result of a record."""
    versions: Counter[str] = Counter()
    for path in record.paths:
        versions.update({str(version): count for version, count in path.own_tokens_by_version.items()})
    seconds = 0.0 if record.times is None else record.times.ended_us / 1e6
    reason, num_tokens = record.stop_reason.value, versions.total()
    if record.is_complete and record.reward is not None:
        return SampleResult(record.reward, "", reason, num_tokens, seconds, dict(versions))
    error = record.reward_error or record.error or f"no reward ({reason})"
    return SampleResult(None, error, reason, num_tokens, seconds, dict(versions))
