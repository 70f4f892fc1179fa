"""The control routes of SGLang's server for slime and Miles: pause, weights, memory, and server information.

Paths, bodies and responses are those of SGLang 0.5 (`entrypoints/http_server.py`). Each route applies the
corresponding admin route to the complete fleet and requires the admin key. A failure returns `success: false` in
addition to its error. `docs/guides/sglang-dialect.md` lists the differences.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field
from starlette.responses import Response

from agentloop.api.coordinator import FrontPort, ServiceStatus
from agentloop.api.requests import Body, Directory, Json, PauseBody, SleepBody, Version, WakeBody
from agentloop.chat.fields import Ignored, Refused, read_body, refused
from agentloop.engine.interface import GroupBackend, GroupInit, Packing, TransferPart
from agentloop.errors import AgentLoopError, Conflict, UnsupportedParameter
from agentloop.types import KVPolicy
from agentloop_contracts import sglang_bodies
from agentloop_contracts.sglang_calls import SglangCalls
from agentloop_contracts.vllm_control import GROUP as VLLM_GROUP
from agentloop_contracts.vllm_control import (
    DtypeName,
    TensorLists,
    VersionText,
    config_of,
    num_workers,
    refuse,
    version_text,
)
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import json_body, speaks
from agentloop_servers.http.openapi import OBJECT, add_route, errors
from agentloop_servers.http.responses import json_response
from agentloop_servers.ingress.admin import AdminRoutes

REFUSED = {
    "/update_weights_from_tensor": "GPU memory handles are not supported; push with `RolloutClient.update_weights`",
}
"""The routes that are rejected, and the alternative for each."""

_ALL_TAGS = {"weights", "kv_cache"}

MemoryTags = list[Literal["weights", "kv_cache", "cuda_graph"]]


class PauseGenerationBody(Body):
    """The body of `POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGenerationBody(Body):
    """The body of `POST /continue_generation`."""

    torch_empty_cache: Ignored = None


class UpdateFromDiskBody(Body):
    """The body of `POST /update_weights_from_disk`. The default `weight_version` is the next version."""

    model_path: Directory
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: VersionText | None = None
    flush_cache: bool | None = None
    is_async: Ignored = None
    recapture_cuda_graph: Ignored = None
    token_step: Ignored = None
    torch_empty_cache: Ignored = None

    abort_all_requests: Annotated[Json, refused(hint=": call `/abort_request` first")] = None
    keep_pause: Annotated[Json, refused(hint=": an update does not end a pause")] = None
    manifest: Refused = None


class PullBody(Body):
    """The body of `POST /pull_weights`: a folder of versions, and the path on each host for one version."""

    local_checkpoint_dir: Directory
    source_dir: Directory
    target_version: Version


GroupName = Annotated[str, Field(min_length=1, max_length=256)]
_GROUP = "weight_update_group"
_Selector = Annotated[Json, refused(unless="all", hint=": the service has one model")]


class InitGroupBody(Body):
    """The body of `POST /init_weights_update_group`: a process group of the trainer's rank 0 and the fleet's
    workers."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, lt=1 << 16)]
    rank_offset: Annotated[int, Field(ge=1, lt=1 << 16)] = 1
    world_size: Annotated[int, Field(ge=2, lt=1 << 16)]
    group_name: GroupName = _GROUP
    backend: Literal["nccl", "gloo"] = "nccl"

    def to_group(self) -> GroupInit:
        """Convert the body to a GroupInit."""
        backend, address = GroupBackend(self.backend), self.master_address
        return GroupInit(self.group_name, backend, address, self.master_port, self.rank_offset, self.world_size)


class GroupNameBody(Body):
    """The body of `POST /destroy_weights_update_group`."""

    group_name: GroupName = _GROUP


class SelectorBody(Body):
    """The body of `POST /begin_weight_update` and `/end_weight_update`."""

    selector: _Selector = None


class UpdateFromGroupBody(TensorLists):
    """The body of `POST /update_weights_from_distributed`: tensors that rank 0 broadcasts in this order.

    With `flattened_bucket`, a single broadcast contains all tensors. `flush_cache` is accepted and ignored:
    `kv_policy` applies.
    """

    dtypes: list[DtypeName]
    group_name: GroupName = _GROUP
    weight_version: VersionText | None = None
    load_format: Literal["flattened_bucket"] | None = None
    flush_cache: Ignored = None
    torch_empty_cache: Ignored = None
    abort_all_requests: Annotated[Json, refused(hint=": call `/abort_request` first")] = None
    selector: _Selector = None

    def to_part(self) -> TransferPart:
        """Convert the body to a TransferPart."""
        return TransferPart(
            self.group_name,
            self.tensors,
            Packing.PLAIN if self.load_format is None else Packing.FLAT,
            version=None if self.weight_version is None else int(self.weight_version),
        )


class MemoryBody(Body):
    """The body of `POST /release_memory_occupation` and `/resume_memory_occupation`. The default is all memory."""

    tags: MemoryTags | None = Field(default=None, max_length=3)


PauseGeneration = Annotated[PauseGenerationBody, Depends(json_body(PauseGenerationBody, read_body))]
ContinueGeneration = Annotated[ContinueGenerationBody, Depends(json_body(ContinueGenerationBody, read_body))]
InitGroup = Annotated[InitGroupBody, Depends(json_body(InitGroupBody, read_body))]
NamedGroup = Annotated[GroupNameBody, Depends(json_body(GroupNameBody, read_body))]
Selected = Annotated[SelectorBody, Depends(json_body(SelectorBody, read_body))]
UpdateFromGroup = Annotated[UpdateFromGroupBody, Depends(json_body(UpdateFromGroupBody, read_body))]
Pull = Annotated[PullBody, Depends(json_body(PullBody, read_body))]
UpdateFromDisk = Annotated[UpdateFromDiskBody, Depends(json_body(UpdateFromDiskBody, read_body))]
Memory = Annotated[MemoryBody, Depends(json_body(MemoryBody, read_body))]


class SglangControlRoutes:
    """SGLang's control routes, and the server information that both dialects read from one path."""

    def __init__(self, coordinator: FrontPort, admin: AdminRoutes, calls: SglangCalls, endpoint: Endpoint) -> None:
        self._coordinator = coordinator
        self._admin = admin
        self._calls = calls
        self._endpoint = endpoint

    def router(self, keys: Keys) -> APIRouter:
        """Return the routes, each of which requires the admin key."""
        router = APIRouter(
            dependencies=[Depends(speaks(_failure)), Depends(keys.require_admin)],
            responses={**errors(), **OBJECT},
            tags=["sglang control"],
        )
        table: list[tuple[str, str, Any, type[Body] | None]] = [
            ("POST", "/pause_generation", self.pause, PauseGenerationBody),
            ("POST", "/continue_generation", self.resume, ContinueGenerationBody),
            ("POST", "/update_weights_from_disk", self.update_from_disk, UpdateFromDiskBody),
            ("POST", "/pull_weights", self.pull, PullBody),
            ("POST", "/init_weights_update_group", self.init_group, InitGroupBody),
            ("POST", "/begin_weight_update", self.begin_update, SelectorBody),
            ("POST", "/update_weights_from_distributed", self.update_from_group, UpdateFromGroupBody),
            ("POST", "/end_weight_update", self.end_update, SelectorBody),
            ("POST", "/destroy_weights_update_group", self.destroy_group, GroupNameBody),
            ("GET", "/flush_cache", self.flush_cache, None),
            ("POST", "/flush_cache", self.flush_cache, None),
            ("POST", "/release_memory_occupation", self.release_memory, MemoryBody),
            ("POST", "/resume_memory_occupation", self.resume_memory, MemoryBody),
            ("GET", "/get_weight_version", self.weight_version, None),
            ("GET", "/model_info", self.model_info, None),
            ("GET", "/get_model_info", self.model_info, None),
            ("GET", "/server_info", self.server_info, None),
            ("GET", "/get_server_info", self.server_info, None),
        ]
        for method, path, handler, body in table:
            add_route(router, method, path, handler, body)
        refuse(router, REFUSED)
        return router

    async def pause(self, request: Request, body: PauseGeneration) -> Response:
        """Pause all replicas until `/continue_generation`. With `abort`, SGLang calls end with the tokens so far.

        With `retract` and `in_place`, calls continue after the pause; the update's `kv_policy` applies to their KV.
        """
        mode: Literal["abort", "keep"] = "abort" if body.mode == "abort" else "keep"
        await self._admin.pause(PauseBody(mode=mode, reason="/pause_generation"))
        if body.mode == "abort":
            await self._calls.abort(request, None, None)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, body: ContinueGeneration) -> Response:
        """End a pause. Tensors received from a trainer's group are committed and served."""
        await self._end_transfer()
        await self._admin.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_from_disk(self, body: UpdateFromDisk) -> Response:
        """Update every replica to the weights of a directory, staged during decoding, and return the report.

        With `flush_cache`, calls that start after the update never use older KV, for any `kv_policy` of the
        service.
        """
        version = None if body.weight_version is None else int(body.weight_version)
        is_fresh = body.flush_cache and self._endpoint.sessions.parts.kv_policy is KVPolicy.KEEP
        names = {"directory": "model_path", "version": "weight_version"}
        policy = "fresh" if is_fresh else None
        report = await self._admin.update(version, names, directory=body.model_path, kv_policy=policy)
        answer = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        return json_response({**answer, **report})

    async def pull(self, body: Pull) -> Response:
        """Assemble and verify a published version once on every host, for `/update_weights_from_disk`."""
        await self._admin.pull_version(body.source_dir, body.local_checkpoint_dir, body.target_version)
        return _done(f"version {body.target_version} is on every host")

    async def init_group(self, body: InitGroup) -> Response:
        """Make the workers of all replicas join a trainer's process group, with ranks from `rank_offset` on."""
        await self._admin.init_group(body.to_group())
        return _done("all workers have joined the group")

    async def begin_update(self, body: Selected) -> Response:
        """Check that a process group exists. The transfer starts with the first tensors."""
        if not {*(await self._admin.status()).groups} - {VLLM_GROUP}:
            raise Conflict("no weight update group exists: call `/init_weights_update_group` first")
        return _done("ready to receive tensors")

    async def update_from_group(self, body: UpdateFromGroup) -> Response:
        """Receive tensors while decoding continues with the served weights; returns when all replicas have them.

        They are served after `/end_weight_update` or `/continue_generation`.
        """
        await self._admin.ask(self._coordinator.begin_transfer(body.group_name, is_repeatable=True))
        await self._admin.ask(self._coordinator.receive_part(body.to_part()))
        return _done("the tensors were received")

    async def end_update(self, body: Selected) -> Response:
        """Update every replica to the received weights; 409 if no tensors were received."""
        if not await self._end_transfer():
            raise Conflict("no transfer is open: call `/update_weights_from_distributed` first")
        return _done("the weights are served")

    async def destroy_group(self, body: NamedGroup) -> Response:
        """Leave a trainer's process group; received tensors that are not served yet are dropped."""
        await self._admin.ask(self._coordinator.destroy_group(body.group_name))
        return _done("the group was destroyed")

    async def _end_transfer(self) -> bool:
        """End the open transfer of a group of this dialect. Return False if there is no open transfer."""
        group = (await self._admin.status()).transfer
        if group in ("", VLLM_GROUP):
            return False
        await self._admin.ask(self._coordinator.end_transfer(group))
        return True

    async def flush_cache(self) -> Response:
        """Return 200 without dropping KV: the update's `kv_policy` determines the use of KV of older weights."""
        await self._admin.status()
        return json_response(
            {"message": "no KV was dropped: the update's kv_policy applies to KV of older weights"}
        )

    async def release_memory(self, body: Memory) -> Response:
        """Freeze every replica and release its memory; weights stay in host memory."""
        if body.tags is not None and not {*body.tags} >= _ALL_TAGS:
            raise UnsupportedParameter(
                f"memory can only be released completely, not {body.tags}: name weights and kv_cache, or no tags",
                param="tags",
            )
        await self._admin.sleep(SleepBody(reason="/release_memory_occupation"))
        return _done("memory is released")

    async def resume_memory(self, body: Memory) -> Response:
        """Allocate released memory again; generation continues when all memory is allocated.

        CUDA graphs are restored with the KV cache.
        """
        tags = None if body.tags is None else [tag for tag in body.tags if tag != "cuda_graph"]
        if tags != []:
            await self._admin.wake(WakeBody(tags=tags))
        return _done("memory is resumed")

    async def weight_version(self) -> Response:
        """Return the version of the served weights as a string; null if no weights are served."""
        return json_response({"weight_version": version_text(await self._admin.status())})

    async def model_info(self) -> Response:
        """Return the model's name and the served version."""
        version = version_text(await self._admin.status())
        facts = {"model_path": self._endpoint.model_name, "is_generation": True, "weight_version": version}
        return json_response(facts)

    async def server_info(self, config_format: Annotated[Literal["text", "json"], Query()] = "text") -> Response:
        """Return the server information that trainers of both dialects read: vLLM's config, and SGLang's sizes.

        The fleet is shown as a single engine whose `tp_size` is the number of processes that hold weights.
        """
        status = await self._admin.status()
        config, num_gpus = config_of(status, self._endpoint), num_workers(status)
        facts = {
            "vllm_config": config if config_format == "json" else orjson.dumps(config).decode(),
            "vllm_env": {},
            "system_env": {},
            "tp_size": num_gpus,
            "pp_size": 1,
            "ep_size": 1,
            "moe_dp_size": 1,
            "num_gpus": num_gpus,
            "disaggregation_mode": "null",
            "encoder_only": False,
            "model_path": self._endpoint.model_name,
            "weight_version": version_text(status),
            "ready": status.is_ready,
            "applied": status.weight_version,
            "sync_state": _sync_state(status),
            "reason": next(iter(status.degraded), ""),
        }
        return json_response(facts)


def _done(message: str) -> Response:
    return json_response({"success": True, "message": message})


def _sync_state(status: ServiceStatus) -> str:
    """Return the progress of the next weight update, in the terms of external rollout services."""
    if status.update is not None:
        return "STAGING" if status.update.state == "staging" else "COMMITTING"
    store = "" if status.store is None else status.store.state
    return {"updating": "FETCHING", "failed": "ERROR"}.get(store, "IDLE")


def _failure(error: AgentLoopError) -> dict[str, Any]:
    return {"success": False, "message": error.message, **sglang_bodies.error_body(error)}
