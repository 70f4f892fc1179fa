"""HTTP request bodies, shared by client and ingress, with all their limits.

Validation is strict: strings are not converted to numbers or booleans to integers, unknown fields and non-finite
numbers are refused, and every list and string has a maximum length. An integer may be written as `1.0`, because
JSON has one number type. Of duplicate keys the last one counts. The bodies have the same fields as the dataclasses
of `types.py` and `engine/interface.py`, so that `values/codec.py` can convert them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import CoreSchema, core_schema, from_json

from agentloop.api.annotations import AnnotationScope, SampleAnnotation, annotation_in
from agentloop.api.coordinator import AdapterPush, RolloutTerms
from agentloop.engine.interface import ALL_MEMORY, MemoryTag, PushSource, TensorNames, WeightUpdate
from agentloop.errors import InvalidRequest
from agentloop.images import MAX_IMAGE_URL_CHARS, Image, data_url, each_once, parts_of, read_image, shown
from agentloop.types import (
    GenerateRequest,
    KVPolicy,
    Limits,
    OnStale,
    PauseMode,
    RolloutTask,
    SamplingParams,
    StalenessLimit,
    VersionDemand,
)
from agentloop.values import codec
from agentloop.values.checks import (
    MAX_ALTERNATIVES,
    MAX_BIAS,
    MAX_CONSTRAINT_CHARS,
    MAX_LOGIT_BIASES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
)

B = TypeVar("B", bound=BaseModel)

MAX_PROBLEMS = 10
MAX_ORDER_REASON_CHARS = 300  # for pause and sleep
MAX_PROBLEM_CHARS = 300
MAX_PROMPT_TOKENS = 1 << 20
MAX_SCORED_PROMPTS = 256  # per call; the client splits larger requests
MAX_SCORES = 1 << 20  # logprobs per response, including alternatives
MAX_SCORES_BYTES = 120 * MAX_SCORES  # the memory of such a response in a process: pairs of two numbers
MAX_STOP_TOKEN_IDS = 64
MAX_TASKS = 4096  # per submit; the client splits larger requests
MAX_SAMPLES = 1024
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_TASK_MESSAGES = 1024
MAX_TASK_CONTENT_CHARS = 1 << 20
MAX_RUBRIC_CHARS = 16_384
MAX_TASK_TOOLS = 128
MAX_TEMPLATE_KWARGS = 64
MAX_TASK_PARTS = 1024  # texts and images per message
MAX_TOOL_CALLS = 256
MAX_REFERENCE_DEPTH = 32
MAX_TIMEOUT_S = 24 * 3600.0
MAX_WAIT_S = 60.0
MAX_HOLD_S = 7 * 24 * 3600.0
MAX_HELD_REPLICAS = 4096
DEFAULT_HOLD_S = 3600.0
HOLD_LEASE_S = 60.0  # a hold ends after this time without a renewal
MAX_PAGE = 256  # trajectories per read
MAX_PRIORITY = 1000
MAX_SHARE = 1000.0
MAX_CURSOR = 1 << 53
MAX_ANNOTATIONS = 512  # records per call; the client splits larger requests
MAX_PATHS = 4096  # per annotated record
MAX_ADDRESSES = 4096
MAX_TENSORS = 100_000
MAX_TENSOR_NAME_CHARS = 512
MAX_TENSOR_DIMENSIONS = 8

_INT32_MAX = (1 << 31) - 1
_LIMITS = Limits()
_TASK = RolloutTask(task_id="", messages=())  # the source of the default values
_SAMPLING = SamplingParams(max_tokens=1)


def _sampleable(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 or at least {MIN_TEMPERATURE:g}, not {temperature:g}")
    return temperature


ID_PATTERN = r"^[A-Za-z0-9._\-]{1,128}$"
Id = Annotated[str, Field(pattern=ID_PATTERN)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
ImportName = Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_.]*)?$")]
EnvironmentName = Annotated[
    str, Field(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z0-9_][A-Za-z0-9_.\-]*)?$")
]
TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
Text = Annotated[str, Field(max_length=MAX_TASK_CONTENT_CHARS)]
_TEMPERATURES: JsonDict = {"anyOf": [{"const": 0}, {"minimum": MIN_TEMPERATURE}]}
Temperature = Annotated[
    float, Field(ge=0, le=MAX_TEMPERATURE, json_schema_extra=_TEMPERATURES), AfterValidator(_sampleable)
]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0, le=MAX_TOP_K)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
_Addend = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Bias = Annotated[tuple[TokenId, _Addend], Field(strict=False)]  # JSON has no tuples; the items are still strict
Directory = Annotated[str, Field(min_length=1, max_length=4096)]
Version = Annotated[int, Field(ge=0, lt=1 << 63)]


def _storable(value: JsonValue) -> JsonValue:
    """Return the value if the binary codec can encode it: limited nesting, integers of at most 64 bits."""
    level, depth = [value], 0
    while level:
        if depth > MAX_REFERENCE_DEPTH:
            raise ValueError(f"must not be nested deeper than {MAX_REFERENCE_DEPTH} levels")
        if any(isinstance(item, int) and not -(1 << 63) <= item < 1 << 64 for item in level):
            raise ValueError("integers must fit into 64 bits")
        children = (
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        )
        level, depth = [child for values in children for child in values], depth + 1
    return value


Json = Annotated[JsonValue, AfterValidator(_storable)]


def _with_port(value: str) -> str:
    if not 1 <= int(value.rpartition(":")[2]) <= 65535:
        raise ValueError("the port must be from 1 to 65535")
    return value


Address = Annotated[
    str,
    Field(max_length=260, pattern=r"^([A-Za-z0-9._\-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$"),
    AfterValidator(_with_port),
]


def _with_whole_floats(schema: Any) -> Any:
    """Return a validation schema that also accepts floats without a fraction as integers.

    This is a core schema and not a Python validator, because a body has up to a million token ids.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(_with_whole_floats(item) for item in schema)
    if not isinstance(schema, dict) or schema.get("type") == "chain":
        return schema
    if schema.get("type") != "int":
        opaque = ("metadata", "default")  # they contain values, not schemas
        return {key: value if key in opaque else _with_whole_floats(value) for key, value in schema.items()}
    number = core_schema.union_schema(
        [core_schema.int_schema(strict=True), core_schema.float_schema(strict=True)],
        mode="left_to_right",
        custom_error_type="int_type",
    )
    whole: Any = {**schema, "strict": False}
    described = {"pydantic_js_functions": [lambda _, handler: handler(whole)]}
    return core_schema.chain_schema([number, whole], metadata=described)


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _with_whole_floats(handler(source))
        return schema


