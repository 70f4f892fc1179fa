"""The work of one run: groups of agent trajectories, drawn from the shapes that published traces have.

Lengths and times are log-normal, turns of siblings are correlated, and tools are a mixture of short, medium and
Pareto-tailed ones. The same parameters and seed give the same workload on every machine: numpy's PCG64 draws it,
trajectory by trajectory, so that a change of one parameter disturbs no other draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

TOOLS = ("read", "shell", "tests")
"""Names that a policy may learn return times of. A name does not give away its mixture component."""

_TOOL_SHARES = np.array([[0.6, 0.4, 0.0], [0.1, 0.6, 0.3], [0.0, 0.3, 0.7]])  # of names, by component


@dataclass(frozen=True, slots=True)
class ToolTimes:
    """Seconds a tool runs: log-normal (median, sigma) short and medium ones, Pareto (least, alpha) long ones."""

    short: tuple[float, float] = (0.4, 1.3)
    medium: tuple[float, float] = (8.0, 1.0)
    long: tuple[float, float] = (60.0, 1.2)
    shares: tuple[float, float, float] = (0.85, 0.12, 0.03)
    longest_s: float = 120.0  # tools time out


@dataclass(frozen=True, slots=True)
class WorkloadParameters:
    """A distribution of workloads; medians in tokens and turns, sigmas of the underlying normal."""

    num_groups: int = 64
    num_samples: int = 8  # a group
    num_systems: int = 1  # different system prompts; a group has one
    system_tokens: int = 2048
    prompt: tuple[float, float] = (6000.0, 0.6)  # of a group, without the system prompt
    turns: tuple[float, float] = (16.0, 0.6)  # a group's median
    turns_sibling_sigma: float = 0.25
    max_turns: int = 40
    output: tuple[float, float] = (220.0, 0.9)
    observation: tuple[float, float] = (500.0, 1.1)
    max_observation: int = 16_000
    max_context: int = 65_536  # a trajectory ends before it
    aborted: float = 0.05  # share that ends after a turn drawn evenly
    tools: ToolTimes = ToolTimes()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample: its own tokens and times, turn by turn. Outputs are at least 1 token."""

    number: int
    group: int
    sample: int
    system: int
    num_system_tokens: int
    num_group_tokens: int  # system prompt included: what all siblings share
    outputs: tuple[int, ...]
    observations: tuple[int, ...]  # one less than outputs
    tools: tuple[tuple[str, float], ...]  # name and seconds; one less than outputs

    @property
    def num_turns(self) -> int:
        return len(self.outputs)

    def prompt_tokens(self) -> list[int]:
        """Return the prompt's length at each turn."""
        lengths, length = [], self.num_group_tokens
        for turn, output in enumerate(self.outputs):
            lengths.append(length)
            if turn < len(self.observations):
                length += output + self.observations[turn]
        return lengths


@dataclass(frozen=True, slots=True)
class Workload:
    """All trajectories in the order in which they are offered: group by group."""

    parameters: WorkloadParameters
    seed: int
    trajectories: tuple[Trajectory, ...]

    @property
    def num_turns(self) -> int:
        return sum(trajectory.num_turns for trajectory in self.trajectories)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(sum(trajectory.outputs) for trajectory in self.trajectories)

    @property
    def num_input_tokens(self) -> int:
        return sum(sum(trajectory.prompt_tokens()) for trajectory in self.trajectories)

    def describe(self) -> Mapping[str, object]:
        """Return parameters, seed and sizes, as results record them."""
        return {
            "seed": self.seed,
            "parameters": asdict(self.parameters),
            "num_trajectories": len(self.trajectories),
            "num_turns": self.num_turns,
            "num_sampled_tokens": self.num_sampled_tokens,
            "num_input_tokens": self.num_input_tokens,
        }


def generate(parameters: WorkloadParameters, seed: int) -> Workload:
    """Draw a workload."""
    trajectories: list[Trajectory] = []
    for group in range(parameters.num_groups):
        rng = np.random.default_rng([seed, group])
        num_prompt = max(64, round(_lognormal(rng, parameters.prompt)))
        median_turns = _lognormal(rng, parameters.turns)
        for sample in range(parameters.num_samples):
            own = np.random.default_rng([seed, group, sample + 1])
            num_turns = round(median_turns * _lognormal(own, (1.0, parameters.turns_sibling_sigma)))
            trajectory = _trajectory(parameters, own, min(max(1, num_turns), parameters.max_turns), num_prompt)
            number = len(trajectories)
            system = group % parameters.num_systems
            trajectories.append(
                Trajectory(
                    number,
                    group,
                    sample,
                    system,
                    parameters.system_tokens,
                    parameters.system_tokens + num_prompt,
                    *trajectory,
                )
            )
    return Workload(parameters, seed, tuple(trajectories))


def working_set_tokens(parameters: WorkloadParameters, num_live: int, num_workloads: int = 8) -> float:
    """Return the KV tokens that `num_live` trajectories hold on average: mean prompt of a turn times their number.

    The mean is over `num_workloads` seeds, so that it belongs to the parameters and not to one draw.
    """
    workloads = [generate(parameters, seed) for seed in range(num_workloads)]
    num_tokens = sum(workload.num_input_tokens for workload in workloads)
    return num_live * num_tokens / sum(workload.num_turns for workload in workloads)


def _trajectory(
    parameters: WorkloadParameters, rng: np.random.Generator, num_turns: int, num_prompt: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[str, float], ...]]:
    """Draw outputs, observations and tools of one trajectory."""
    if rng.random() < parameters.aborted:
        num_turns = int(rng.integers(1, num_turns + 1))
    outputs = np.maximum(1, np.rint(_lognormals(rng, parameters.output, num_turns))).astype(int)
    observations = np.rint(_lognormals(rng, parameters.observation, num_turns)).astype(int)
    observations = np.clip(observations, 1, parameters.max_observation)
    tools = _tools(parameters.tools, rng, num_turns)
    ends = parameters.system_tokens + num_prompt + np.cumsum(outputs + observations) - observations
    num_fitting = max(1, int(np.searchsorted(ends, parameters.max_context, side="right")))
    num_followed = min(num_fitting, num_turns) - 1
    return tuple(outputs[:num_fitting].tolist()), tuple(observations[:num_followed].tolist()), tools[:num_followed]


def _tools(times: ToolTimes, rng: np.random.Generator, num: int) -> tuple[tuple[str, float], ...]:
    components = np.searchsorted(np.cumsum(times.shares[:2]), rng.random(num), side="right")
    bounds = np.cumsum(_TOOL_SHARES[components], axis=1)[:, :2]
    names = (rng.random(num)[:, None] >= bounds).sum(axis=1)
    least, alpha = times.long
    kinds = (
        _lognormals(rng, times.short, num),
        _lognormals(rng, times.medium, num),
        least * (1.0 - rng.random(num)) ** (-1.0 / alpha),
    )
    seconds = np.minimum(np.choose(components, kinds), times.longest_s)
    return tuple(zip([TOOLS[name] for name in names.tolist()], seconds.tolist(), strict=True))


def _lognormals(rng: np.random.Generator, shape: tuple[float, float], num: int) -> np.ndarray:
    median, sigma = shape
    return median * np.exp(sigma * rng.standard_normal(num))


def _lognormal(rng: np.random.Generator, shape: tuple[float, float]) -> float:
    return float(_lognormals(rng, shape, 1)[0])
