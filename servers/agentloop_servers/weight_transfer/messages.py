"""The messages on the link between a sender of weights and one engine worker.

Order of an update, worker to sender: Hello, Ready, Go, then for each pass LaneBytes and Arrived, at the end Done or
(any time) Fail; sender to worker: Accept or Refuse, then for each pass StartPass, LaneBytes, EndPass or
AbandonPass; Abandon ends all. A link survives an update only by a `Done`, so no message of an old update meets a
new one.
"""

from __future__ import annotations

import msgspec


class BaseMessage(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """What all messages have in common."""


class BadNews(BaseMessage, frozen=True):
    """The sender's word that something ends; tagged in its subclasses."""

    reason: str


class Hello(BaseMessage, frozen=True, tag="hello"):
    """A worker introduces itself. `host` and `device` are equal exactly for processes on one host or one device."""

    token: str
    rank: int
    host: str
    device: str  # "cpu", or the CUDA device's uuid
    can_hold: bool  # whether its memory has room beside the served weights
    num_receivers: int


class Accept(BaseMessage, frozen=True, tag="accept"):
    """The worker is in. In one phase it says Go at its commit, else together with Ready."""

    transport: str
    is_one_phase: bool
    bucket_bytes: int


class Refuse(BadNews, frozen=True, tag="refuse"):
    """The worker is not in."""


class Ready(BaseMessage, frozen=True, tag="ready"):
    """The worker's memory for the update is there."""


class Go(BaseMessage, frozen=True, tag="go"):
    """Bytes may flow."""


class StartPass(BaseMessage, frozen=True, tag="start_pass"):
    """Bucket 0 comes next; whatever came before is void."""

    pass_id: int


class AbandonPass(BadNews, frozen=True, tag="abandon_pass"):
    """The pass is void; another one follows, or Abandon."""

    pass_id: int


class Abandon(BadNews, frozen=True, tag="abandon"):
    """The update is off for this worker."""


class LaneBytes(BaseMessage, frozen=True, tag="lane"):
    """A lane's own message."""

    pass_id: int
    body: bytes


class Arrived(BaseMessage, frozen=True, tag="arrived"):
    """Every bucket of the pass has been consumed; its lane is done with it."""

    pass_id: int


class EndPass(BaseMessage, frozen=True, tag="end_pass"):
    """Everybody has every bucket; `checksums` has one entry a bucket."""

    pass_id: int
    checksums: list[int]


class Done(BaseMessage, frozen=True, tag="done"):
    """The worker has everything and has compared it."""


class Fail(BaseMessage, frozen=True, tag="fail"):
    """The worker is out of this update."""

    reason: str


Message = (
    Hello
    | Accept
    | Refuse
    | Ready
    | Go
    | StartPass
    | AbandonPass
    | Abandon
    | LaneBytes
    | Arrived
    | EndPass
    | Done
    | Fail
)
