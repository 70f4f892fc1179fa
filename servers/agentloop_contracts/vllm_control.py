"""The control verbs of vLLM's server for RL, as trainers call them: pause, weights, sleep, and facts of the server.

The paths, parameters and answers are those of vLLM 0.32 (`entrypoints/rl/online`, `serve/dev`, `serve/lora`), and
prime-rl's `/update_weights {weight_dir}`. Each does what the admin route of the same purpose does, on the whole
fleet, and needs the admin key as that does. `docs/guides/vllm-dialect.md` says what differs.

The native weight transfer (`/init_weight_transfer_engine` to `/finish_weight_update`) is one of a group over all
replicas (`agentloop/fleet/trainer_groups.py`), by NCCL or by CUDA IPC handles.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AfterValidator, Field, model_validator
from starlette.responses import Response

from agentloop.api.coordinator import AdapterPush, FrontPort, ServiceStatus
from agentloop.api.requests import Body, Directory, PauseBody, SleepBody, UnloadAdapterBody, Version, WakeBody
from agentloop.chat.fields import Ignored
from agentloop.engine.interface import GroupBackend, GroupInit, Packing, TensorInfo, TransferPart
from agentloop.errors import InvalidRequest, ModelNotFound, UnsupportedParameter
from agentloop.values import codec
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import json_body
from agentloop_servers.http.openapi import OBJECT, add_route, errors
from agentloop_servers.http.responses import json_response
from agentloop_servers.ingress.admin import AdminRoutes, fields_called

GROUP = "vllm"
"""The name of the one group that vLLM's verbs speak of."""

_NO_BROADCAST = (
    "prime-rl's own broadcast is not taken; write a directory, and call `/update_weights` with its `weight_dir`"
)
REFUSED = {
    "/abort_requests": "requests are aborted by closing their connections",
    "/fetch_weights": "deltas are not taken; call `/update_weights` with the `weight_dir` of a whole checkpoint",
    "/init_broadcaster": _NO_BROADCAST,
    "/start_draft_weight_update": "there is no draft model whose weights are updated",
    "/update_weight_version": "a version is given with its weights: `/finish_weight_update` takes `weight_version`",
    "/collective_rpc": "engines' workers are not called from outside",
}
"""The verbs that are refused, and what to do instead."""

_ADAPTER_FIELDS = {"name": "lora_name", "adapter": "lora_path"}
_SAMPLED_MODE = "processed_logprobs"
_RAW_MODE = "raw_logprobs"

VersionText = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
BufferBytes = Annotated[int, Field(ge=1, le=1 << 40)]
Base64 = Annotated[bytes, Field(strict=False), AfterValidator(partial(base64.b64decode, validate=True))]
TensorName = Annotated[str, Field(min_length=1, max_length=1024)]
DtypeName = Annotated[str, Field(max_length=32)]
Mode = Annotated[Literal["abort", "wait", "keep"], Query()]
SleepLevel = Annotated[int, Query(ge=1, le=2)]
Tags = Annotated[list[Literal["weights", "kv_cache"]] | None, Query(max_length=2)]
Flag = Annotated[bool, Query()]


class UnsupportedVerb(InvalidRequest):
    """A verb of vLLM's server that this service has in another form."""

    code = "unsupported_verb"


class TensorLists(Body):
    """The tensors of a part of a transfer, in the order in which they come: three lists of one length."""

    names: Annotated[list[TensorName], Field(min_length=1, max_length=1 << 20)]
    shapes: list[Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=16)]]

    dtypes_field: ClassVar[str] = "dtypes"
    place: ClassVar[str] = ""  # of the lists in the request's body

    @model_validator(mode="after")
    def _is_aligned(self) -> Self:
        for name in (self.dtypes_field, "shapes"):
            if (num := len(getattr(self, name))) != len(self.names):
                raise InvalidRequest(f"{num} {name} for {len(self.names)} names", param=f"{self.place}{name}")
        return self

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The tensors."""
        described = zip(self.names, getattr(self, self.dtypes_field), self.shapes, strict=True)
        return tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in described)


class InitInfo(Body):
    """vLLM's `init_info` of its NCCL engine, or of its IPC engine, which has no address."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    master_port: Annotated[int, Field(ge=1, lt=1 << 16)] = 0
    rank_offset: Annotated[int, Field(ge=1)] = 1
    world_size: Annotated[int, Field(ge=2)] = 2
    packed: bool = False
    packed_buffer_size_bytes: BufferBytes = 1 << 30
    packed_num_buffers: Ignored = None

    def to_group(self) -> GroupInit:
        """Return the group. An engine of IPC has no ranks."""
        is_ipc = self.master_address is None
        return GroupInit(
            GROUP,
            GroupBackend.IPC if is_ipc else GroupBackend.VLLM,
            self.master_address or "",
            self.master_port,
            self.rank_offset,
            self.world_size,
            Packing.PACKED if self.packed else Packing.PLAIN,
            self.packed_buffer_size_bytes,
        )


