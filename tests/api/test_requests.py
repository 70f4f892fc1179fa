from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.api.requests import (
    GenerateBody,
    SleepBody,
    SubmitBody,
    TaskBody,
    ToolCallBody,
    WakeBody,
    WeightsBody,
    check_body,
    parse_body,
    task_fields,
)
from agentloop.client.rollout import load_tasks
from agentloop.engine.interface import ALL_MEMORY, MemoryTag, PushSource, TensorInfo, TensorNames, WeightUpdate
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.images import shown
from agentloop.types import (
    Constraint,
    ConstraintKind,
    GenerateRequest,
    KVPolicy,
    Limits,
    Message,
    OnExcess,
    OnStale,
    RolloutTask,
    SamplingParams,
    StalenessLimit,
    ToolCall,
    VersionDemand,
)
from agentloop.values import codec
from tests.support.records.samples import make_task
from tests.support.records.vision_folder import picture

GENERATE = {"token_ids": [1, 2], "sampling": {"max_tokens": 4}}
TASK = {"task_id": "t", "messages": [{"role": "user", "content": "hi"}]}


def test_a_task_comes_through_as_it_was() -> None:
    task = RolloutTask(
        "t",
        (Message("user", "a\x00b"), Message("assistant", "", (ToolCall("c", "f", {"x": [1, None]}),))),
        tools=("calculator",),
        loop="my_package.my_loop:MyLoop",
        reward="exact_match",
        reference={"answer": [1, 2.5, "x", None, True, 1 << 63]},
        limits=Limits(max_turns=3, on_excess_tool_calls=OnExcess.STOP, timeout_s=5),
        temperature=0.0,
        seed=0,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        logit_bias=((3, -100.0),),
        min_tokens=2,
        stop_token_ids=(5,),
        ignore_eos=True,
        stop=("\n\n", "END"),
    )
    body = parse_body(orjson.dumps({"tasks": [task_fields(task)]}), SubmitBody)
    assert body.tasks[0].to_task() == task
    assert parse_body(body.model_dump_json().encode(), SubmitBody) == body
    assert codec.decode(codec.encode(task), RolloutTask) == task


def test_a_task_has_every_sampling_option_of_a_session() -> None:
    of_one_call = {"max_tokens", "num_top_logprobs", "score_from"}
    of_session = {one.name for one in dataclasses.fields(SamplingParams)} - of_one_call
    assert of_session <= TaskBody.model_fields.keys() & {one.name for one in dataclasses.fields(RolloutTask)}
    constraint = {"kind": "regex", "text": "a|b"}
    task = check_body({**TASK, "constraint": constraint}, TaskBody).to_task()
    assert task.constraint == Constraint(ConstraintKind.REGEX, "a|b")
    for beside in ({"tools": ["calculator"]}, {"min_tokens": 1}):
        with pytest.raises(InvalidRequest, match="cannot be combined"):
            check_body({**TASK, "constraint": constraint, **beside}, TaskBody)


def test_a_task_brings_its_images() -> None:
    red, wide = picture(20, 20), picture(40, 10, kind="JPEG")
    content, refs = shown(["What is ", red, wide, "?"])
    task = RolloutTask("t", (Message("system", "Look."), Message("user", content, images=refs)), images=(red, wide))
    body = parse_body(orjson.dumps({"tasks": [task_fields(task)]}), SubmitBody).tasks[0]
    assert body.to_task() == task
    assert body.first_image == "messages.1.content.1"
    assert codec.decode(codec.encode(task), RolloutTask) == task
    with pytest.raises(InvalidRequest, match="which is not in its images"):
        task_fields(replace(task, images=(red,)))


def test_an_image_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(picture(20, 20).data)
    for url, error in (("http://x/a.png", UnsupportedParameter), ("data:image/png;base64,AAAA", InvalidRequest)):
        content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]
        with pytest.raises(error) as refused:
            check_body({**TASK, "messages": [{"role": "user", "content": content}]}, TaskBody).to_task()
        assert refused.value.param == "messages.0.content.1"
    content = [{"type": "image_url", "image_url": {"url": f"file://{tmp_path}/red.png"}}]
    local = {**TASK, "messages": [{"role": "user", "content": content}]}
    with pytest.raises(UnsupportedParameter, match="local image files"):
        check_body(local, TaskBody).to_task()
    assert check_body(local, TaskBody).to_task([tmp_path]).images == (picture(20, 20),)
    # A task file is local to the user, so it may refer to local images.
    (tmp_path / "tasks.jsonl").write_bytes(orjson.dumps(local))
    assert load_tasks(tmp_path / "tasks.jsonl")[0].images == (picture(20, 20),)
    for part in ({"type": "image_url"}, {"type": "video_url"}, {"type": "image_url", "image_url": {"url": 1}}):
        with pytest.raises(InvalidRequest, match=r"^messages\.0\.content\.0") as refused:
            check_body({**TASK, "messages": [{"role": "user", "content": [part]}]}, TaskBody)
        assert "~" not in refused.value.message


