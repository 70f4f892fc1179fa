"""Chat calls from a worker's loops and rewards to models other than the policy. They are not recorded."""

from __future__ import annotations

from collections.abc import Mapping

from agentloop.chat.call import ChatCall
from agentloop.rollout.models import ModelCall, unknown_model
from agentloop.types import SamplingParams
from agentloop_servers.endpoint.token_calls import TokenCalls


class ModelCalls:
    """Implements the worker's ModelsPort with in-process token calls to each model."""

    def __init__(self, models: Mapping[str, TokenCalls]) -> None:
        self._models = models

    async def chat(self, call: ModelCall) -> str:
        token_calls = self._models.get(call.model)
        if token_calls is None:
            raise unknown_model(call.model, self._models)
        sampling = SamplingParams(call.max_tokens, temperature=call.temperature)
        chat_call = ChatCall(call.messages, sampling, max_tokens=call.max_tokens)
        replies = await token_calls.sample(chat_call, call.affinity or None, prompt_param="messages")
        return replies[0].content