def parse_body(data: bytes, kind: type[B]) -> B:
    """Parse and validate a body. Raises InvalidRequest if `data` is not UTF-8 JSON or not a valid `kind`.

    The parser also refuses lone surrogates, nesting beyond 200 levels and integers of more than 4,300 digits.
    """
    try:
        value = from_json(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    return check_body(value, kind)


def check_body(value: Any, kind: type[B]) -> B:
    """Validate a parsed body.

    Raises InvalidRequest with at most ten problems and the first one's field as `param`.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise invalid_request([(untagged(problem["loc"]), problem["msg"]) for problem in problems]) from error


def untagged(place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the location of a problem without pydantic's union tags, which begin with `~`."""
    return tuple(part for part in place if not (isinstance(part, str) and part.startswith("~")))


def invalid_request(problems: Sequence[tuple[tuple[int | str, ...], str]]) -> InvalidRequest:
    """Combine problems, pairs of location and message, into one error of limited length."""
    lines = []
    for place, message in problems[:MAX_PROBLEMS]:
        where = ".".join(map(str, place))
        lines.append((f"{where}: {message}" if where else message)[:MAX_PROBLEM_CHARS])
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    param = ".".join(map(str, problems[0][0]))[:MAX_PROBLEM_CHARS] if problems else ""
    return InvalidRequest("; ".join(lines), param=param or None)


# Generation


class ConstraintBody(Body):
    """A `Constraint`."""

    kind: Literal["json_schema", "json_object", "structural_tag", "regex"]
    text: str = Field(default="", max_length=MAX_CONSTRAINT_CHARS)


class VersionDemandBody(Body):
    """The weight versions that a call accepts. The call waits up to `wait_s` for them, then fails with 409."""

    min_version: Version | None = None
    exact_version: Version | None = None
    wait_s: float = Field(default=0.0, ge=0, le=MAX_TIMEOUT_S)

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        if self.exact_version is not None and self.exact_version < (self.min_version or 0):
            raise ValueError(
                f"exact_version {self.exact_version} is below min_version {self.min_version}: no version meets both"
            )
        return self

    def to_demand(self) -> VersionDemand:
        return VersionDemand(self.min_version, self.exact_version, self.wait_s)


class SamplingOptionsBody(Body):
    """The `SamplingOptions` of a call."""

    temperature: Temperature = _SAMPLING.temperature
    top_p: TopP = _SAMPLING.top_p
    top_k: TopK = _SAMPLING.top_k
    min_tokens: int = Field(default=_SAMPLING.min_tokens, ge=0, le=MAX_PROMPT_TOKENS)
    seed: Seed | None = None
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    frequency_penalty: Penalty = _SAMPLING.frequency_penalty
    presence_penalty: Penalty = _SAMPLING.presence_penalty
    logit_bias: list[Bias] = Field(default_factory=list, max_length=MAX_LOGIT_BIASES)
    constraint: ConstraintBody | None = None
    min_p: MinP = _SAMPLING.min_p
    repetition_penalty: RepetitionPenalty = _SAMPLING.repetition_penalty
    ignore_eos: bool = _SAMPLING.ignore_eos
    priority: int = Field(default=_SAMPLING.priority, ge=-_INT32_MAX, le=_INT32_MAX)
    weight_version: VersionDemandBody | None = None


class SamplingBody(SamplingOptionsBody):
    """The `SamplingParams` of a call. `max_tokens` is required."""

    max_tokens: int = Field(ge=1, le=MAX_PROMPT_TOKENS)
    num_top_logprobs: int = Field(default=_SAMPLING.num_top_logprobs, ge=0, le=MAX_ALTERNATIVES)


class GenerateBody(Body):
    """The body of `POST /generate`: the token ids of a prompt, and sampling parameters."""

    token_ids: Annotated[list[TokenId], FailFast()] = Field(min_length=1, max_length=MAX_PROMPT_TOKENS)
    sampling: SamplingBody
    timeout_s: float = Field(default=600.0, gt=0, le=MAX_TIMEOUT_S)
    weight_version: VersionDemandBody | None = None  # overrides the one in `sampling`
    model: Name | None = None  # outside of sessions: a model other than the policy, or an adapter

    def to_request(self, request_id: str) -> GenerateRequest:
        sampling = codec.from_builtins(self.sampling.model_dump(), SamplingParams)
        if self.weight_version is not None:
            sampling = replace(sampling, weight_version=self.weight_version.to_demand())
        return GenerateRequest(request_id, tuple(self.token_ids), sampling, timeout_s=self.timeout_s)


class ScoredPrompt(Body):
    """The token ids of a sequence, scored from index `start` on. The first token has no logprob."""

    token_ids: Annotated[list[TokenId], FailFast()] = Field(min_length=2, max_length=MAX_PROMPT_TOKENS)
    start: int = Field(default=1, ge=1, le=MAX_PROMPT_TOKENS)

    @model_validator(mode="after")
    def _has_scores(self) -> Self:
        if self.start >= len(self.token_ids):
            raise ValueError(f"start {self.start} must be less than the number of tokens, {len(self.token_ids)}")
        return self


class TokenScoreBody(Body):
    """The body of `POST /score`: sequences whose tokens are scored, with the `top_k` most likely alternatives."""

    prompts: list[ScoredPrompt] = Field(min_length=1, max_length=MAX_SCORED_PROMPTS)
    top_k: int = Field(default=0, ge=0, le=MAX_ALTERNATIVES)
    timeout_s: float = Field(default=600.0, gt=0, le=MAX_TIMEOUT_S)
    weight_version: VersionDemandBody | None = None
    model: Name | None = None  # as in `GenerateBody`


# Rollouts


class ToolCallBody(Body):
    """A `ToolCall` in the messages of a task."""

    id: Name
    name: Name
    arguments: dict[str, Json] = Field(default_factory=dict, max_length=MAX_TOOL_CALLS)
    status: Literal["ok", "malformed"] = "ok"
    error: Text | None = None
    token_start: int = Field(default=0, ge=0, le=_INT32_MAX)
    token_end: int = Field(default=0, ge=0, le=_INT32_MAX)
    text: Text = ""
    written_id: Text = ""
    partial_arguments: Text | None = None


class ImageUrl(Body):
    """The `data:` URL of an image. `detail` is ignored, because the model's own processor scales images."""

    url: Annotated[str, Field(max_length=MAX_IMAGE_URL_CHARS)]
    detail: Annotated[str, Field(max_length=64)] | None = None


class ImagePart(Body):
    """An image in the content of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class TaskTextPart(Body):
    """A text in the content of a message."""

    type: Literal["text"]
    text: Text


def _content_tag(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~parts"


def _part_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"~{kind}" if isinstance(kind, str) else None


TaskPart = Annotated[
    Annotated[TaskTextPart, Tag("~text")] | Annotated[ImagePart, Tag("~image_url")],
    Discriminator(
        _part_tag,
        custom_error_type="unknown_part",
        custom_error_message="the type of a content part must be text or image_url",
    ),
]


class MessageBody(Body):
    """A `Message`. The content is a text, or a list of texts and images."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[Text, Tag("~text")] | Annotated[list[TaskPart], Field(max_length=MAX_TASK_PARTS), Tag("~parts")],
        Discriminator(_content_tag),
    ] = ""
    tool_calls: list[ToolCallBody] = Field(default_factory=list, max_length=MAX_TOOL_CALLS)
    tool_call_id: Name | None = None
    name: Name | None = None
    reasoning: Text = ""