def test_what_is_left_out_has_the_dataclass_default() -> None:
    assert check_body(TASK, TaskBody).to_task() == RolloutTask("t", (Message("user", "hi"),))


def sampled(**fields: Any) -> dict[str, Any]:
    return changed(GENERATE, sampling={"max_tokens": 4, **fields})


def test_all_of_sampling_is_on_the_wire() -> None:
    sampling = SamplingParams(
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_tokens=1,
        seed=3,
        stop_token_ids=(2,),
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        logit_bias=((3, -100.0), (4, 2.5)),
        num_top_logprobs=5,
        constraint=Constraint(ConstraintKind.REGEX, "a|b"),
        min_p=0.25,
        repetition_penalty=1.5,
        ignore_eos=True,
        priority=-2,
        weight_version=VersionDemand(3, 5, 1.5),
    )
    wire = codec.to_builtins(sampling)
    assert wire.pop("score_from") is None  # a client requests scores in a separate call
    body = changed(GENERATE, sampling=wire)
    request = parse_body(orjson.dumps(body), GenerateBody).to_request("id")
    assert request.sampling == sampling
    assert codec.decode(codec.encode(request), GenerateRequest) == request


def test_generate_becomes_a_request() -> None:
    request = check_body(GENERATE, GenerateBody).to_request("id")
    assert (request.token_ids, request.sampling.max_tokens, request.sampling.temperature) == ((1, 2), 4, 1.0)
    assert check_body({"version": 0, "directory": "/x", "kv_policy": "keep"}, WeightsBody).policy is KVPolicy.KEEP


PUSH: dict[str, Any] = {
    "addresses": ["127.0.0.1:5000", "[::1]:65535"],
    "token": "t0ken",
    "tensors": [
        {"name": "a.weight", "dtype": "bfloat16", "shape": [2, 3]},
        {"name": "b", "dtype": "int8", "shape": []},
    ],
    "names": "runtime",
}


def test_weights_come_from_one_source() -> None:
    tensors = (TensorInfo("a.weight", "bfloat16", (2, 3)), TensorInfo("b", "int8", ()))
    source = PushSource(("127.0.0.1:5000", "[::1]:65535"), "t0ken", tensors, TensorNames.RUNTIME)
    assert check_body({"version": 1, "push": PUSH}, WeightsBody).to_update() == WeightUpdate(1, push=source)
    assert check_body({"version": 1, "adapter": "/x"}, WeightsBody).to_update() == WeightUpdate(1, adapter="/x")
    for sources in ({}, {"directory": "/x", "adapter": "/y"}, {"directory": "/x", "push": PUSH}):
        with pytest.raises(InvalidRequest, match="one source"):
            check_body({"version": 1, **sources}, WeightsBody).to_update()


@pytest.mark.slow
def test_a_large_model_is_announced_in_little_time() -> None:
    tensors = [{"name": f"model.layers.{i}.weight", "dtype": "bfloat16", "shape": [8, 8]} for i in range(100_000)]
    data = orjson.dumps({"version": 1, "push": {**PUSH, "tensors": tensors}})
    started_s = time.process_time()  # CPU time, so that other work on the host does not count
    update = parse_body(data, WeightsBody).to_update()
    assert time.process_time() - started_s < 10  # measured: 0.3 s
    assert update.push is not None
    assert len(update.push.tensors) == 100_000


def test_no_tags_wake_everything() -> None:
    assert check_body({}, WakeBody).memory == check_body({"tags": None}, WakeBody).memory == ALL_MEMORY
    assert check_body({"tags": ["weights"]}, WakeBody).memory == {MemoryTag.WEIGHTS}
    assert check_body({}, SleepBody).level == 1


def test_a_staleness_limit_comes_through_and_zero_is_one() -> None:
    assert check_body({"tasks": [TASK]}, SubmitBody).staleness is None
    assert check_body({"tasks": [TASK], "max_staleness": 0}, SubmitBody).staleness == StalenessLimit(0)
    body = {"max_staleness": 2, "on_stale": "drop", "trajectories_per_version": 8, "run_id": "run"}
    staleness = check_body({"tasks": [TASK], **body}, SubmitBody).staleness
    assert staleness == StalenessLimit(2, OnStale.DROP, 8, "run")


def changed(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**body, **changes}


TENSOR = PUSH["tensors"][0]


