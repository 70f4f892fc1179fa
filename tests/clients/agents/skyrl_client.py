"""SkyRL's RemoteInferenceClient and its weight-sync client. SkyRL asks for Python 3.12; here it runs on 3.11.

Two things stand in for what this environment has not: `typing.TypedDict` is that of typing_extensions, which
pydantic asks for below 3.12; and torch, which the modules import and this client does not use, is the project's.
"""

import asyncio
import json
import sys
import typing
from pathlib import Path

import typing_extensions

PROJECT = Path(__file__).resolve().parents[3] / ".venv" / "lib" / "python3.11" / "site-packages"
sys.path.append(str(PROJECT))
typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient  # noqa: E402
from support import service_url  # noqa: E402

PROMPTS = [[5, 6, 7], [8, 9, 10]]
SAMPLING = {  # as its `get_vllm_sampling_params` makes them
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 16,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}


async def main(url: str) -> None:
    """Sample by ids, through a pause too, and go through the control verbs."""
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="default")
    batch = {"prompt_token_ids": PROMPTS, "session_ids": ["a/1", "a/2"], "sampling_params": SAMPLING}
    first = await client.generate({**batch, "cache_salt": "0"})
    assert [len(one) for one in first["response_logprobs"]] == [len(one) for one in first["response_ids"]]
    await client.pause()
    frozen = asyncio.create_task(client.generate(batch))
    await asyncio.sleep(0.5)
    assert not frozen.done()
    await client.resume()
    second = await frozen
    for session_id in batch["session_ids"]:
        await client.finish_session(session_id)
    assert await client.get_world_size() == (1, 1)
    assert not await client.is_sleeping()
    await client.reset_prefix_cache()
    await client.aclose()
    served = [pair for out in (first, second) for pair in zip(PROMPTS, out["response_ids"], strict=True)]
    print(json.dumps({"served": served, "refused": await asyncio.to_thread(refusal, url)}), flush=True)


def refusal(url: str) -> str:
    """The answer to the beginning of an NCCL transfer."""
    client = SkyrlWeightSyncClient([url])
    client.pause_generation()
    client.resume_generation()
    try:
        client.init_weight_transfer_engine({"master_address": "localhost"})
    except RuntimeError as error:
        return str(error)
    finally:
        client.close()
    raise AssertionError("an NCCL transfer began")


asyncio.run(main(service_url()))