class InitBody(Body):
    """The body of `POST /init_weight_transfer_engine`."""

    init_info: InitInfo


class UpdateInfo(TensorLists):
    """vLLM's `update_info`: the tensors of one part.

    `packed` and the buffers' size are those of the `init_info` if they are not given. IPC's handles come pickled.
    Empty lists, as vLLM 0.33 sends from its second update on, are those of the last part.
    """

    dtypes_field: ClassVar[str] = "dtype_names"
    place: ClassVar[str] = "update_info."

    names: Annotated[list[TensorName], Field(max_length=1 << 20)]
    dtype_names: list[DtypeName]
    packed: bool | None = None
    packed_buffer_size_bytes: BufferBytes | None = None
    packed_num_buffers: Ignored = None
    ipc_handles: None = None
    ipc_handles_pickled: Base64 | None = None
    tensor_sizes: Ignored = None

    def to_part(self) -> TransferPart:
        """Return the tensors of this request as a part of the fleet's transfer."""
        return TransferPart(
            GROUP,
            self.tensors,
            None if self.packed is None else Packing.PACKED if self.packed else Packing.PLAIN,
            self.packed_buffer_size_bytes or 0,
            self.ipc_handles_pickled or b"",
        )


class UpdateWeightsBody(Body):
    """The body of `POST /update_weights`: a part of a transfer, or a directory and the version that it becomes.

    Without a `version` it is the next one after what is served.
    """

    update_info: UpdateInfo | None = None
    weight_dir: Directory | None = None
    version: Version | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> UpdateWeightsBody:
        if self.update_info is None and self.weight_dir is None and "weight_dir" in self.model_fields_set:
            raise UnsupportedParameter(
                _NO_BROADCAST, param="weight_dir"
            )  # prime-rl's, where its trainer broadcasts
        if (self.update_info is None) == (self.weight_dir is None):
            raise InvalidRequest("an update is a `weight_dir` or an `update_info`", param="weight_dir")
        return self


class FinishUpdateBody(Body):
    """The body of `POST /finish_weight_update`, which may be left out: the version is the next one then."""

    weight_version: VersionText | None = None


async def _finish_body(request: Request) -> FinishUpdateBody:
    """Read a body that may be left out."""
    return await _READ_FINISH(request) if await request.body() else FinishUpdateBody()


_READ_FINISH = json_body(FinishUpdateBody)


class LoadAdapterBody(Body):
    """The body of `POST /load_lora_adapter`: a directory with an adapter in the PEFT format.

    Where adapters are served by name it is the next version of its own. Else it becomes the policy that is served,
    as the next version, and its name is a name of the model from then on.
    """

    lora_name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
    lora_path: Directory
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None


Init = Annotated[InitBody, Depends(json_body(InitBody))]
Finish = Annotated[FinishUpdateBody, Depends(_finish_body)]
UpdateWeights = Annotated[UpdateWeightsBody, Depends(json_body(UpdateWeightsBody))]
LoadAdapter = Annotated[LoadAdapterBody, Depends(json_body(LoadAdapterBody))]
UnloadAdapter = Annotated[UnloadAdapterBody, Depends(json_body(UnloadAdapterBody))]


