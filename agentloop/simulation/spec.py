"""What a simulated engine is like."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentloop.engine import EngineInfo
from agentloop.simulation.policy import LatencyModel


@dataclass(frozen=True, slots=True)
class SimulatedSpec:
    """What a simulated engine is. `initial_version` None: dummy weights, unusable until the first commit."""

    vocab_size: int = 32_000
    max_context_tokens: int = 4096
    block_size: int = 16
    num_blocks: int = 4096
    max_running: int = 256
    latency: LatencyModel = field(default_factory=LatencyModel)
    seed: int = 0
    initial_version: int | None = 0
    num_workers: int = 1
    can_sleep: bool = True
    can_constrain: bool = False  # its policy is trusted to honour constraints

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="simulated",
            max_context_tokens=self.max_context_tokens,
            vocab_size=self.vocab_size,
            block_size=self.block_size,
            kv_capacity_tokens=self.num_blocks * self.block_size,
            max_running=self.max_running,
            num_workers=self.num_workers,
            can_sleep=self.can_sleep,
            can_constrain=self.can_constrain,
        )
