"""Encoded values decode to equal values, and anything else is refused."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from agentloop.errors import InvalidRequest
from agentloop.types import (
    FinishReason,
    GenerateRequest,
    Message,
    OnStale,
    RolloutGroup,
    RolloutTask,
    SamplingParams,
    StalenessLimit,
    StopReason,
    TokenPath,
    ToolCall,
    Trajectory,
    Turn,
    WeightVersionSpan,
)
from agentloop.values import codec


def path() -> TokenPath:
    return TokenPath(
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.array([7, 8], dtype=np.int32),
        response_mask=np.array([True, False]),
        logprobs=np.array([-0.25, 0.0], dtype=np.float32),
        weight_versions=(WeightVersionSpan(0, 0, 1),),
        turns=(Turn(3, 0, 1, FinishReason.STOP, "a", 0),),
    )


def test_a_trajectory_survives():
    call = ToolCall("c", "calculator", {"expression": "1"})
    said = replace(path(), messages=(Message("assistant", "", (call,)),))
    before = Trajectory("t", "g", 0, (said,), StopReason.COMPLETED, True)
    after = codec.decode(codec.encode(before), Trajectory)
    assert after.messages == before.messages == said.messages
    assert after.stop_reason is StopReason.COMPLETED
    for name in ("prompt_ids", "response_ids", "response_mask", "logprobs"):
        one, two = getattr(before.path, name), getattr(after.path, name)
        assert one.dtype == two.dtype
        assert one.tolist() == two.tolist()
    assert after.path.turns == before.path.turns
    assert after.versions == (0,)
    assert after.num_sampled_tokens == 1


def test_messages_are_stored_once_and_older_records_are_read_without_them():
    said = replace(path(), messages=(Message("user", "only once"),))
    data = codec.encode(Trajectory("t", "g", 0, (said,), StopReason.COMPLETED, True))
    assert data.count(b"only once") == 1
    fields = msgspec.msgpack.decode(data)
    del fields["task_messages"], fields["paths"][0]["messages"]
    fields["messages"] = [{"role": "user", "content": "x"}]  # written by an earlier service
    older = codec.decode(codec.encode(fields), Trajectory)
    assert (older.messages, older.path.turns) == ((), said.turns)


def test_what_staleness_adds_survives_and_older_records_and_groups_are_read():
    before = Trajectory("t", "g", 0, (path(),), StopReason.STALE, True, num_masked_tokens=2, staleness=0)
    after = codec.decode(codec.encode(before), Trajectory)
    assert (after.num_masked_tokens, after.staleness, after.max_staleness) == (2, 0, None)
    fields = msgspec.msgpack.decode(codec.encode(before))
    for name in ("num_masked_tokens", "num_stale_attempts", "max_staleness", "staleness"):
        del fields[name]  # written by an earlier service
    older = codec.decode(codec.encode(fields), Trajectory)
    assert (older.num_masked_tokens, older.num_stale_attempts, older.staleness) == (0, 0, None)
    assert (older.num_sampled_tokens, older.oldest_trained_version) == (1, 0)
    group = RolloutGroup("g", RolloutTask("t", ()), 2, "r", StalenessLimit(0, OnStale.MASK, 8, "run"))
    assert codec.decode(codec.encode(group), RolloutGroup) == group
    fields = msgspec.msgpack.decode(codec.encode(group))
    del fields["staleness"]
    assert codec.decode(codec.encode(fields), RolloutGroup) == RolloutGroup("g", RolloutTask("t", ()), 2, "r")


def test_a_request_survives():
    request = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=3, stop_token_ids=(0,)), kv_version=0)
    assert codec.decode(codec.encode(request), GenerateRequest) == request


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", codec.encode({"request_id": "r"}), codec.encode([1, 2]), codec.encode({"token_ids": "text"})],
)
def test_what_is_no_request_is_refused(data):
    with pytest.raises(InvalidRequest):
        codec.decode(data, GenerateRequest)


def test_a_refusal_names_the_field():
    with pytest.raises(InvalidRequest, match=r"\$\.task_id"):
        codec.from_builtins({"task_id": 3, "messages": []}, RolloutTask)
