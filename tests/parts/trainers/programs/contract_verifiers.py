"""verifiers' TrainClient: the engine of a training run, which prime-rl passes to it."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import Any

from verbs import NEVER, error_of, serve
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

KEY = "AGENTLOOP_KEY"
MODEL = "examples/tiny_policy/v1"


class Verifiers:
    """The client without one of our sessions: its calls only have `X-Session-ID`."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        os.environ[KEY] = "none"  # it reads keys only from the environment
        self.url, self.num_calls = url, len(prompts)

    def rollouts(self, num_tokens: int = 16, headers: dict[str, str] | None = None, **asked: Any) -> dict[str, Any]:
        """Send several questions at once, each in its own trace."""
        config = TrainClientConfig(
            base_url=f"{self.url}/v1", api_key_var=KEY, renderer_model_name=MODEL, headers=headers or {}
        )
        sampling = SamplingConfig(max_tokens=num_tokens, temperature=1.0, top_p=1.0, **asked)

        async def ask(client: TrainClient, number: int) -> tuple[list[int], list[int]]:
            body = {
                "model": "default",
                "messages": [{"role": "user", "content": f"verifiers: {number} + {number}?"}],
            }
            said = await client.get_response(ChatDialect(), body, sampling, session_id=uuid.uuid4().hex)
            tokens = said.tokens
            assert len(tokens.completion_logprobs) == len(tokens.completion_ids) > 0
            return tokens.prompt_ids, tokens.completion_ids

        async def main() -> list[Any]:
            client = TrainClient(config)
            try:
                return await asyncio.gather(*(ask(client, number) for number in range(self.num_calls)))
            finally:
                await client.close()

        return {"served": asyncio.run(main())}

    def refused(self) -> dict[str, str]:
        return error_of(lambda: self.rollouts(headers={"X-Weight-Version": f"min_version={NEVER}"}))

    def killed(self) -> dict[str, Any]:
        return self.rollouts(900, ignore_eos=True)


serve(Verifiers)