class LimitsBody(Body):
    """The `Limits` of a task. Missing fields have default values."""

    max_turns: int = Field(default=_LIMITS.max_turns, ge=1, le=4096)
    max_tool_calls_per_turn: int = Field(default=_LIMITS.max_tool_calls_per_turn, ge=0, le=4096)
    max_tool_calls: int = Field(default=_LIMITS.max_tool_calls, ge=0, le=1 << 16)
    max_tokens_per_turn: int = Field(default=_LIMITS.max_tokens_per_turn, ge=1, le=MAX_PROMPT_TOKENS)
    max_sampled_tokens: int = Field(default=_LIMITS.max_sampled_tokens, ge=1, le=MAX_PROMPT_TOKENS)
    max_context_tokens: int | None = Field(default=None, ge=1, le=MAX_PROMPT_TOKENS)
    max_tool_response_bytes: int = Field(default=_LIMITS.max_tool_response_bytes, ge=0, le=1 << 24)
    timeout_s: float = Field(default=_LIMITS.timeout_s, gt=0, le=MAX_TIMEOUT_S)
    reward_timeout_s: float = Field(default=_LIMITS.reward_timeout_s, gt=0, le=MAX_TIMEOUT_S)
    on_excess_tool_calls: Literal["answer", "stop"] = _LIMITS.on_excess_tool_calls.value
    on_long_tool_response: Literal["answer", "stop"] = _LIMITS.on_long_tool_response.value


