"""Other models of the service, as loops and rewards use them: messages in, a text out, and no token on any path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentloop.errors import ModelNotFound, RewardError
from agentloop.types import Judge, Message, RolloutTask

JUDGE_TIMEOUT_S = 4 * 3600.0
"""The longest that a reward waits for its judge, which may sleep until its turn on the accelerators comes."""

_ANSWER_TOKENS = 256
_ASKED = "Answer with yes or no, or with a number from 0 to 1."
_VERDICT = re.compile(r"(?<![\w.])(yes|no|[01](?:\.\d+)?|\.\d+)(?![\w]|\.\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A chat call to another model. Calls of one `affinity` share a replica, and so its KV cache."""

    model: str
    messages: tuple[Message, ...]
    max_tokens: int = _ANSWER_TOKENS
    temperature: float = 0.0
    affinity: str = ""


class ModelsPort(Protocol):
    """The models of a service beside the policy."""

    async def chat(self, call: ModelCall) -> str:
        """Return the answer's text, without thoughts. Raises ModelNotFound, and what a chat call raises."""


def unknown_model(name: str, names: Iterable[str], param: str = "model") -> ModelNotFound:
    """Return the refusal of a model that is none of those beside the policy."""
    known = ", ".join(map(repr, names)) or "none"
    return ModelNotFound(f"no model {name!r} beside the policy; there is {known}", param=param)


class NoModels:
    """The ModelsPort of a service that has none beside the policy."""

    async def chat(self, call: ModelCall) -> str:
        raise ModelNotFound(f"this service has no model {call.model!r} beside its policy", param="model")


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model as the loop of one trajectory talks to it; `ctx.model(NAME)` gives it."""

    name: str
    port: ModelsPort
    affinity: str

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int = _ANSWER_TOKENS, temperature: float = 0.0
    ) -> str:
        """Return its answer to a conversation, as text. None of it is recorded; `ctx.observe` what is to be.

        Raises ModelNotFound, ContextLengthExceeded, and DeadlineExceeded for a model that does not answer in time.
        """
        return await self.port.chat(ModelCall(self.name, tuple(messages), max_tokens, temperature, self.affinity))


async def judge_score(judge: Judge, models: ModelsPort, task: RolloutTask, messages: Sequence[Message]) -> float:
    """Return the score of a conversation, from 0 to 1, that a judge gives by its rubric.

    The judge's verdict is the last yes, no or number of its answer. Raises RewardError if there is none.
    """
    said = "\n\n".join(f"{message.role}: {message.content}" for message in messages)
    reference = "" if task.reference is None else f"\n\nReference: {task.reference}"
    asked = f"{judge.rubric}\n\n{said}{reference}\n\n{_ASKED}"
    answer = await models.chat(ModelCall(judge.model, (Message("user", asked),)))
    verdicts = _VERDICT.findall(answer)
    if not verdicts:
        raise RewardError(f"the judge {judge.model!r} gave no verdict: {answer[:200]!r}")
    verdict = verdicts[-1].lower()
    score = {"yes": 1.0, "no": 0.0}.get(verdict)
    return min(float(verdict), 1.0) if score is None else score
