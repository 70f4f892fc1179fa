"""Calls of a worker's loops and rewards to the models beside the policy: chat calls that nothing records."""

from __future__ import annotations

from collections.abc import Mapping

from agentloop.chat.call import ChatCall
from agentloop.rollout.models import ModelCall, unknown_model
from agentloop.types import SamplingParams
from agentloop_servers.endpoint.token_calls import TokenCalls


class ModelCalls:
    """The ModelsPort of a worker."""

    def __init__(self, models: Mapping[str, TokenCalls]) -> None:
        self._models = models

    async def chat(self, call: ModelCall) -> str:
        found = self._models.get(call.model)
        if found is None:
            raise unknown_model(call.model, self._models)
        sampling = SamplingParams(call.max_tokens, temperature=call.temperature)
        asked = ChatCall(call.messages, sampling, max_tokens=call.max_tokens)
        replies = await found.sample(asked, call.affinity or None, prompt_param="messages")
        return replies[0].content