class VllmControlRoutes:
    """The verbs. What they change goes through the admin routes' own checks."""

    def __init__(self, coordinator: FrontPort, admin: AdminRoutes, endpoint: Endpoint) -> None:
        self._coordinator = coordinator
        self._admin = admin
        self._endpoint = endpoint

    def router(self, keys: Keys) -> APIRouter:
        """Return the routes, each behind the admin key; adapters' also for users that may push their own."""
        self._keys, whole = keys, APIRouter(responses={**errors(), **OBJECT}, tags=["vllm control"])
        router = APIRouter(dependencies=[Depends(keys.require_admin)])
        adapters = APIRouter(dependencies=[Depends(keys.require_pusher)])
        table: list[tuple[str, str, Any, type[Body] | None]] = [
            ("POST", "/pause", self.pause, None),
            ("POST", "/resume", self.resume, None),
            ("GET", "/is_paused", self.is_paused, None),
            ("POST", "/init_weight_transfer_engine", self.init_transfer, InitBody),
            ("POST", "/start_weight_update", self.start_update, None),
            ("POST", "/update_weights", self.update_weights, UpdateWeightsBody),
            ("POST", "/finish_weight_update", self.finish_update, FinishUpdateBody),
            ("POST", "/shutdown_weight_transfer_engine", self.shutdown_transfer, None),
            ("GET", "/weight_info", self.weight_info, None),
            ("POST", "/sleep", self.sleep, None),
            ("POST", "/wake_up", self.wake_up, None),
            ("GET", "/is_sleeping", self.is_sleeping, None),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache, None),
            ("GET", "/get_world_size", self.get_world_size, None),
        ]
        for method, path, handler, body in table:
            add_route(router, method, path, handler, body)
        refuse(router, REFUSED)
        for prefix in ("", "/v1"):
            add_route(adapters, "POST", f"{prefix}/load_lora_adapter", self.load_adapter, LoadAdapterBody)
            add_route(adapters, "POST", f"{prefix}/unload_lora_adapter", self.unload_adapter, UnloadAdapterBody)
        whole.include_router(router)
        whole.include_router(adapters)
        return whole

    async def pause(self, mode: Mode = "abort", clear_cache: Flag = True) -> Response:
        """Pause generation on every replica until `/resume`.

        With `abort` clients see nothing: what was cut goes on after the resume. `clear_cache` is accepted and not
        used: which KV is used after an update is its `kv_policy`.
        """
        await self._admin.pause(PauseBody(mode=mode, reason="/pause"))
        return json_response({"status": "paused"})

    async def resume(self) -> Response:
        """Go on after a pause."""
        await self._admin.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self) -> Response:
        """Tell if an operator's or a trainer's pause holds."""
        return json_response({"is_paused": (await self._admin.status()).is_paused})

    async def init_transfer(self, body: Init) -> Response:
        """Have the workers of all replicas join the trainer's group, in place of an earlier one."""
        await self._admin.init_group(body.init_info.to_group(), is_replacement=True)
        return json_response({"message": "Weight transfer initialized"})

    async def start_update(self) -> Response:
        """Begin a transfer. Nothing is paused for it."""
        await self._admin.ask(self._coordinator.begin_transfer(GROUP))
        return json_response({"message": "Weight update started"})

    async def update_weights(self, body: UpdateWeights) -> Response:
        """Receive a part of the transfer, or bring every replica to the weights of a directory.

        A part is staged beside the served weights, and answered once all replicas have it. A directory is under the
        service's weight roots, and has safetensors files in checkpoint names. A pause that holds before it holds
        after it.
        """
        if body.update_info is not None:
            await self._admin.ask(self._coordinator.receive_part(body.update_info.to_part()))
            return json_response({"message": "Weights updated"})
        names = {"directory": "weight_dir"}
        report = await self._admin.update(body.version, names, directory=body.weight_dir)
        return json_response({"status": "ok", "message": "Weights updated", **report})

    async def finish_update(self, body: Finish) -> Response:
        """Bring every replica to the weights that came, and answer the report."""
        version = None if body.weight_version is None else int(body.weight_version)
        report = await self._admin.ask(self._coordinator.end_transfer(GROUP, version))
        answer = {"message": "Weight update finished", "weight_version": str(report.version)}
        return json_response({**answer, "report": codec.to_builtins(report)})

    async def shutdown_transfer(self) -> Response:
        """Leave the trainer's group; an open transfer is dropped."""
        await self._admin.ask(self._coordinator.destroy_group(GROUP))
        return json_response({"message": "Weight transfer shut down"})

    async def weight_info(self) -> Response:
        """Return the version of the weights that are served, as text; null while there is none."""
        return json_response({"weight_version": version_text(await self._admin.status())})

    async def load_adapter(self, request: Request, body: LoadAdapter) -> Response:
        """Serve an adapter by its name, as the next version of it; or, where there is but one, as the policy's next
        version, and know the model by the adapter's name."""
        if self._endpoint.by_name is not None:
            with fields_called(_ADAPTER_FIELDS):
                pushed = await self._admin.push_adapter(request, AdapterPush(body.lora_name, body.lora_path))
            answer = {"status": "ok", "message": f"Success: LoRA adapter '{body.lora_name}' added successfully."}
            return json_response(
                {**answer, "weight_version": str(pushed.version), "report": codec.to_builtins(pushed)}
            )
        await self._keys.require_admin(request)
        report = await self._admin.update(None, _ADAPTER_FIELDS, adapter=body.lora_path)
        self._endpoint.name_adapter(body.lora_name)
        return json_response({"status": "ok", "message": "Weights updated", **report})

    async def unload_adapter(self, request: Request, body: UnloadAdapter) -> Response:
        """Serve an adapter no more, where adapters are served by name."""
        if self._endpoint.by_name is None:
            raise ModelNotFound(
                "this service has no adapters by name: its one is replaced by the next one, or by whole weights",
                param="lora_name",
            )
        with fields_called(_ADAPTER_FIELDS):
            await self._admin.unload_adapter(request, body.lora_name)
        return json_response(
            {"status": "ok", "message": f"Success: LoRA adapter '{body.lora_name}' removed successfully."}
        )

    async def sleep(self, level: SleepLevel = 1, mode: Mode = "abort") -> Response:
        """Freeze every replica and give its memory back; what runs goes on after `/wake_up`, whatever the mode."""
        await self._admin.sleep(SleepBody(level=level, reason="/sleep"))
        return json_response({"status": "sleeping", "level": level})

    async def wake_up(self, tags: Tags = None) -> Response:
        """Take memory back; once all of it is, generation goes on."""
        await self._admin.wake(WakeBody(tags=tags or None))
        asleep = (await self._admin.status()).asleep
        return json_response({"status": "sleeping" if asleep else "awake", "tags": tags})

    async def is_sleeping(self) -> Response:
        """Tell if the fleet has given memory back."""
        return json_response({"is_sleeping": bool((await self._admin.status()).asleep)})

    async def reset_prefix_cache(self) -> Response:
        """Answer that nothing was dropped, as vLLM does while blocks are held: an update's `kv_policy` says which
        KV of older weights may be used."""
        await self._admin.status()
        return json_response({"success": False})

    async def get_world_size(self, include_dp: Flag = True) -> Response:
        """Count the processes that hold weights: of all replicas, or of the largest one."""
        status = await self._admin.status()
        return json_response({"world_size": num_workers(status) if include_dp else max(_worlds(status), default=0)})


