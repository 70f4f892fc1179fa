"""The interface to the publisher of weight versions, which is loaded on first use.

The publisher is `agentloop_store/publisher.py`, in the extra `store`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from agentloop import parts
from agentloop.client.push import Weights
from agentloop.errors import InvalidRequest
from agentloop.plugins import resolve

PUBLISHER = "store-publisher"  # its name among the weight sources of `agentloop.parts`
AS_BYTES = "agentloop_servers.weight_transfer.trainer:as_bytes"


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor to publish. `dtype` is torch's name; `load` returns the bytes as a uint8 array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """The store, the run and the encoding of published versions. See docs/guides/published-versions.md."""

    store: str
    run: str
    encoding: str = "xor"  # the encoding of deltas: "xor" or "overwrite"
    checksum: str = "xxh3-128"  # or "blake3", "adler32"
    full_every: int = 16  # every n-th publication is full; 1: no deltas
    cache: str | None = None  # folder of the last published version; None: a folder of the run in ~/.cache

    def __post_init__(self) -> None:
        if self.full_every < 1:
            raise InvalidRequest(f"full_every must be at least 1, not {self.full_every}", param="full_every")


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result of a publication."""

    version: int
    base_version: int | None  # the version that the delta is relative to; None: full
    num_bytes: int  # in the store
    num_full_bytes: int  # size of the complete checkpoint
    num_changed: int  # changed tensors
    encode_s: float
    upload_s: float


class Publisher(Protocol):
    """The publisher of one run. All calls block."""

    def publish(self, tensors: Sequence[TensorBytes] | Path, version: int) -> PublishReport:
        """Publish a version and make it the latest. The tensors must not change until this returns."""


def open_publisher(options: PublishOptions) -> Publisher:
    """Create the publisher. Raises InvalidRequest if the extra `store` is not installed."""
    make = cast(Callable[[PublishOptions], Publisher], parts.load(parts.WEIGHT_SOURCES, PUBLISHER, param="store"))
    return make(options)


def tensor_bytes(weights: Weights, dtype: str | None) -> Sequence[TensorBytes] | Path:
    """Convert weights for a publisher: a folder, or tensors that are cast to `dtype` when they are loaded."""
    if isinstance(weights, str | Path):
        if dtype is not None:
            raise InvalidRequest(
                f"dtype {dtype!r} cannot be applied: a directory is published unchanged", param="dtype"
            )
        return Path(weights)
    as_bytes = cast(Callable[..., Sequence[TensorBytes]], resolve(AS_BYTES, param="weights"))
    return as_bytes(weights, dtype)