class JudgeBody(Body):
    """A reward from another model of the service, which judges the conversation by a rubric."""

    model: Name
    rubric: Annotated[str, Field(min_length=1, max_length=MAX_RUBRIC_CHARS)]


def _reward_shape(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~judge"


CreditName: TypeAlias = Literal["trajectory", "lineage", "main"]


class TaskBody(SamplingOptionsBody):
    """A `RolloutTask`. The lines of task files have the same fields."""

    task_id: Name
    messages: Annotated[list[MessageBody], FailFast()] = Field(min_length=1, max_length=MAX_TASK_MESSAGES)
    tools: list[Name] = Field(default_factory=list, max_length=MAX_TASK_TOOLS)
    loop: ImportName = _TASK.loop
    reward: (
        Annotated[
            Annotated[ImportName, Tag("~text")] | Annotated[JudgeBody, Tag("~judge")], Discriminator(_reward_shape)
        ]
        | None
    ) = None
    reference: Json = None
    limits: LimitsBody = LimitsBody()
    stop: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field(
        default_factory=list, max_length=MAX_STOPS
    )
    template_kwargs: dict[str, Json] = Field(default_factory=dict, max_length=MAX_TEMPLATE_KWARGS)
    tool_setup: dict[Name, Json] = Field(default_factory=dict, max_length=MAX_TASK_TOOLS)
    environment: EnvironmentName | None = None
    credit: CreditName = _TASK.credit.value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.constraint is not None and (self.tools or self.min_tokens):
            other = "tools" if self.tools else "min_tokens"
            raise ValueError(f"{other} and constraint cannot be combined: remove one of them")
        return self

    @property
    def first_image(self) -> str | None:
        """The location of the first image, `messages.i.content.j`; None without images."""
        locations = (
            f"messages.{index}.content.{position}"
            for index, message in enumerate(self.messages)
            for position, part in enumerate(() if isinstance(message.content, str) else message.content)
            if isinstance(part, ImagePart)
        )
        return next(locations, None)

    def to_task(self, image_roots: Sequence[Path] = ()) -> RolloutTask:
        """Return the task with its images, which may be local files within `image_roots`.

        Raises InvalidRequest and UnsupportedParameter, with the field as `param`, for an image that cannot be read.
        """
        fields = self.model_dump()
        images: list[Image] = []
        for index, (message, body) in enumerate(zip(self.messages, fields["messages"], strict=True)):
            if not isinstance(message.content, str):
                parts = read_parts(message.content, image_roots, f"messages.{index}.content")
                content, refs = shown(parts)
                body |= {"content": content, "images": codec.to_builtins(refs)}
                images += [part for part in parts if isinstance(part, Image)]
        return replace(codec.from_builtins(fields, RolloutTask), images=each_once(images))


def read_parts(
    parts: Sequence[Any], image_roots: Sequence[Path], param: str, *, first: int = 0
) -> list[str | Image]:
    """Return the texts and images of validated content parts.

    Raises the errors of `read_image` with the part as `param`. `first` is the index of the first part in the field
    `param`.
    """
    contents: list[str | Image] = []
    for position, part in enumerate(parts, start=first):
        if not isinstance(part, ImagePart):
            contents.append(part.refusal if part.type == "refusal" else part.text)
            continue
        try:
            contents.append(read_image(part.image_url.url, image_roots))
        except InvalidRequest as error:
            raise type(error)(error.message, param=f"{param}.{position}") from error
    return contents


def task_fields(task: RolloutTask) -> dict[str, Any]:
    """Return the fields of the `TaskBody` of a task, with images as data URLs.

    Raises InvalidRequest if a message refers to an image that is not in `task.images`.
    """
    fields: dict[str, Any] = codec.to_builtins(replace(task, images=()))
    del fields["images"]
    images = {image.sha256: image for image in task.images}
    for message, body in zip(task.messages, fields["messages"], strict=True):
        del body["images"]
        if message.images:
            if missing := [ref.sha256 for ref in message.images if ref.sha256 not in images]:
                raise InvalidRequest(
                    f"a message of task {task.task_id!r} refers to image {missing[0]}, which is not in its images",
                    param="images",
                )
            body["content"] = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image_url", "image_url": {"url": data_url(images[part.sha256])}}
                for part in parts_of(message.content, message.images)
            ]
    return fields


