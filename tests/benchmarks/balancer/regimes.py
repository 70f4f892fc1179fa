"""The regimes of the comparison: a base, and variants of it that each change one thing.

Fleets have the step times measured on a GPU; the KV capacity follows from the pressure: the working set is the mean
prompt of a turn times the trajectories that workers have places for, and `pressure` is its ratio to the fleet's KV.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from tests.benchmarks.balancer.policy import FleetShape
from tests.benchmarks.balancer.simulate import Disturbance
from tests.benchmarks.balancer.step_curves import StepTimes
from tests.benchmarks.balancer.workload import ToolTimes, WorkloadParameters, working_set_tokens

STEP_TIMES = Path(__file__).parent / "step_times"

UNDISTURBED = Disturbance()
BASE = WorkloadParameters(num_groups=64, num_samples=8)
SHORT_TOOLS = ToolTimes(shares=(1.0, 0.0, 0.0))
HEAVY_TOOLS = ToolTimes(shares=(0.80, 0.12, 0.08), longest_s=600.0)
HEAVY_LENGTHS = replace(BASE, turns=(12.0, 1.0), max_turns=100)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a fleet is simulated."""

    num_replicas: int = 8
    num_live: int = 256  # trajectories that workers have places for
    num_trajectories: int = 512
    block_size: int = 16
    step_times: str = "h200-qwen3-4b"


BIG = Scale(num_replicas=64, num_live=2048, num_trajectories=10_000)


@dataclass(frozen=True, slots=True)
class Regime:
    """One setting in which all arms are compared; `key` names it on the command line."""

    key: str
    name: str
    workload: WorkloadParameters = BASE
    pressure: float = 1.0
    disturbance: Disturbance = UNDISTURBED
    needs_margin: bool = False  # the goal is 10 % better than the best other arm, not just as good

    @property
    def fits(self) -> bool:
        """True if the working set fits the KV of the fleet."""
        return self.pressure <= 1.0


REGIMES = (
    Regime("base", "base: working set 1x, n = 8, one system prompt"),
    Regime("0.3x", "working set 0.3x", pressure=0.3),
    Regime("3x", "working set 3x", pressure=3.0, needs_margin=True),
    Regime("n1", "n = 1", replace(BASE, num_samples=1)),
    Regime("n16", "n = 16", replace(BASE, num_samples=16)),
    Regime("short-tools", "short tools", replace(BASE, tools=SHORT_TOOLS)),
    Regime("heavy-tools", "heavy-tailed tools", replace(BASE, tools=HEAVY_TOOLS), needs_margin=True),
    Regime("heavy-lengths", "heavy-tailed lengths", HEAVY_LENGTHS, needs_margin=True),
    Regime("systems", "64 system prompts", replace(BASE, num_systems=64)),
    Regime("flush-30", "update every 30 s, flush", disturbance=Disturbance(30.0)),
    Regime("keep-30", "update every 30 s, keep", disturbance=Disturbance(30.0, is_flushed=False)),
    Regime("flush-300", "update every 300 s, flush", disturbance=Disturbance(300.0)),
    Regime("keep-300", "update every 300 s, keep", disturbance=Disturbance(300.0, is_flushed=False)),
    Regime("loss", "one replica lost half way", disturbance=Disturbance(loses_replica=True)),
    Regime("add", "one replica added half way", disturbance=Disturbance(adds_replica=True)),
)


def at_scale(regime: Regime, scale: Scale) -> Regime:
    """Return a regime with as many groups as the scale has trajectories for."""
    num_groups = max(1, scale.num_trajectories // regime.workload.num_samples)
    return replace(regime, workload=replace(regime.workload, num_groups=num_groups))


@lru_cache
def fleet(regime: Regime, scale: Scale) -> FleetShape:
    """Return the fleet of a regime: its KV capacity holds the working set `1 / pressure` times."""
    sampled = at_scale(regime, Scale())  # the mean does not depend on how many are drawn
    needed = working_set_tokens(sampled.workload, scale.num_live)
    capacity_tokens = needed / regime.pressure / scale.num_replicas
    return FleetShape(
        scale.num_replicas,
        max(int(capacity_tokens), regime.workload.max_context) // scale.block_size + 1,
        scale.block_size,
        load_step_times(scale.step_times),
        max_live=scale.num_live,
    )


def load_step_times(name: str) -> StepTimes:
    """Load the coefficients fitted to a GPU's measured step times."""
    fitted = json.loads((STEP_TIMES / f"{name}.json").read_text())
    a, b, c = fitted["prefill"]["coefficients"]
    alpha, beta, gamma = fitted["decode"]["coefficients"]
    return StepTimes(a, b, c, alpha, beta, gamma)
