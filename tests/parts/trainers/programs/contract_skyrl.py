"""SkyRL's RemoteInferenceClient and its weight-sync client. SkyRL requires Python 3.12; here it runs on 3.11.

Two stand-ins replace missing parts of the environment: `typing.TypedDict` is the class of typing_extensions, which
pydantic requires below 3.12; torch and vLLM, which SkyRL's modules import, come from the project's environment.
Gloo replaces NCCL.
"""
# ruff: noqa: E402 - the stand-ins come first

from __future__ import annotations

import asyncio
import sys
import typing
import uuid
from pathlib import Path
from typing import Any

import typing_extensions

sys.path.append(str(Path(__file__).parents[4] / ".venv" / "lib" / "python3.11" / "site-packages"))
typing.TypedDict = typing_extensions.TypedDict

from safetensors.torch import load_file
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient, nccl_init_payloads
from verbs import NEVER, error_of, frozen, serve

from examples.native_trainer import native_trainer
from tests.servers.recompute import POLICY

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


class SkyRl:
    """Both clients. The service is their router and their only server."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        self.url, self.prompts = url, prompts
        self.control = SkyrlWeightSyncClient([url], init_payload_fn=nccl_init_payloads)

    def run(self, work: typing.Callable[[RemoteInferenceClient], typing.Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            async with RemoteInferenceClient(
                proxy_url=self.url, server_urls=[self.url], data_parallel_size=1, model_name="default"
            ) as client:
                return await work(client)

        return asyncio.run(main())

    def rollouts(self, **sampling: Any) -> dict[str, Any]:
        """Sample by ids in sessions, with the requests of SkyRL's trainer."""
        names = [uuid.uuid4().hex for _ in self.prompts]
        batch = {"prompt_token_ids": self.prompts, "session_ids": names, "cache_salt": "0"}

        async def work(client: RemoteInferenceClient) -> list[list[int]]:
            said = await client.generate({**batch, "sampling_params": {**SAMPLING, **sampling}})
            for session_id in names:
                await client.finish_session(session_id)
            assert [len(one) for one in said["response_logprobs"]] == [len(one) for one in said["response_ids"]]
            assert not await client.is_sleeping()
            await client.reset_prefix_cache()
            return said["response_ids"]

        return {"served": list(zip(self.prompts, self.run(work), strict=True))}

    def update(self, _: str) -> dict[str, str]:
        """Update as SkyRL's NCCL sender does: SkyRL's client drives vLLM's engine during SkyRL's pause."""
        assert self.run(lambda client: client.get_world_size()) == (2, 2)
        tensors = load_file(POLICY / "v1" / "model.safetensors")
        trainer = native_trainer(self.url, tensors, client=self.control)
        self.control.pause_generation()
        trainer.send_weights()
        self.control.resume_generation()
        return {}

    def pause(self) -> dict[str, Any]:
        self.run(lambda client: client.pause())
        return frozen(self.rollouts, lambda: self.run(lambda client: client.resume()))

    def refused(self) -> dict[str, str]:
        body = {"prompt": self.prompts[0], "max_tokens": 4, "weight_version": {"min_version": NEVER}}
        return error_of(lambda: self.run(lambda client: client.completion({"json": body})))

    def killed(self) -> dict[str, Any]:
        return self.rollouts(max_tokens=900, ignore_eos=True)


serve(SkyRl)
