"""verifiers' TrainClient, the engine of a training run that prime-rl passes to it."""

import asyncio
import os
from pathlib import Path

from support import QUESTION, Session, service_url
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig

POLICY = Path(__file__).resolve().parents[3] / "examples" / "tiny_policy" / "v1"
KEY = "AGENTLOOP_KEY"


async def main(url: str) -> None:
    """Run one turn, and one with a prompt that the model cannot hold: a 400 that no harness retries."""
    session = Session(url, "verifiers")
    os.environ[KEY] = session.api_key  # it reads keys only from the environment
    config = TrainClientConfig(base_url=session.base_url, api_key_var=KEY, renderer_model_name=str(POLICY))
    client = TrainClient(config)
    sampling = SamplingConfig(max_tokens=48, temperature=1.0, top_p=1.0)

    async def ask(text: str) -> object:
        body = {"model": "v1", "messages": [{"role": "user", "content": text}]}
        return await client.get_response(ChatDialect(), body, sampling, session_id="trace-1")

    response = await ask(QUESTION)
    tokens = response.tokens
    assert len(tokens.completion_logprobs) == len(tokens.completion_ids) > 0
    assert response.usage.completion_tokens == len(tokens.completion_ids)
    status = None
    try:
        await ask("many words " * 20_000)
    except ProviderError as error:
        status = error.status_code
    assert status == 400
    await client.close()
    session.report(1, served=[(tokens.prompt_ids, tokens.completion_ids)])


asyncio.run(main(service_url()))