class SubmitBody(Body):
    """The body of `POST /rollouts`: tasks, each sampled `num_samples` times.

    With `keep`, a task's group consists of its first `keep` complete samples, and the others are cancelled. A
    submit with a `rollout_id` chosen by the caller can be repeated if its response was lost: it counts once.
    `max_staleness` is a number of weight versions; without it, `on_stale` has no effect. `priority`, `share`,
    `max_running`, `run_id` and `adapter` are described at `RolloutTerms`.
    """

    tasks: Annotated[list[TaskBody], FailFast()] = Field(min_length=1, max_length=MAX_TASKS)
    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    keep: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    rollout_id: Id | None = None
    max_staleness: int | None = Field(default=None, ge=0, le=_INT32_MAX)
    on_stale: Literal["mask", "finish", "drop"] = OnStale.MASK.value
    trajectories_per_version: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    run_id: Id | None = None
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    share: float = Field(default=1.0, ge=1 / MAX_SHARE, le=MAX_SHARE)
    max_running: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    adapter: Name | None = None

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.max_staleness is None and self.trajectories_per_version is not None:
            raise ValueError("trajectories_per_version requires max_staleness")
        if self.keep is not None and self.keep > self.num_samples:
            raise ValueError(f"keep {self.keep} is greater than num_samples {self.num_samples}")
        return self

    def terms(self, owner: str) -> RolloutTerms:
        names = self.run_id or "", self.adapter or ""
        return RolloutTerms(owner, self.priority, self.share, self.max_running, *names)

    @property
    def staleness(self) -> StalenessLimit | None:
        """The run's staleness limit; None: no limit."""
        if self.max_staleness is None:
            return None
        on_stale = OnStale(self.on_stale)
        return StalenessLimit(self.max_staleness, on_stale, self.trajectories_per_version, self.run_id or "")


