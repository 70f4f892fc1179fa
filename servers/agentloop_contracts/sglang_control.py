"""The control verbs of SGLang's server, as slime and Miles call them: pause, weights, memory, facts of the server.

The paths, bodies and answers are those of SGLang 0.5 (`entrypoints/http_server.py`). Each does what the admin route
of the same purpose does, on the whole fleet, and needs the admin key as that does. A verb that fails says `success:
false` beside its error. `docs/guides/contracts.md` says what differs.
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
    "/update_weights_from_tensor": "handles of GPU memory are not taken; push with `RolloutClient.update_weights`",
}
"""The verbs that are refused, and what to do instead."""

_ALL_TAGS = {"weights", "kv_cache"}

MemoryTags = list[Literal["weights", "kv_cache", "cuda_graph"]]


class PauseGenerationBody(Body):
    """The body of `POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGenerationBody(Body):
    """The body of `POST /continue_generation`."""

    torch_empty_cache: Ignored = None


class UpdateFromDiskBody(Body):
    """The body of `POST /update_weights_from_disk`. Without a `weight_version` it is the next one."""

    model_path: Directory
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: VersionText | None = None
    flush_cache: bool | None = None
    is_async: Ignored = None
    recapture_cuda_graph: Ignored = None
    token_step: Ignored = None
    torch_empty_cache: Ignored = None

    abort_all_requests: Annotated[Json, refused(hint=": call `/abort_request` before")] = None
    keep_pause: Annotated[Json, refused(hint=": a pause that holds before an update holds after it")] = None
    manifest: Refused = None


class PullBody(Body):
    """The body of `POST /pull_weights`: a folder of versions, and the path at which hosts have one of them."""

    local_checkpoint_dir: Directory
    source_dir: Directory
    target_version: Version


GroupName = Annotated[str, Field(min_length=1, max_length=256)]
_GROUP = "weight_update_group"
_Selector = Annotated[Json, refused(unless="all", hint=": there is one model")]


class InitGroupBody(Body):
    """The body of `POST /init_weights_update_group`: a group of the trainer's rank 0 and the fleet's workers."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, lt=1 << 16)]
    rank_offset: Annotated[int, Field(ge=1, lt=1 << 16)] = 1
    world_size: Annotated[int, Field(ge=2, lt=1 << 16)]
    group_name: GroupName = _GROUP
    backend: Literal["nccl", "gloo"] = "nccl"

    def to_group(self) -> GroupInit:
        """Return the group."""
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

    `flattened_bucket` is one broadcast of all. `flush_cache` is accepted and not used: `kv_policy` counts.
    """

    dtypes: list[DtypeName]
    group_name: GroupName = _GROUP
    weight_version: VersionText | None = None
    load_format: Literal["flattened_bucket"] | None = None
    flush_cache: Ignored = None
    torch_empty_cache: Ignored = None
    abort_all_requests: Annotated[Json, refused(hint=": call `/abort_request` before")] = None
    selector: _Selector = None

    def to_part(self) -> TransferPart:
        """Return the part."""
        return TransferPart(
            self.group_name,
            self.tensors,
            Packing.PLAIN if self.load_format is None else Packing.FLAT,
            version=None if self.weight_version is None else int(self.weight_version),
        )


class MemoryBody(Body):
    """The body of `POST /release_memory_occupation` and `/resume_memory_occupation`: nothing is all of it."""

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
    """The verbs, and the facts that both dialects ask for under one path."""

    def __init__(self, coordinator: FrontPort, admin: AdminRoutes, calls: SglangCalls, endpoint: Endpoint) -> None:
        self._coordinator = coordinator
        self._admin = admin
        self._calls = calls
        self._endpoint = endpoint

    def router(self, keys: Keys) -> APIRouter:
        """Return the routes, each behind the admin key."""
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
        """Pause all replicas until `/continue_generation`. With `abort` the dialect's calls end with their tokens.

        With `retract` and `in_place` calls go on after it; which KV they use then is the update's `kv_policy`.
        """
        mode: Literal["abort", "keep"] = "abort" if body.mode == "abort" else "keep"
        await self._admin.pause(PauseBody(mode=mode, reason="/pause_generation"))
        if body.mode == "abort":
            await self._calls.abort(request, None, None)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, body: ContinueGeneration) -> Response:
        """Go on after a pause. Tensors that a trainer's group has brought are served from then on."""
        await self._end_transfer()
        await self._admin.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_from_disk(self, body: UpdateFromDisk) -> Response:
        """Bring every replica to the weights of a directory, staged beside decoding, and answer the report.

        With `flush_cache` no call that begins after it uses older KV, whatever the service's `kv_policy`.
        """
        version = None if body.weight_version is None else int(body.weight_version)
        is_fresh = body.flush_cache and self._endpoint.sessions.parts.kv_policy is KVPolicy.KEEP
        names = {"directory": "model_path", "version": "weight_version"}
        policy = "fresh" if is_fresh else None
        report = await self._admin.update(version, names, directory=body.model_path, kv_policy=policy)
        answer = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        return json_response({**answer, **report})

    async def pull(self, body: Pull) -> Response:
        """Make a published version on every host, once each and verified, for `/update_weights_from_disk`."""
        await self._admin.pull_version(body.source_dir, body.local_checkpoint_dir, body.target_version)
        return _done(f"version {body.target_version} is on every host")

    async def init_group(self, body: InitGroup) -> Response:
        """Have the workers of all replicas join a trainer's group, with the ranks from `rank_offset` on."""
        await self._admin.init_group(body.to_group())
        return _done("the group is there")

    async def begin_update(self, body: Selected) -> Response:
        """Check that a group is there. The transfer begins with the first tensors."""
        if not {*(await self._admin.status()).groups} - {VLLM_GROUP}:
            raise Conflict("there is no group: call `/init_weights_update_group` before")
        return _done("tensors may come")

    async def update_from_group(self, body: UpdateFromGroup) -> Response:
        """Receive tensors beside the served weights while decoding goes on; answered once all replicas have them.

        They are served from `/end_weight_update` on, or from `/continue_generation` on.
        """
        await self._admin.ask(self._coordinator.begin_transfer(body.group_name, is_repeatable=True))
        await self._admin.ask(self._coordinator.receive_part(body.to_part()))
        return _done("the tensors have come")

    async def end_update(self, body: Selected) -> Response:
        """Bring every replica to the weights that came; without any it is a 409."""
        if not await self._end_transfer():
            raise Conflict("no transfer is open: no tensors have come")
        return _done("the weights are served")

    async def destroy_group(self, body: NamedGroup) -> Response:
        """Leave a trainer's group; tensors that are not served yet are dropped."""
        await self._admin.ask(self._coordinator.destroy_group(body.group_name))
        return _done("the group is gone")

    async def _end_transfer(self) -> bool:
        """End the open transfer of a group of this dialect. Returns if there was one."""
        group = (await self._admin.status()).transfer
        if group in ("", VLLM_GROUP):
            return False
        await self._admin.ask(self._coordinator.end_transfer(group))
        return True

    async def flush_cache(self) -> Response:
        """Answer 200, and drop nothing: an update's `kv_policy` says which KV of older weights may be used."""
        await self._admin.status()
        return json_response({"message": "KV of older weights is used as the update's kv_policy says"})

    async def release_memory(self, body: Memory) -> Response:
        """Freeze every replica and give its memory back; weights stay in host memory."""
        if body.tags is not None and not {*body.tags} >= _ALL_TAGS:
            raise UnsupportedParameter("memory is given back as a whole: name both tags, or none", param="tags")
        await self._admin.sleep(SleepBody(reason="/release_memory_occupation"))
        return _done("memory is released")

    async def resume_memory(self, body: Memory) -> Response:
        """Take memory back; once all of it is, generation goes on. CUDA graphs come with the KV cache."""
        tags = None if body.tags is None else [tag for tag in body.tags if tag != "cuda_graph"]
        if tags != []:
            await self._admin.wake(WakeBody(tags=tags))
        return _done("memory is resumed")

    async def weight_version(self) -> Response:
        """Return the version of the weights that are served, as text; null while there is none."""
        return json_response({"weight_version": version_text(await self._admin.status())})

    async def model_info(self) -> Response:
        """Return the model's name and the served version."""
        version = version_text(await self._admin.status())
        facts = {"model_path": self._endpoint.model_name, "is_generation": True, "weight_version": version}
        return json_response(facts)

    async def server_info(self, config_format: Annotated[Literal["text", "json"], Query()] = "text") -> Response:
        """Return what both dialects' trainers read at their start: vLLM's config, and SGLang's sizes.

        The fleet is one engine to them: its `tp_size` is the number of processes that hold weights.
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
    """Return how far the fleet is with the next weights, in the words of external rollout services."""
    if status.update is not None:
        return "STAGING" if status.update.state == "staging" else "COMMITTING"
    store = "" if status.store is None else status.store.state
    return {"updating": "FETCHING", "failed": "ERROR"}.get(store, "IDLE")


def _failure(error: AgentLoopError) -> dict[str, Any]:
    return {"success": False, "message": error.message, **sglang_bodies.error_body(error)}
