"""The regimes of the comparison: a base, and variants that each change one thing.

Fleets have the step times measured on a GPU. The KV capacity follows from the pressure, which is the ratio of the
working set to the fleet's KV. The working set is the mean context of a turn times the number of trajectory slots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.balancer.policy import FleetShape, StepTimes
from tests.benchmarks.balancer.simulate import Disturbance
from tests.benchmarks.balancer.workload import ToolTimes, WorkloadParameters, working_set_tokens

NUM_REPLICAS = 8
NUM_LIVE = 256  # trajectory slots of the workers
BLOCK_SIZE = 16
STEP_TIMES = Path(__file__).parent / "step_times"

UNDISTURBED = Disturbance()
BASE = WorkloadParameters(num_groups=64, num_samples=8)
REASONING = replace(
    BASE,
    system_tokens=256,
    prompt=(300.0, 0.6),
    turns=(3.0, 0.0),
    turns_sibling_sigma=0.0,
    output=(4000.0, 0.35),  # nearly all between 2k and 8k
    max_context=32_768,
)


@dataclass(frozen=True, slots=True)
class Regime:
    """One setting in which all arms are compared; `key` is its name on the command line."""

    key: str
    name: str
    workload: WorkloadParameters = BASE
    pressure: float = 1.0
    disturbance: Disturbance = UNDISTURBED

    @property
    def is_steady(self) -> bool:
        """True if the regime is judged by tokens per second between the quartiles, not by the makespan."""
        return self.workload.arrive_over_s > 0


_ALL = (
    Regime("base", "base: working set 1x, n = 8, one system prompt"),
    Regime("0.3x", "working set 0.3x", pressure=0.3),
    Regime("3x", "working set 3x", pressure=3.0),
    Regime("n1", "n = 1", replace(BASE, num_groups=512, num_samples=1)),
    Regime("n16", "n = 16", replace(BASE, num_groups=32, num_samples=16)),
    Regime("short-tools", "short tools", replace(BASE, tools=ToolTimes(shares=(1.0, 0.0, 0.0)))),
    Regime(
        "heavy-tools",
        "heavy-tailed tools",
        replace(BASE, tools=ToolTimes(shares=(0.80, 0.12, 0.08), longest_s=600.0)),
    ),
    Regime("group-tools", "tool times that depend on the group", replace(BASE, tools=ToolTimes(group_sigma=1.0))),
    Regime("heavy-lengths", "heavy-tailed lengths", replace(BASE, turns=(12.0, 1.0), max_turns=100)),
    Regime("systems", "64 system prompts", replace(BASE, num_systems=64)),
    Regime("reasoning", "reasoning, one turn of 2k to 8k tokens", replace(REASONING, turns=(1.0, 0.0))),
    Regime("reasoning-3", "reasoning, three such turns", REASONING),
    Regime("flush-30", "update every 30 s, flush", disturbance=Disturbance(30.0)),
    Regime("keep-30", "update every 30 s, keep", disturbance=Disturbance(30.0, is_flushed=False)),
    Regime("loss", "one replica lost half way", disturbance=Disturbance(loses_replica=True)),
    Regime("add", "one replica added half way", disturbance=Disturbance(adds_replica=True)),
    Regime("steady", "steady: groups arrive over 600 s", replace(BASE, num_groups=96, arrive_over_s=600.0)),
)
REGIMES = {regime.key: regime for regime in _ALL}


@lru_cache
def fleet(regime: Regime, step_times: str = "h200-qwen3-4b") -> FleetShape:
    """Return the fleet of a regime: its KV capacity holds the working set `1 / pressure` times."""
    capacity_tokens = working_set_tokens(regime.workload, NUM_LIVE) / regime.pressure / NUM_REPLICAS
    return FleetShape(
        NUM_REPLICAS,
        max(int(capacity_tokens), regime.workload.max_context) // BLOCK_SIZE + 1,
        BLOCK_SIZE,
        fit_step_times(json.loads((STEP_TIMES / f"{step_times}.json").read_text())),
        max_live=NUM_LIVE,
    )


def fit_step_times(measured: Mapping[str, Any]) -> StepTimes:
    """Fit the step times to the measured points by relative error.

    A prompt over the budget of a step takes several steps. The set of short prompts that take the floor is the one
    with the least maximum error.
    """
    points, budget = measured["prefill"]["points"], measured["batched_tokens"]
    seconds = np.array([s for _, s in points])
    terms = np.array([(-(-num // budget), num, num**2) for num, _ in points], dtype=float)
    fits = []
    for num_flat in range(1, len(points) - 3):
        floor_s = float(np.sqrt(seconds[:num_flat].min() * seconds[:num_flat].max()))
        line = _least_relative(terms[num_flat:], seconds[num_flat:])
        found = np.maximum(floor_s * terms[:, 0], terms @ line)
        fits.append((float(np.abs(found / seconds - 1).max()), (floor_s, *line.tolist())))
    decode = np.array(measured["decode"]["points"])
    line = _least_relative(np.insert(decode[:, :2], 0, 1.0, axis=1), decode[:, 2])
    return StepTimes(*min(fits)[1], *line.tolist())


def _least_relative(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
    return found