class AcknowledgeBody(Body):
    """The body of `POST /rollouts/{id}/acknowledge`: the cursor of the last page that the caller has stored."""

    cursor: int = Field(ge=0, le=MAX_CURSOR)


class AnnotationBody(Body):
    """A `SampleAnnotation`: one list of values or, with scope `token`, one list per path."""

    group_id: Name
    sample_index: int = Field(ge=0, le=_INT32_MAX)
    scope: Literal["record", "path", "token"]
    values: list[Annotated[list[float], FailFast(), Field(max_length=MAX_PROMPT_TOKENS)]] = Field(
        min_length=1, max_length=MAX_PATHS
    )


class AnnotateBody(Body):
    """The body of `POST /rollouts/{id}/annotate`: a trainer's numbers for several records, under one name."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]{0,63}$")
    annotations: Annotated[list[AnnotationBody], FailFast()] = Field(min_length=1, max_length=MAX_ANNOTATIONS)

    def to_annotations(self) -> tuple[SampleAnnotation, ...]:
        """Return the annotations. Raises InvalidRequest for values that are not finite as 32-bit floats."""
        annotations = (annotation_in(AnnotationScope(body.scope), body.values) for body in self.annotations)
        return tuple(
            SampleAnnotation(body.group_id, body.sample_index, self.name, annotation)
            for body, annotation in zip(self.annotations, annotations, strict=True)
        )


# Control of the fleet


Reason = Annotated[str, Field(max_length=MAX_ORDER_REASON_CHARS)]
"""The reason for a pause or sleep, which the status shows."""


class PauseBody(Body):
    """The body of `POST /admin/pause`."""

    mode: Literal["abort", "wait", "keep"] = PauseMode.KEEP.value
    reason: Reason = ""


class DrainBody(Body):
    """The body of `POST /admin/drain`: the address of a host, as shown in the status."""

    host: Annotated[str, Field(min_length=1, max_length=255)]
    undo: bool = False


class HoldBody(Body):
    """The body of `POST /admin/hold`: keep replicas at the served weight version."""

    hold_id: Id
    replicas: Annotated[int, Field(ge=1, le=MAX_HELD_REPLICAS)]
    timeout_s: Annotated[float, Field(gt=0, le=MAX_HOLD_S)] = DEFAULT_HOLD_S
    lease_s: Annotated[float, Field(gt=0, le=MAX_HOLD_S)] = HOLD_LEASE_S


class RenewHoldBody(Body):
    """The body of `POST /admin/hold/renew`: extend a hold by `lease_s`; 0 ends it."""

    hold_id: Id
    lease_s: Annotated[float, Field(ge=0, le=MAX_HOLD_S)] = HOLD_LEASE_S


def _one_source(schema: dict[str, Any]) -> None:
    """Require exactly one source in the JSON schema, like `WeightUpdate` does."""
    schema["oneOf"] = [
        {"required": [name], "properties": {name: {"type": kind}}}
        for name, kind in (("directory", "string"), ("push", "object"), ("adapter", "string"))
    ]
    schema["dependentRequired"] = {"name": ["adapter"]}


class TensorBody(Body):
    """A `TensorInfo`."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_TENSOR_NAME_CHARS, pattern=r"^[^\x00-\x1f\x7f]*$")]
    dtype: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")
    shape: list[Annotated[int, Field(ge=0, le=1 << 48)]] = Field(max_length=MAX_TENSOR_DIMENSIONS)


