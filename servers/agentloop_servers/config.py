"""ServiceConfig: the one description of a service, in YAML. `serve deploy FILE` and `agentloop serve` read the same
file: it is a Ray Serve config whose application arguments are this model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentloop.errors import InvalidRequest
from agentloop.types import KVPolicy

CHECKOUT = Path(__file__).resolve().parents[2]
"""Where relative paths of a config are looked for when the working directory has no such path."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineConfig(_Strict):
    """One engine replica."""

    kind: Literal["vllm", "simulated"] = "vllm"
    device: Literal["cpu", "cuda"] = "cuda"
    dtype: str = "bfloat16"
    load_format: Literal["auto", "dummy"] = "auto"
    max_context_tokens: int | None = None  # None: what the model's config.json says
    max_running: Annotated[int, Field(ge=1)] = 256
    block_size: Annotated[int, Field(ge=1)] = 32  # on CPU a multiple of 32
    kv_cache_mib: int | None = None  # CPU: required, the default would claim most of the memory
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    enforce_eager: bool = False  # always on for CPU
    num_threads: Annotated[int, Field(ge=1)] = 1  # CPU
    num_cpus: Annotated[float, Field(ge=0)] = 1.0  # what Ray reserves for a replica


class WorkerSettings(_Strict):
    """The agent-loop workers."""

    replicas: Annotated[int, Field(ge=1)] = 1
    capacity: Annotated[int, Field(ge=1)] = 256
    turn_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    parser: str = "hermes"
    tools: dict[str, str] = {}  # name: import path, beside the shipped ones
    on_unstable_template: Literal["raise", "fork"] = "raise"


class KeysConfig(_Strict):
    """Environment variables that hold bearer keys. Both are optional on loopback and required beyond it."""

    user_key_env: str = "AGENTLOOP_KEY"
    admin_key_env: str = "AGENTLOOP_ADMIN_KEY"


class ServiceConfig(_Strict):
    """A whole service. With `load_format: dummy` replicas take no traffic until weights are pushed."""

    model: str
    model_version: Annotated[int, Field(ge=0)] = 0
    replicas: Annotated[int, Field(ge=1)] = 1
    engine: EngineConfig = EngineConfig()
    workers: WorkerSettings = WorkerSettings()
    ingress_replicas: Annotated[int, Field(ge=1)] = 1
    kv_policy: KVPolicy = KVPolicy.RECOMPUTE
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: a free one
    weight_roots: list[str] = []  # directories that pushed weights may come from; the model's parent always may
    keys: KeysConfig = KeysConfig()
    run_dir: str | None = None
    max_queued_trajectories: Annotated[int, Field(ge=1)] = 100_000

    @classmethod
    def load(cls, path: Path) -> ServiceConfig:
        """Read a Serve config file: its first application's arguments and its HTTP address.

        Raises InvalidRequest, naming the file and the field.
        """
        try:
            document = yaml.safe_load(path.read_text())
            http = document.get("http_options", {})
            address = {name: http[name] for name in ("host", "port") if name in http}
            return cls.model_validate(document["applications"][0]["args"] | address)
        except OSError as error:
            raise InvalidRequest(f"cannot read the config {path}: {error.strerror}", param="config") from error
        except (yaml.YAMLError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"{path} is not a Serve config of an agentloop application", param="config"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"{path}: {where}: {first['msg']}", param=where) from error

    def model_path(self) -> Path:
        """The model's folder, absolute. Raises InvalidRequest if there is none."""
        path = located(self.model)
        if not (path / "config.json").is_file():
            raise InvalidRequest(f"no model at {self.model}: it has no config.json", param="model")
        return path

    def allowed_weight_roots(self) -> tuple[Path, ...]:
        """The folders under which pushed weights must lie."""
        return (self.model_path().parent, *(located(root) for root in self.weight_roots))


def located(path: str) -> Path:
    """A config's path: absolute, else in the working directory, else in the checkout of this package."""
    given = Path(path).expanduser()
    if given.is_absolute() or given.exists():
        return given.resolve()
    return (CHECKOUT / given).resolve()
