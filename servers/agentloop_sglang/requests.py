"""Values that the engine and its schedulers exchange. This module requires neither torch nor SGLang."""

from __future__ import annotations

import base64
import json
import mmap
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from agentloop.values import codec
from agentloop.values.sampling import Constraint, LogprobsMode, SamplingParams
from agentloop_servers.engines.common.constraints import structural_tag

RAW_TOKEN_ID = -1
"""The token id of a raw logprob, which is the first of the alternatives."""

PARAMETER = "agentloop"
"""The key of our sampling parameters in SGLang's `custom_params`, which SGLang passes on unread."""


@dataclass(frozen=True, slots=True)
class SchedulerSetup:
    """The settings of our code in a scheduler."""

    facts_path: str
    logprobs_mode: LogprobsMode
    seed: int
    can_constrain: bool

    def to_text(self) -> str:
        """Encode the settings as text."""
        return base64.b64encode(codec.encode(self)).decode("ascii")

    @staticmethod
    def from_text(text: str) -> SchedulerSetup:
        """Decode the result of `to_text`."""
        return codec.decode(base64.b64decode(text), SchedulerSetup)


def sampling_to_text(sampling: SamplingParams) -> str:
    """Encode sampling parameters as text. The constraint must have been removed."""
    return base64.b64encode(codec.encode(sampling)).decode("ascii")


def sampling_from_text(text: str) -> SamplingParams:
    """Decode the result of `sampling_to_text`."""
    return codec.decode(base64.b64decode(text), SamplingParams)


def constraint_to_text(constraint: Constraint, stop_token_ids: tuple[int, ...]) -> str:
    """Encode a constraint and the stop token ids that end it as the grammar text of a request."""
    tag = structural_tag(constraint)
    return json.dumps({"tag": tag, "regex": None if tag is not None else constraint.text, "stop": stop_token_ids})


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """The statistics of one scheduler. Totals count from its start."""

    num_steps: int = 0
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_waiting: int = 0
    num_kv_tokens: int = 0  # tokens whose KV requests hold
    num_prefill_tokens: int = 0  # prompt tokens of requests without an output token
    slow_step_us: int = 0  # duration of the slowest recent step


_FACTS = struct.Struct("<7q")


class FactsFile:
    """A memory-mapped file with a scheduler's statistics, written after every step and read by the engine at any
    time.

    Two values that are read together may come from different steps.
    """

    def __init__(self, path: str, *, is_new: bool = False) -> None:
        if is_new:
            Path(path).write_bytes(bytes(_FACTS.size))
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FACTS.size)

    def write(self, facts: SchedulerFacts) -> None:
        """Replace the statistics."""
        _FACTS.pack_into(self._memory, 0, *asdict(facts).values())

    def read(self) -> SchedulerFacts:
        """Return the statistics."""
        return SchedulerFacts(*_FACTS.unpack_from(self._memory))

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()
