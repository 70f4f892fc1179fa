"""The control routes of vLLM's server for RL trainers: pause, weights, sleep, and server information.

Paths, parameters and responses are those of vLLM 0.32 (`entrypoints/rl/online`, `serve/dev`, `serve/lora`), plus
prime-rl's `/update_weights {weight_dir}`. Each route applies the corresponding admin route to the complete fleet
and requires the admin key. `docs/guides/vllm-dialect.md` lists the differences.

The native weight transfer (`/init_weight_transfer_engine` to `/finish_weight_update`) uses one process group over
all replicas (`agentloop/fleet/trainer_groups.py`), with NCCL or CUDA IPC handles.
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
"""The name of the single process group of vLLM's routes."""

_NO_BROADCAST = (
    "prime-rl's broadcast is not supported; write a directory, and call `/update_weights` with its `weight_dir`"
)
REFUSED = {
    "/abort_requests": "to abort a request, close its connection",
    "/fetch_weights": "deltas are not supported; call `/update_weights` with the `weight_dir` of a full checkpoint",
    "/init_broadcaster": _NO_BROADCAST,
    "/start_draft_weight_update": "draft models are not supported",
    "/update_weight_version": "set the version with its weights: `weight_version` in `/finish_weight_update`",
    "/collective_rpc": "calls to the engines' workers are not supported",
}
"""The routes that are rejected, and the alternative for each."""

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
    """A route of the engine's own server that this service does not support."""

    code = "unsupported_verb"


