"""The port to the publisher of weight versions; a client that publishes none needs nothing of it.

The publisher is `agentloop_store/publisher.py`, of the extra `store`.
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

PUBLISHER = "store-publisher"  # as a weight source of `agentloop.parts`
AS_BYTES = "agentloop_servers.weight_transfer.trainer:as_bytes"


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor to publish: its dtype as torch names it, and `load`, which returns its bytes as a uint8 array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """The store and the run, and the form of versions. See docs/guides/contracts.md."""

    store: str
    run: str
    encoding: str = "xor"  # of deltas: or "overwrite"
    checksum: str = "xxh3-128"  # or "blake3", "adler32"
    full_every: int = 16  # publications from one full one to the next; 1: no deltas
    cache: str | None = None  # the folder of the last version published; None: one of the run in ~/.cache

    def __post_init__(self) -> None:
        if self.full_every < 1:
            raise InvalidRequest("full_every is at least 1", param="full_every")


@dataclass(frozen=True, slots=True)
class PublishReport:
    """A version that is published: its bytes in the store, and those of the whole checkpoint."""

    version: int
    base_version: int | None  # None: a full one
    num_bytes: int
    num_full_bytes: int
    num_changed: int  # tensors
    encode_s: float
    upload_s: float


class Publisher(Protocol):
    """The publisher of one run. All calls block."""

    def publish(self, tensors: Sequence[TensorBytes] | Path, version: int) -> PublishReport:
        """Publish a version, and move the pointer to it. The tensors must not change until this returns."""


def open_publisher(options: PublishOptions) -> Publisher:
    """Make the publisher of this distribution. Raises InvalidRequest if the extra `store` is missing."""
    make = cast(Callable[[PublishOptions], Publisher], parts.load(parts.WEIGHT_SOURCES, PUBLISHER, param="store"))
    return make(options)


def tensor_bytes(weights: Weights, dtype: str | None) -> Sequence[TensorBytes] | Path:
    """Return weights as a publisher takes them: a folder, or tensors, cast to `dtype` as they are loaded."""
    if isinstance(weights, str | Path):
        if dtype is not None:
            raise InvalidRequest("a directory is published as it is: it has no dtype", param="dtype")
        return Path(weights)
    as_bytes = cast(Callable[..., Sequence[TensorBytes]], resolve(AS_BYTES, param="weights"))
    return as_bytes(weights, dtype)
