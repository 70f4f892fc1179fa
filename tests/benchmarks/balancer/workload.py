"""The work of one run: groups of agent trajectories, drawn from distributions that match published traces.

Lengths and times are log-normal, turns of siblings are correlated, and tools are a mixture of short, medium and
Pareto-tailed ones. The same parameters and seed give the same workload on every machine: numpy's PCG64 draws it,
trajectory by trajectory, so that a change of one parameter changes no other draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ToolTimes:
    """Tool run times in seconds: log-normal (median, sigma) if short or medium, Pareto (least, alpha) if long."""

    short: tuple[float, float] = (0.4, 1.3)
    medium: tuple[float, float] = (8.0, 1.0)
    long: tuple[float, float] = (60.0, 1.2)
    shares: tuple[float, float, float] = (0.85, 0.12, 0.03)
    longest_s: float = 120.0  # tools time out
    group_sigma: float = 0.0  # factor that all tools of a group share


@dataclass(frozen=True, slots=True)
class WorkloadParameters:
    """A distribution of workloads; medians in tokens and turns, sigmas of the underlying normal."""

    num_groups: int = 64
    num_samples: int = 8  # per group
    num_systems: int = 1  # different system prompts; a group has one
    system_tokens: int = 2048
    prompt: tuple[float, float] = (6000.0, 0.6)  # prompt of a group, without the system prompt
    turns: tuple[float, float] = (16.0, 0.6)  # median per group
    turns_sibling_sigma: float = 0.25
    max_turns: int = 40
    output: tuple[float, float] = (220.0, 0.9)
    observation: tuple[float, float] = (500.0, 1.1)
    max_observation: int = 16_000
    max_context: int = 65_536  # a trajectory ends before it
    aborted: float = 0.05  # share that ends after a uniformly drawn turn
    tools: ToolTimes = ToolTimes()
    arrive_over_s: float = 0.0  # arrival times of groups are uniform over this many seconds; 0: all at once


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample: its token counts and times, turn by turn. Outputs are at least 1 token."""

    number: int
    group: int
    system: int
    num_system_tokens: int
    num_group_tokens: int  # shared by all siblings, including the system prompt
    outputs: tuple[int, ...]
    observations: tuple[int, ...]  # one less than outputs
    tools: tuple[float, ...]  # seconds; one less than outputs
    arrives_at: float = 0.0

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
    """All trajectories, group by group."""

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


def generate(parameters: WorkloadParameters, seed: int) -> Workload:
    """Draw a workload."""
    trajectories: list[Trajectory] = []
    for group in range(parameters.num_groups):
        rng = np.random.default_rng([seed, group])
        num_prompt = max(64, round(_lognormal(rng, parameters.prompt)))
        median_turns = _lognormal(rng, parameters.turns)
        tool_factor = _lognormal(rng, (1.0, parameters.tools.group_sigma))
        arrives_at = parameters.arrive_over_s * rng.random()
        for sample in range(parameters.num_samples):
            own = np.random.default_rng([seed, group, sample + 1])
            num_turns = round(median_turns * _lognormal(own, (1.0, parameters.turns_sibling_sigma)))
            num_turns = min(max(1, num_turns), parameters.max_turns)
            outputs, observations, tools = _turns(parameters, own, num_turns, num_prompt, tool_factor)
            trajectories.append(
                Trajectory(
                    len(trajectories),
                    group,
                    group % parameters.num_systems,
                    parameters.system_tokens,
                    parameters.system_tokens + num_prompt,
                    outputs,
                    observations,
                    tools,
                    arrives_at,
                )
            )
    return Workload(tuple(trajectories))


def working_set_tokens(parameters: WorkloadParameters, num_live: int, num_workloads: int = 8) -> float:
    """Return the average KV tokens of `num_live` trajectories: their number times a turn's mean context.

    Half of a turn's sampled tokens count towards its context.

    The mean is over `num_workloads` seeds, so that it depends on the parameters and not on one draw.
    """
    workloads = [generate(parameters, seed) for seed in range(num_workloads)]
    num_tokens = sum(workload.num_input_tokens + workload.num_sampled_tokens / 2 for workload in workloads)
    return num_live * num_tokens / sum(workload.num_turns for workload in workloads)


def _turns(
    parameters: WorkloadParameters, rng: np.random.Generator, num_turns: int, num_prompt: int, tool_factor: float
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Draw outputs, observations and tools of one trajectory."""
    if rng.random() < parameters.aborted:
        num_turns = int(rng.integers(1, num_turns + 1))
    outputs = np.maximum(1, np.rint(_lognormals(rng, parameters.output, num_turns))).astype(int)
    observations = np.rint(_lognormals(rng, parameters.observation, num_turns)).astype(int)
    observations = np.clip(observations, 1, parameters.max_observation)
    tools = _tools(parameters.tools, rng, num_turns, tool_factor)
    ends = parameters.system_tokens + num_prompt + np.cumsum(outputs + observations) - observations
    num_fitting = max(1, int(np.searchsorted(ends, parameters.max_context, side="right")))
    num_followed = min(num_fitting, num_turns) - 1
    return tuple(outputs[:num_fitting].tolist()), tuple(observations[:num_followed].tolist()), tools[:num_followed]


def _tools(times: ToolTimes, rng: np.random.Generator, num: int, factor: float) -> tuple[float, ...]:
    components = np.searchsorted(np.cumsum(times.shares[:2]), rng.random(num), side="right")
    least, alpha = times.long
    kinds = (
        _lognormals(rng, times.short, num),
        _lognormals(rng, times.medium, num),
        least * (1.0 - rng.random(num)) ** (-1.0 / alpha),
    )
    seconds: list[float] = np.minimum(factor * np.choose(components, kinds), times.longest_s).tolist()
    return tuple(seconds)


def _lognormals(rng: np.random.Generator, shape: tuple[float, float], num: int) -> np.ndarray:
    median, sigma = shape
    return median * np.exp(sigma * rng.standard_normal(num))


def _lognormal(rng: np.random.Generator, shape: tuple[float, float]) -> float:
    return float(_lognormals(rng, shape, 1)[0])