class TensorLists(Body):
    """The tensors of a part of a transfer in transfer order, as three lists of equal length."""

    names: Annotated[list[TensorName], Field(min_length=1, max_length=1 << 20)]
    shapes: list[Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=16)]]

    dtypes_field: ClassVar[str] = "dtypes"
    place: ClassVar[str] = ""  # prefix of the lists' path in the request body

    @model_validator(mode="after")
    def _is_aligned(self) -> Self:
        for name in (self.dtypes_field, "shapes"):
            if (num := len(getattr(self, name))) != len(self.names):
                raise InvalidRequest(
                    f"{num} {name} for {len(self.names)} names: the lists must have equal lengths",
                    param=f"{self.place}{name}",
                )
        return self

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The lists combined into tensor descriptions."""
        described = zip(self.names, getattr(self, self.dtypes_field), self.shapes, strict=True)
        return tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in described)


class InitInfo(Body):
    """vLLM's `init_info` for NCCL, or for CUDA IPC, which has no address."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    master_port: Annotated[int, Field(ge=1, lt=1 << 16)] = 0
    rank_offset: Annotated[int, Field(ge=1)] = 1
    world_size: Annotated[int, Field(ge=2)] = 2
    packed: bool = False
    packed_buffer_size_bytes: BufferBytes = 1 << 30
    packed_num_buffers: Ignored = None

    def to_group(self) -> GroupInit:
        """Convert the body to a GroupInit. Ranks are ignored for CUDA IPC."""
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
    """vLLM's `update_info`: the tensors of one part of a transfer.

    `packed` and the buffer size default to the values of `init_info`. CUDA IPC handles are pickled. Empty lists,
    which vLLM 0.33 sends from its second update on, mean the lists of the last part.
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
        """Convert the body to a TransferPart."""
        return TransferPart(
            GROUP,
            self.tensors,
            None if self.packed is None else Packing.PACKED if self.packed else Packing.PLAIN,
            self.packed_buffer_size_bytes or 0,
            self.ipc_handles_pickled or b"",
        )


class UpdateWeightsBody(Body):
    """The body of `POST /update_weights`: a part of a transfer, or a directory and its new version.

    The default `version` is the next one after the served version.
    """

    update_info: UpdateInfo | None = None
    weight_dir: Directory | None = None
    version: Version | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> UpdateWeightsBody:
        if self.update_info is None and self.weight_dir is None and "weight_dir" in self.model_fields_set:
            # prime-rl sends `weight_dir: null` if its trainer broadcasts the weights.
            raise UnsupportedParameter(_NO_BROADCAST, param="weight_dir")
        if (self.update_info is None) == (self.weight_dir is None):
            raise InvalidRequest("give either `weight_dir` or `update_info`", param="weight_dir")
        return self


class FinishUpdateBody(Body):
    """The optional body of `POST /finish_weight_update`. The default version is the next one."""

    weight_version: VersionText | None = None


async def _finish_body(request: Request) -> FinishUpdateBody:
    """Parse a body that can be empty."""
    return await _READ_FINISH(request) if await request.body() else FinishUpdateBody()


_READ_FINISH = json_body(FinishUpdateBody)


class LoadAdapterBody(Body):
    """The body of `POST /load_lora_adapter`: a directory with an adapter in the PEFT format.

    If adapters are served by name, it becomes the next version of the adapter with this name. Otherwise it becomes
    the next version of the policy, and its name becomes an additional name of the model.
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
    """vLLM's control routes. All changes pass the checks of the admin routes."""

    def __init__(self, coordinator: FrontPort, admin: AdminRoutes, endpoint: Endpoint) -> None:
        self._coordinator = coordinator
        self._admin = admin
        self._endpoint = endpoint

    def router(self, keys: Keys) -> APIRouter:
        """Return the routes. Each requires the admin key; users that may push adapters can also use the adapter
        routes."""
        self._keys, combined = keys, APIRouter(responses={**errors(), **OBJECT}, tags=["vllm control"])
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
        combined.include_router(router)
        combined.include_router(adapters)
        return combined

    async def pause(self, mode: Mode = "abort", clear_cache: Flag = True) -> Response:
        """Pause generation on every replica until `/resume`.

        With `abort`, aborted requests continue after the resume without an effect for their clients. `clear_cache`
        is accepted and ignored: the `kv_policy` of an update applies to older KV.
        """
        await self._admin.pause(PauseBody(mode=mode, reason="/pause"))
        return json_response({"status": "paused"})

    async def resume(self) -> Response:
        """End a pause."""
        await self._admin.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self) -> Response:
        """Return whether generation is paused by an operator or a trainer."""
        return json_response({"is_paused": (await self._admin.status()).is_paused})

    async def init_transfer(self, body: Init) -> Response:
        """Make the workers of all replicas join the trainer's process group, which replaces an earlier one."""
        await self._admin.init_group(body.init_info.to_group(), is_replacement=True)
        return json_response({"message": "Weight transfer initialized"})

    async def start_update(self) -> Response:
        """Start a transfer, without a pause."""
        await self._admin.ask(self._coordinator.begin_transfer(GROUP))
        return json_response({"message": "Weight update started"})

    async def update_weights(self, body: UpdateWeights) -> Response:
        """Receive a part of the transfer, or update every replica to the weights of a directory.

        A part is staged next to the served weights; the route returns when all replicas have it. A directory must
        be under the service's weight roots and contain safetensors files with checkpoint names. The route does not
        end a pause.
        """
        if body.update_info is not None:
            await self._admin.ask(self._coordinator.receive_part(body.update_info.to_part()))
            return json_response({"message": "Weights updated"})
        names = {"directory": "weight_dir"}
        report = await self._admin.update(body.version, names, directory=body.weight_dir)
        return json_response({"status": "ok", "message": "Weights updated", **report})

    async def finish_update(self, body: Finish) -> Response:
        """Update every replica to the received weights, and return the report."""
        version = None if body.weight_version is None else int(body.weight_version)
        report = await self._admin.ask(self._coordinator.end_transfer(GROUP, version))
        answer = {"message": "Weight update finished", "weight_version": str(report.version)}
        return json_response({**answer, "report": codec.to_builtins(report)})

    async def shutdown_transfer(self) -> Response:
        """Leave the trainer's process group; an open transfer is dropped."""
        await self._admin.ask(self._coordinator.destroy_group(GROUP))
        return json_response({"message": "Weight transfer shut down"})

    async def weight_info(self) -> Response:
        """Return the version of the served weights as a string; null if no weights are served."""
        return json_response({"weight_version": version_text(await self._admin.status())})

    async def load_adapter(self, request: Request, body: LoadAdapter) -> Response:
        """Serve an adapter as the next version of its name. Without adapters by name, serve it as the policy's next
        version, and accept its name as a model name."""
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
        """Unload an adapter that is served by name."""
        if self._endpoint.by_name is None:
            raise ModelNotFound(
                f"adapter {body.lora_name!r} cannot be unloaded: this service does not serve adapters by name; its"
                " adapter is replaced by the next adapter, or by full weights",
                param="lora_name",
            )
        with fields_called(_ADAPTER_FIELDS):
            await self._admin.unload_adapter(request, body.lora_name)
        return json_response(
            {"status": "ok", "message": f"Success: LoRA adapter '{body.lora_name}' removed successfully."}
        )

    async def sleep(self, level: SleepLevel = 1, mode: Mode = "abort") -> Response:
        """Freeze every replica and release its memory. In every mode, running requests continue after
        `/wake_up`."""
        await self._admin.sleep(SleepBody(level=level, reason="/sleep"))
        return json_response({"status": "sleeping", "level": level})

    async def wake_up(self, tags: Tags = None) -> Response:
        """Allocate released memory again; generation continues when all memory is allocated."""
        await self._admin.wake(WakeBody(tags=tags or None))
        asleep = (await self._admin.status()).asleep
        return json_response({"status": "sleeping" if asleep else "awake", "tags": tags})

    async def is_sleeping(self) -> Response:
        """Return whether the fleet has released memory."""
        return json_response({"is_sleeping": bool((await self._admin.status()).asleep)})

    async def reset_prefix_cache(self) -> Response:
        """Return that no KV was dropped, like vLLM while requests hold blocks. The update's `kv_policy` applies to
        KV of older weights."""
        await self._admin.status()
        return json_response({"success": False})

    async def get_world_size(self, include_dp: Flag = True) -> Response:
        """Count the processes that hold weights, in all replicas or in the largest replica."""
        status = await self._admin.status()
        return json_response({"world_size": num_workers(status) if include_dp else max(_worlds(status), default=0)})