def config_of(status: ServiceStatus, endpoint: Endpoint) -> dict[str, Any]:
    """Return the fields of vLLM's config that trainers read.

    Their route is in `sglang_control.py`, which adds what SGLang's clients ask for under the same path.
    """
    dtypes = sorted({one.weight_dtype for one in status.replicas if one.weight_dtype is not None})
    ranks = [one.lora_rank for one in status.replicas if one.lora_rank is not None]
    max_loras = max((one.max_loras or 1 for one in status.replicas), default=1)
    is_raw = endpoint.logprobs_mode is LogprobsMode.RAW
    return {
        "model_config": {
            "model": endpoint.model_name,
            "served_model_name": endpoint.model_name,
            "dtype": f"torch.{dtypes[0]}" if len(dtypes) == 1 else None,
            "max_model_len": endpoint.max_model_len,
            "logprobs_mode": _RAW_MODE if is_raw else _SAMPLED_MODE,
            "quantization": next((one.quantization for one in status.replicas if one.quantization), None),
        },
        "parallel_config": {
            "world_size": max(_worlds(status), default=0),
            "world_size_across_dp": num_workers(status),
            "data_parallel_size": len(_worlds(status)),
        },
        "lora_config": {"max_lora_rank": max(ranks), "max_loras": max_loras} if ranks else None,
        "weight_transfer_config": {"backend": "nccl"},
    }


def version_text(status: ServiceStatus) -> str | None:
    """Return the served version as both dialects write it."""
    return None if status.weight_version is None else str(status.weight_version)


def num_workers(status: ServiceStatus) -> int:
    """Count the engine workers that a trainer's weight-transfer group can have, over all replicas."""
    return sum(_worlds(status))


def _worlds(status: ServiceStatus) -> list[int]:
    """Return the world sizes of the replicas that can: not of quarantined ones, nor of those whose calls fail."""
    found = [one for one in status.replicas if one.state != "quarantined"]
    return [one.num_workers for one in found if one.state != "suspect" or one.error is None]


def refuse(router: APIRouter, verbs: Mapping[str, str]) -> None:
    """Add routes that refuse verbs, each with what to do instead."""
    for path, advice in verbs.items():
        router.add_api_route(
            path, _refusing(path, advice), methods=["POST"], response_model=None, include_in_schema=False
        )


def _refusing(path: str, advice: str) -> Any:
    async def refuse() -> NoReturn:
        raise UnsupportedVerb(f"{path} is not served here: {advice}")

    return refuse
