"""The service's models other than the policy, for loops and rewards.

Their messages and tokens are not recorded in any trajectory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentloop.errors import ModelNotFound, RewardError
from agentloop.types import Judge, Message, RolloutTask

JUDGE_TIMEOUT_S = 4 * 3600.0
"""The minimum timeout of a reward that calls a judge: a sleeping judge may wait this long for its accelerators."""

_ANSWER_TOKENS = 256
_ASKED = "Answer with yes or no, or with a number from 0 to 1."
_VERDICT = re.compile(r"(?<![\w.])(yes|no|[01](?:\.\d+)?|\.\d+)(?![\w]|\.\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A chat call to another model. Calls with the same `affinity` share a replica and thus its KV cache."""

    model: str
    messages: tuple[Message, ...]
    max_tokens: int = _ANSWER_TOKENS
    temperature: float = 0.0
    affinity: str = ""


class ModelsPort(Protocol):
    """The models of a service other than the policy."""

    async def chat(self, call: ModelCall) -> str:
        """Return the answer's text without reasoning. Raises ModelNotFound and the errors of a chat call."""


def unknown_model(name: str, names: Iterable[str], param: str = "model") -> ModelNotFound:
    """Return the ModelNotFound error for a name that is not in `names`, the configured models."""
    known = ", ".join(map(repr, names)) or "none"
    return ModelNotFound(f"unknown model {name!r}; models other than the policy: {known}", param=param)


class NoModels:
    """The ModelsPort of a service with no model other than the policy."""

    async def chat(self, call: ModelCall) -> str:
        raise ModelNotFound(f"unknown model {call.model!r}: this service serves only its policy", param="model")


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model for the loop of one trajectory. `ctx.model(NAME)` returns it."""

    name: str
    port: ModelsPort
    affinity: str

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int = _ANSWER_TOKENS, temperature: float = 0.0
    ) -> str:
        """Return the model's answer to a conversation as text.

        The call is not recorded: use `ctx.observe` to add the answer to the trajectory. Raises ModelNotFound,
        ContextLengthExceeded, and DeadlineExceeded if the model does not answer in time.
        """
        return await self.port.chat(ModelCall(self.name, tuple(messages), max_tokens, temperature, self.affinity))


async def judge_score(judge: Judge, models: ModelsPort, task: RolloutTask, messages: Sequence[Message]) -> float:
    """Return the judge's score of a conversation, from 0 to 1.

    The verdict is the last "yes", "no" or number in the judge's answer. Raises RewardError without a verdict.
    """
    conversation = "\n\n".join(f"{message.role}: {message.content}" for message in messages)
    reference = "" if task.reference is None else f"\n\nReference: {task.reference}"
    prompt = f"{judge.rubric}\n\n{conversation}{reference}\n\n{_ASKED}"
    answer = await models.chat(ModelCall(judge.model, (Message("user", prompt),)))
    verdicts = _VERDICT.findall(answer)
    if not verdicts:
        raise RewardError(
            f"the answer of judge {judge.model!r} contains no yes, no or number from 0 to 1: {answer[:200]!r}"
        )
    verdict = verdicts[-1].lower()
    score = {"yes": 1.0, "no": 0.0}.get(verdict)
    return min(float(verdict), 1.0) if score is None else score