def config_of(status: ServiceStatus, endpoint: Endpoint) -> dict[str, Any]:
    """Return the fields of vLLM's config that trainers read.

    The route is in `sglang_control.py`, because SGLang's clients read their fields from the same path.
    """
    dtypes = sorted({replica.weight_dtype for replica in status.replicas if replica.weight_dtype is not None})
    ranks = [replica.lora_rank for replica in status.replicas if replica.lora_rank is not None]
    max_loras = max((replica.max_loras or 1 for replica in status.replicas), default=1)
    is_raw = endpoint.logprobs_mode is LogprobsMode.RAW
    return {
        "model_config": {
            "model": endpoint.model_name,
            "served_model_name": endpoint.model_name,
            "dtype": f"torch.{dtypes[0]}" if len(dtypes) == 1 else None,
            "max_model_len": endpoint.max_model_len,
            "logprobs_mode": _RAW_MODE if is_raw else _SAMPLED_MODE,
            "quantization": next(
                (replica.quantization for replica in status.replicas if replica.quantization), None
            ),
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
    """Return the served version as a string, the format of both dialects."""
    return None if status.weight_version is None else str(status.weight_version)


def num_workers(status: ServiceStatus) -> int:
    """Count the engine workers of all replicas that can join a trainer's weight-transfer group."""
    return sum(_worlds(status))


def _worlds(status: ServiceStatus) -> list[int]:
    """Return the world sizes of the replicas that are neither quarantined nor suspected because of failed calls."""
    usable = [replica for replica in status.replicas if replica.state != "quarantined"]
    return [replica.num_workers for replica in usable if replica.state != "suspect" or replica.error is None]


def refuse(router: APIRouter, verbs: Mapping[str, str]) -> None:
    """Add routes that reject these paths; each error names the alternative."""
    for path, advice in verbs.items():
        router.add_api_route(
            path, _refusing(path, advice), methods=["POST"], response_model=None, include_in_schema=False
        )


def _refusing(path: str, advice: str) -> Any:
    async def refuse() -> NoReturn:
        raise UnsupportedVerb(f"{path} is not supported: {advice}")

    return refuse