class PushBody(Body):
    """A `PushSource`: the addresses of a sending process and the tensors that it serves."""

    addresses: list[Address] = Field(min_length=1, max_length=MAX_ADDRESSES)
    token: str = Field(pattern=r"^[\x21-\x7e]{1,512}$")
    tensors: Annotated[list[TensorBody], FailFast()] = Field(min_length=1, max_length=MAX_TENSORS)
    names: Literal["checkpoint", "runtime"] = TensorNames.CHECKPOINT.value
    certificates: list[Annotated[str, Field(max_length=4096)]] = Field([], max_length=MAX_ADDRESSES)

    def to_source(self) -> PushSource:
        return codec.from_builtins(self.model_dump(), PushSource)


class WeightsBody(Body):
    """The body of `POST /admin/weights`: one source of new weights, and their version.

    `directory` and `adapter` are absolute paths of directories that the service can read. `force` accepts a version
    that is not greater than the current one, and weights that fail the canary check. With a `name`, the adapter is
    loaded in addition to the served weights, the version is the adapter's, and `kv_policy` has no effect.
    """

    model_config = ConfigDict(json_schema_extra=_one_source)

    version: Version
    directory: Directory | None = None
    push: PushBody | None = None
    adapter: Directory | None = None
    name: Id | None = None
    kv_policy: Literal["keep", "fresh", "recompute"] | None = None
    force: bool = False

    @property
    def policy(self) -> KVPolicy | None:
        """The KV policy; None: the service's default."""
        return KVPolicy(self.kv_policy) if self.kv_policy is not None else None

    def to_push(self, name: str) -> AdapterPush:
        """Return the push of the adapter under its complete name. Raises InvalidRequest for any other source."""
        if self.adapter is None or self.to_update().adapter is None:
            raise InvalidRequest("'name' requires the source 'adapter'", param="name")
        return AdapterPush(name, self.adapter, self.version, self.force)

    def to_update(self) -> WeightUpdate:
        """Return the weight update. Raises InvalidRequest without exactly one source."""
        push = self.push.to_source() if self.push is not None else None
        return WeightUpdate(self.version, self.directory, push, self.adapter)


class UnloadAdapterBody(Body):
    """The body of `POST /v1/unload_lora_adapter`, a route of vLLM's server."""

    lora_name: Name
    lora_int_id: Json = None  # ignored


class SleepBody(Body):
    """The body of `POST /admin/sleep`. Level 1 keeps the weights in host memory, level 2 discards them."""

    level: int = Field(default=1, ge=1, le=2)
    reason: Reason = ""


class WakeBody(Body):
    """The body of `POST /admin/wake`: the memory to allocate again; by default all of it."""

    tags: list[Literal["weights", "kv_cache"]] | None = Field(default=None, min_length=1, max_length=2)

    @property
    def memory(self) -> frozenset[MemoryTag]:
        """The tags as a set; all tags if none are given."""
        return ALL_MEMORY if self.tags is None else frozenset(map(MemoryTag, self.tags))