def pushed(**changes: Any) -> dict[str, Any]:
    """A pushed update whose first tensor is invalid."""
    return {"version": 1, "push": changed(PUSH, tensors=[changed(TENSOR, **changes)])}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (GenerateBody, changed(GENERATE, token_ids=[]), "token_ids"),
        (GenerateBody, changed(GENERATE, token_ids=[-1]), "token_ids.0"),
        (GenerateBody, changed(GENERATE, token_ids=[1, True]), "token_ids.1"),
        (GenerateBody, changed(GENERATE, token_ids=["1"]), "token_ids.0"),
        (GenerateBody, changed(GENERATE, token_ids=[1.5]), "token_ids.0"),
        (GenerateBody, changed(GENERATE, token_ids=[1 << 70]), "token_ids.0"),
        (GenerateBody, changed(GENERATE, sampling={}), "sampling.max_tokens"),
        (GenerateBody, changed(GENERATE, sampling={"max_tokens": 0}), "sampling.max_tokens"),
        (GenerateBody, changed(GENERATE, sampling={"max_tokens": 1, "temperature": -1}), "sampling.temperature"),
        (GenerateBody, changed(GENERATE, sampling={"max_tokens": 1, "stop_token_ids": [0] * 65}), "sampling."),
        (GenerateBody, sampled(frequency_penalty=2.5), "sampling.frequency_penalty"),
        (GenerateBody, sampled(presence_penalty="1"), "sampling.presence_penalty"),
        (GenerateBody, sampled(num_top_logprobs=1 << 21), "sampling.num_top_logprobs"),
        (GenerateBody, sampled(min_p=1.5), "sampling.min_p"),
        (GenerateBody, sampled(temperature=1e-7), "sampling.temperature"),
        (GenerateBody, sampled(repetition_penalty=0), "sampling.repetition_penalty"),
        (GenerateBody, sampled(num_top_logprobs=True), "sampling.num_top_logprobs"),
        (GenerateBody, sampled(logit_bias={"3": 1}), "sampling.logit_bias"),
        (GenerateBody, sampled(logit_bias=[[3, 10**6]]), "sampling.logit_bias.0.1"),
        (GenerateBody, sampled(logit_bias=[[3, True]]), "sampling.logit_bias.0.1"),
        (GenerateBody, sampled(logit_bias=[["3", 1]]), "sampling.logit_bias.0.0"),
        (GenerateBody, sampled(logit_bias=[[1 << 70, 1]]), "sampling.logit_bias.0.0"),
        (GenerateBody, sampled(logit_bias=[[3]]), "sampling.logit_bias.0.1"),
        (GenerateBody, sampled(logit_bias=[[index, 1] for index in range(1025)]), "sampling.logit_bias"),
        (GenerateBody, sampled(constraint={"kind": "magic"}), "sampling.constraint.kind"),
        (GenerateBody, sampled(constraint={"kind": "regex", "text": "a" * 65_537}), "sampling.constraint.text"),
        (GenerateBody, changed(GENERATE, timeout_s=math.inf), "timeout_s"),
        (GenerateBody, changed(GENERATE, timeout_s=True), "timeout_s"),
        (GenerateBody, changed(GENERATE, prompt="hi"), "prompt"),
        (GenerateBody, None, None),
        (GenerateBody, [], None),
        (SubmitBody, {"tasks": []}, "tasks"),
        (SubmitBody, {"tasks": [TASK], "num_samples": 0}, "num_samples"),
        (SubmitBody, {"tasks": [TASK], "num_samples": 1025}, "num_samples"),
        (SubmitBody, {"tasks": [TASK], "num_samples": True}, "num_samples"),
        (SubmitBody, {"tasks": [TASK], "rollout_id": "../etc"}, "rollout_id"),
        (SubmitBody, {"tasks": [TASK], "max_staleness": -1}, "max_staleness"),
        (SubmitBody, {"tasks": [TASK], "max_staleness": True}, "max_staleness"),
        (SubmitBody, {"tasks": [TASK], "max_staleness": 0, "on_stale": "keep"}, "on_stale"),
        (
            SubmitBody,
            {"tasks": [TASK], "max_staleness": 0, "trajectories_per_version": 0},
            "trajectories_per_version",
        ),
        (SubmitBody, {"tasks": [TASK], "trajectories_per_version": 4}, None),
        (SubmitBody, {"tasks": [TASK], "max_staleness": 0, "run_id": "a/b"}, "run_id"),
        (SubmitBody, {"tasks": [TASK] * 4097}, "tasks"),
        (SubmitBody, {"tasks": [changed(TASK, messages=[])]}, "tasks.0.messages"),
        (SubmitBody, {"tasks": [changed(TASK, messages=[{"role": "robot"}])]}, "tasks.0.messages.0.role"),
        (SubmitBody, {"tasks": [changed(TASK, loop="os; import x")]}, "tasks.0.loop"),
        (SubmitBody, {"tasks": [changed(TASK, reference=float("nan"))]}, "tasks.0.reference"),
        (SubmitBody, {"tasks": [changed(TASK, reference=1 << 64)]}, "tasks.0.reference"),
        (SubmitBody, {"tasks": [changed(TASK, limits={"max_turns": 0})]}, "tasks.0.limits.max_turns"),
        (SubmitBody, {"tasks": [changed(TASK, extra=1)]}, "tasks.0.extra"),
        (WeightsBody, {"version": -1, "directory": "/x"}, "version"),
        (WeightsBody, {"version": 1, "directory": ""}, "directory"),
        (WeightsBody, {"version": 1, "directory": "/x", "kv_policy": "drop"}, "kv_policy"),
        (WeightsBody, {"version": 1, "adapter": "/" * 4097}, "adapter"),
        (WeightsBody, {"version": 1, "push": {}}, "push.addresses"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, addresses=[])}, "push.addresses"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, addresses=["host"])}, "push.addresses.0"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, addresses=["host:0"])}, "push.addresses.0"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, addresses=["host:70000"])}, "push.addresses.0"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, addresses=["a b:1"])}, "push.addresses.0"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, addresses=["h:1"] * 4097)}, "push.addresses"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, token="a b")}, "push.token"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, names="mine")}, "push.names"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, num_receivers=3)}, "push.num_receivers"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, tensors=[])}, "push.tensors"),
        (WeightsBody, {"version": 1, "push": changed(PUSH, tensors=[TENSOR] * 100_001)}, "push.tensors"),
        (WeightsBody, pushed(name=""), "push.tensors.0.name"),
        (WeightsBody, pushed(name="a\nb"), "push.tensors.0.name"),
        (WeightsBody, pushed(dtype="__import__"), "push.tensors.0.dtype"),
        (WeightsBody, pushed(shape=[-1]), "push.tensors.0.shape.0"),
        (WeightsBody, pushed(shape=[1] * 9), "push.tensors.0.shape"),
        (SleepBody, {"level": 0}, "level"),
        (SleepBody, {"level": 3}, "level"),
        (SleepBody, {"level": True}, "level"),
        (WakeBody, {"tags": []}, "tags"),
        (WakeBody, {"tags": ["lora"]}, "tags.0"),
    ],
)
def test_bad_bodies_name_the_field(kind: Any, body: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_body(body, kind)
    assert (caught.value.param or "").startswith(param or "")
    assert (caught.value.param is None) == (param is None)


def test_a_deep_reference_is_refused_in_linear_time() -> None:
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested deeper"):
        check_body(changed(TASK, reference=deep), TaskBody)


def test_many_problems_are_told_as_ten() -> None:
    body = changed(TASK, **{f"unknown_{index}": 1 for index in range(10_000)})
    with pytest.raises(InvalidRequest) as caught:
        check_body(body, TaskBody)
    assert caught.value.message.count("unknown_") == 10
    assert caught.value.message.endswith("and 9990 more")
    long = changed(TASK, **{"k" * 1_000_000: 1})
    with pytest.raises(InvalidRequest) as caught:
        check_body(long, TaskBody)
    assert len(caught.value.message) + len(caught.value.param or "") < 1000


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_an_invalid_request(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(data, GenerateBody)


def test_task_files_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(task_fields(make_task(f"t{i}"))) for i in range(3)) + b"\n\n")
    assert [task.task_id for task in load_tasks(path)] == ["t0", "t1", "t2"]


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        (b"{", "line 2: the body is not valid JSON"),
        (b'{"task_id": "x"}', "line 2: messages"),
        (orjson.dumps(TASK), "line 2: task_id 't' occurs twice"),
    ],
)
def test_a_bad_task_file_names_the_line(tmp_path: Path, second_line: bytes, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(orjson.dumps(TASK) + b"\n" + second_line)
    with pytest.raises(InvalidRequest, match=message):
        load_tasks(path)


def test_a_missing_or_empty_task_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_tasks(tmp_path / "absent")
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidRequest, match="contains no task"):
        load_tasks(tmp_path / "empty")


def test_an_integer_may_be_written_as_a_whole_float() -> None:
    body = changed(
        GENERATE, token_ids=[1.0, 2], sampling={"max_tokens": 4.0, "seed": 7.0, "logit_bias": [[3.0, 1]]}
    )
    read = check_body(body, GenerateBody)
    found = [*read.token_ids, read.sampling.max_tokens, read.sampling.seed, read.sampling.logit_bias[0][0]]
    assert [(type(value), value) for value in found] == [(int, 1), (int, 2), (int, 4), (int, 7), (int, 3)]
    free = check_body({"id": "a", "name": "f", "arguments": {"x": 1.0}}, ToolCallBody)
    assert repr(free.arguments["x"]) == "1.0"  # a value without a schema keeps its text
