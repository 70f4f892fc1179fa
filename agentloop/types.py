"""The public values: tasks, trajectories, messages, requests and generations. Frozen; `values/codec.py` encodes
them.

Token ids are `int`s while a turn is built and `int32` arrays in a finished trajectory. A weight version is the
trainer's counter, an integer from 0 on. `values/sampling.py` has the sampling parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from agentloop.errors import NotFound
from agentloop.images import Image, ImageRef, ImageSpan
from agentloop.values.aux_rows import Aux, AuxKind, PackedRows, Values, unpacked
from agentloop.values.capabilities import ANYTHING, Capabilities
from agentloop.values.endings import FAILURES as FAILURES
from agentloop.values.endings import NOT_THE_POLICYS, FailureClass, failure_of_end
from agentloop.values.endings import TRUNCATIONS as TRUNCATIONS
from agentloop.values.endings import StopReason as StopReason
from agentloop.values.sampling import Constraint as Constraint
from agentloop.values.sampling import ConstraintKind as ConstraintKind
from agentloop.values.sampling import LogprobsMode, SamplingOptions, TurnSampling
from agentloop.values.sampling import SamplingParams as SamplingParams
from agentloop.values.sampling import VersionDemand as VersionDemand

TopLogprobs: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]
"""For each sampled token the most likely (id, logprob) pairs, best first."""

JSON: TypeAlias = Any
"""A value of `json.loads`."""

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


class FinishReason(StrEnum):
    """The reason why a generation ended."""

    STOP = "stop"  # a stop token was sampled; it is the last id
    LENGTH = "length"  # `max_tokens` were sampled
    ABORT = "abort"  # the caller aborted it; the ids so far are valid
    DEADLINE = "deadline"  # aborted at the turn's deadline; set by the replica, not by the engine
    REPLACED = "replaced"  # its weights were replaced; the ids so far are valid. Internal to the service


class PauseMode(StrEnum):
    """The handling of requests in flight at a pause."""

    ABORT = "abort"  # they end now, with the tokens so far
    WAIT = "wait"  # they finish first
    KEEP = "keep"  # they freeze between two tokens and continue at resume


class KVPolicy(StrEnum):
    """The handling of KV computed under older weights, at a weight update."""

    KEEP = "keep"  # a trajectory keeps its KV; new trajectories never use old KV
    FRESH = "fresh"  # every turn starts with KV of the current version
    RECOMPUTE = "recompute"  # KV of requests in flight is also dropped, and prefilled under the new weights


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for token ids. `kv_version` is the weight version whose KV may be reused; None: the current one.

    With an `adapter` the tokens' versions are the adapter's. `kv_version` and `keeps_kv` are ignored then, because
    only calls with the same version of the adapter share KV.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float = 600.0  # without the time during which the engine is frozen
    trajectory_id: str | None = None
    kv_version: int | None = None
    images: tuple[ImageSpan, ...] = ()  # the spans of `token_ids` that show images, in their order
    image_data: tuple[Image, ...] = ()  # each image of these spans, once
    keeps_late: bool = False  # return the tokens so far at its deadline (FinishReason.DEADLINE)
    keeps_kv: bool = False  # continuations use the KV of the version under which it started
    traceparent: str = ""  # the W3C trace context for the engine's own spans; empty: none
    adapter: str = ""  # the name of a served adapter; empty: the base weights
    num_known_tokens: int = 0  # length of the earlier context that the prompt extends, or 0
    affinity: str = ""  # a key of calls that belong together, for the choice of a replica; empty: none
    routes_from: int = 0  # first position whose routed experts are returned; the caller has those before it


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """The tokens `[start, end)`, sampled under weight `version`; offsets into the list that has the tokens."""

    version: int
    start: int
    end: int


def append_span(spans: list[WeightVersionSpan], span: WeightVersionSpan) -> None:
    """Append a span; merge it with the last span if that is adjacent and has the same version."""
    if spans and spans[-1].version == span.version and spans[-1].end == span.start:
        span = WeightVersionSpan(span.version, spans.pop().start, span.end)
    spans.append(span)


def shifted_spans(spans: Iterable[WeightVersionSpan], offset: int) -> list[WeightVersionSpan]:
    """Return the spans with `offset` added to their bounds."""
    return [WeightVersionSpan(span.version, span.start + offset, span.end + offset) for span in spans]


def clip_spans(spans: Iterable[WeightVersionSpan], start: int, end: int) -> tuple[WeightVersionSpan, ...]:
    """Return the part of `spans` over tokens `[start, end)`, as offsets from `start`."""
    cut = ((span.version, max(span.start, start), min(span.end, end)) for span in spans)
    return tuple(WeightVersionSpan(version, a - start, b - start) for version, a, b in cut if a < b)


def tiling_problem(spans: Iterable[WeightVersionSpan], num_tokens: int) -> str | None:
    """Return the reason why `spans` do not tile `[0, num_tokens)`; None if they do."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            return f"weight versions do not tile: [{span.start}, {span.end}) after {end}"
        end = span.end
    return None if end == num_tokens else f"weight versions cover {end} of {num_tokens} tokens"


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's current load; the balancer's input."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    weight_version: int | None = None
    num_steps: int = 0  # scheduler steps so far, with prefills: it grows while the engine works
    num_sampled_tokens: int = 0  # since the engine started, also tokens that were not delivered
    num_preemptions: int = 0  # since it started: KV taken from a request in flight, also by RECOMPUTE
    num_prefill_tokens: int = 0  # in prompts that wait for their first token, also cached ones


@dataclass(frozen=True, slots=True)
class Generation:
    """An engine's answer: `token_ids` with the stop token, one logprob (nats) per id, and spans that tile `[0, n)`.

    `top_logprobs` is empty unless requested; otherwise it has one entry per id, under the distribution of
    `logprobs`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[WeightVersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    replica_id: str = ""  # set by the replica, not by the engine
    load: Load = Load()
    top_logprobs: TopLogprobs = ()
    raw_logprobs: tuple[float, ...] = ()  # one per id in mode BOTH
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    unavailable_s: float = 0.0  # seconds during which the engine was frozen
    engine_s: float = 0.0  # seconds in the engine, from the call to its end
    engine: str = ""  # `EngineInfo.name`; set by the replica
    decode_s: float | None = None  # seconds from the first token to the last in the engine; None: unknown
    quantization: str = ""  # `EngineInfo.quantization`; set by the replica
    aux: Aux | None = None  # rows at positions of prompt and answer (`AuxKind.span`); None: the engine returns none


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Ids with their logprobs (nats, one per id) of the softmax at temperature 1, under one weight version.

    `top_logprobs` is empty unless requested; otherwise it has one entry per id.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    top_logprobs: TopLogprobs = ()


class ToolCallStatus(StrEnum):
    """The parser's result for a tool call."""

    OK = "ok"
    MALFORMED = "malformed"  # marked as a call, but not parseable


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the policy. A MALFORMED call has `error`, and its result is a tool error.

    In a call that is OK, `error` names the mistake that a lenient parser accepted.
    """

    id: str
    name: str
    arguments: Mapping[str, JSON] = field(default_factory=dict)
    status: ToolCallStatus = ToolCallStatus.OK
    error: str | None = None
    token_start: int = 0  # the call's tokens in the turn's sampled ids: [token_start, token_end)
    token_end: int = 0
    text: str = ""  # the sampled text: of MALFORMED calls, and of all if the template renders no calls
    written_id: str = ""  # the policy's id for it, in formats with ids: rendered as `id`
    partial_arguments: str | None = None  # incomplete JSON of a call that the turn's end cut


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation, as in the OpenAI chat format."""

    role: str  # system | user | assistant | tool
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""  # an assistant's reasoning before `content`, without its marks
    images: tuple[ImageRef, ...] = ()  # in their order in the content


class ToolOutcome(StrEnum):
    """The outcome of one tool call."""

    OK = "ok"
    ERROR = "error"  # the tool failed, or the call was malformed
    TIMEOUT = "timeout"
    LOST = "lost"  # the tool is lost for the rest of the trajectory
    UNKNOWN = "unknown"  # no such tool
    EXCESS = "excess"  # not run because of a limit of the task


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call. `content` is cut at the task's limit, with a visible mark."""

    call_id: str
    name: str
    content: str
    is_error: bool = False
    is_truncated: bool = False
    duration_s: float = 0.0
    outcome: ToolOutcome = ToolOutcome.OK
    begun_us: int = 0  # since the trajectory began


class OnExcess(StrEnum):
    """The reaction to a limit that need not end the trajectory."""

    ANSWER = "answer"  # inform the policy (a tool error, a truncation mark) and continue
    STOP = "stop"  # end the trajectory with the limit's StopReason


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a trajectory. All are finite; None for the context means the engine's limit.

    `timeout_s` does not include the reward function, which runs after the end.
    """

    max_turns: int = 16
    max_tool_calls_per_turn: int = 8
    max_tool_calls: int = 64
    max_tokens_per_turn: int = 1024
    max_sampled_tokens: int = 8192
    max_context_tokens: int | None = None
    max_tool_response_bytes: int = 16_384
    timeout_s: float = 600.0
    reward_timeout_s: float = 30.0  # for the reward function
    on_excess_tool_calls: OnExcess = OnExcess.ANSWER
    on_long_tool_response: OnExcess = OnExcess.ANSWER


class Credit(StrEnum):
    """The paths that receive the trajectory's reward. A path's own reward always takes precedence."""

    TRAJECTORY = "trajectory"  # all paths
    LINEAGE = "lineage"  # the main conversation, and the sub-agents whose results it used
    MAIN = "main"  # the main conversation


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward by another model of the service, which reads the rubric and the conversation.

    It answers yes, no, or a number from 0 to 1.
    """

    model: str
    rubric: str


@dataclass(frozen=True, slots=True)
class RolloutTask(SamplingOptions):
    """A task to roll out. `reference` is only for the reward function: the policy never sees it.

    `stop` are stop strings. `loop`, `reward` and `environment` are registered names or import paths
    (`my_package.my_loop:MyLoop`); `reward` may be a `Judge`. `tools` are names that the service configures, in
    addition to the environment's tools. `credit` selects the paths that receive the reward.
    """

    task_id: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    loop: str = "tool_loop"
    reward: str | Judge | None = None
    reference: JSON = None
    limits: Limits = Limits()
    images: tuple[Image, ...] = ()  # the images of `messages`, each once
    template_kwargs: Mapping[str, JSON] = field(default_factory=dict)  # arguments of the chat template
    tool_setup: Mapping[str, JSON] = field(default_factory=dict)  # by tool: values for its `open`, such as files
    stop: tuple[str, ...] = ()
    environment: str | None = None
    credit: Credit = Credit.LINEAGE

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Return the sampling parameters of a turn with at most `max_tokens`."""
        asked = {one.name: getattr(self, one.name) for one in fields(SamplingOptions)}
        return SamplingParams(max_tokens, **asked)


class OnStale(StrEnum):
    """The handling of a trajectory with tokens that are older, in weight versions, than its run allows.

    No option interrupts a turn. docs/guides/trainers.md compares them.
    """

    DROP = "drop"  # its tokens are discarded, and its sample is rolled out again
    MASK = "mask"  # it continues to its end; then its tokens that are too old are masked
    FINISH = "finish"  # it stops before its next turn or tool calls, without a reward (`FailureClass.STALE`)


@dataclass(frozen=True, slots=True)
class StalenessLimit:
    """The number of versions that the fleet may be ahead of a trajectory's oldest tokens. 0: on-policy.

    `trajectories_per_version` is the number that the trainer consumes per version: no more are started than it can
    consume in time. Submissions with the same `run_id` share this budget while one of them is unfinished; an empty
    `run_id` means a separate budget.
    """

    max_staleness: int
    on_stale: OnStale = OnStale.MASK
    trajectories_per_version: int | None = None
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """`num_samples` trajectories of one task, scheduled and counted together.

    With `keep` the first `keep` complete trajectories are the group, and the others are cancelled.
    """

    group_id: str
    task: RolloutTask
    num_samples: int
    rollout_id: str = ""
    staleness: StalenessLimit | None = None  # None: no limit
    keep: int | None = None  # None: all


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of a trajectory to a slot on a replica, for all its turns."""

    lease_id: str
    replica_id: str
    url: str
    engine: str = ""  # its `EngineInfo.name`
    can: Capabilities = ANYTHING  # its capabilities
    quantization: str = ""  # its `EngineInfo.quantization`


@dataclass(frozen=True, slots=True)
class Assignment:
    """A trajectory assigned to a worker: sample `sample_index` of a group, with its lease."""

    assignment_id: str  # "{rollout_id}/{group_id}/{sample_index}"
    group_id: str
    sample_index: int
    task: RolloutTask
    lease: Lease
    attempt: int = 0
    queue_s: float = 0.0  # seconds that it waited for a worker
    rollout_id: str = ""
    staleness: StalenessLimit | None = None
    num_stale_attempts: int = 0  # earlier attempts that were dropped because of their staleness
    is_restored: bool = False  # accepted by an earlier coordinator, which may have started it
    lost_tokens: Mapping[LossCause, int] = field(default_factory=dict)  # in earlier attempts
    num_sampled_before: int = 0  # tokens of a lost worker; tokens that are not resumed count as lost
    traceparent: str = ""  # the W3C trace context of its submission; `trace_link` as in `Trajectory`
    trace_link: str = ""
    adapter: str = ""  # the adapter of its turns; empty: the base weights


class TurnTimes(NamedTuple):
    """The times of a turn in microseconds; the first three since `TrajectoryTimes.began_at`."""

    begun_us: int
    first_token_us: int | None  # None: unknown
    ended_us: int
    queue_us: int = 0  # time spent waiting for a replica
    unavailable_us: int = 0  # time during which its engine was frozen or lost


class ToolCallTimes(NamedTuple):
    """A tool call. `begun_us` is since `TrajectoryTimes.began_at`, and after the wait for a slot."""

    name: str
    begun_us: int
    duration_us: int
    outcome: ToolOutcome


class Move(NamedTuple):
    """A move to another replica; the time is since `TrajectoryTimes.began_at`."""

    at_us: int
    replica_id: str  # the new one


class LossCause(StrEnum):
    """The reason why sampled tokens were discarded."""

    KILL = "kill"  # their worker or engine was lost
    STALE = "stale"  # they were older than the run allows
    CANCEL = "cancel"  # their turn was cancelled, by a deadline or a client's disconnect too
    RESAMPLE = "resample"  # their turn could not be continued on another replica, and was sampled again


class TrajectoryTimes(NamedTuple):
    """The times of a trajectory, on a monotonic clock: the wall clock is read once."""

    began_at: float  # seconds since 1970
    ended_us: int  # since then
    worker: str = ""  # the process that finished it
    tool_calls: tuple[ToolCallTimes, ...] = ()  # in the order of the turns; empty for sessions
    moves: tuple[Move, ...] = ()
    lost_tokens: Mapping[LossCause, int] = {}  # sampled, but in no path; also in earlier attempts


@dataclass(frozen=True, slots=True)
class Turn:
    """A generation within a path. `[start, end)` are its sampled tokens, as offsets into the response."""

    prompt_len: int  # tokens of the whole prompt this turn was sampled from
    start: int
    end: int
    finish_reason: FinishReason
    replica_id: str
    cached_tokens: int
    turn_id: str = ""  # unique in the trajectory; equal in all paths that share the turn
    reward: float | None = None  # for this turn
    sampling: TurnSampling | None = None  # None in records that lack it
    seed: int | None = None
    engine: str = ""  # "vllm", "sglang": the last one if it was moved
    times: TurnTimes | None = None  # None in records that lack them
    traceparent: str = ""  # the W3C trace context of its call; empty: none
    quantization: str = ""  # the engine's `EngineInfo.quantization`


class Thinking(StrEnum):
    """The handling of earlier reasoning at a user message."""

    KEEP = "keep"  # it stays, as it was sampled: a conversation has one path
    TEMPLATE = "template"  # as the template renders it: where it drops reasoning, the path forks


class SplitReason(StrEnum):
    """The reason why a prompt could not extend a trajectory token for token."""

    BRANCH = "branch"  # it extends an earlier turn that has another continuation: a sibling, a rollback
    NEW_CONVERSATION = "new_conversation"  # nothing in common: a sub-agent
    SYSTEM_CHANGED = "system_changed"  # another system message before the same conversation
    TOOLS_CHANGED = "tools_changed"  # other tool definitions
    HISTORY_EDIT = "history_edit"  # a message differs, is missing or was inserted: compaction, rewriting
    AMBIGUOUS = "ambiguous"  # the history matches several turns with different tokens
    COMPACTED = "compacted"  # the loop replaced the history, by a summary for example
    TEMPLATE = "template"  # the chat template renders earlier messages differently now


class PathKind(StrEnum):
    """The relation of a token path to its parent in the trajectory's lineage."""

    CONTINUES = "continues"  # the same conversation, with a changed history, system message or tools, or a branch
    RETRIES = "retries"  # another sample of a prompt of its parent
    COMPACTS = "compacts"  # a prompt with a summary, or another text of the parent, replaces the parent's history
    DELEGATES = "delegates"  # a sub-agent's conversation: the parent, or a path after it, uses its result
    UNRELATED = "unrelated"  # nothing leads from it to the final answer: a call for a title, for example


@dataclass(frozen=True, slots=True)
class Lineage:
    """A token path's parent and its relation to it. docs/guides/lineage.md has the rules of the inference."""

    kind: PathKind
    parent: int | None = None  # index in `Trajectory.paths`, also of a later path; None for UNRELATED
    evidence: str = ""  # the quote that links them, or the client's declaration
    is_declared: bool = False  # the client named the parent; otherwise it was inferred


@dataclass(frozen=True, slots=True)
class TokenPath:
    """A root-to-leaf token sequence, the unit of training. All response arrays have the same length.

    `response_mask` is True for sampled tokens, except those masked because of staleness or by
    `without_constrained`. `logprobs` are under the distribution that the turn's `sampling` names, and 0.0 for
    tokens that were not sampled. `raw_logprobs` are under the plain softmax, with NaN for the sampled tokens of
    turns without them; None unless an engine returned both. `weight_versions` tile the sampled tokens, also masked
    ones; offsets are into the response.

    The paths of a trajectory may branch: the first `num_shared` tokens of prompt and response are then equal to
    those of path `parent`. A sampled token that several paths share is in the mask of the first of them only.

    `aux` has the auxiliary rows of each turn, in the order of the turns; `routed_experts` and `sampling_mask` read
    them. A kind that a turn of the path lacks is absent.
    """

    prompt_ids: IntArray
    response_ids: IntArray
    response_mask: BoolArray
    logprobs: FloatArray
    weight_versions: tuple[WeightVersionSpan, ...]
    turns: tuple[Turn, ...]
    split_reason: SplitReason | None = None  # why this path does not extend an earlier one; None for the first
    parent: int | None = None  # index of the path that it branches from
    num_shared: int = 0  # tokens of prompt and response that it shares with its parent
    split_detail: str | None = None  # the first difference as text, old and new
    lineage: Lineage | None = None  # None for the path with which its agent's main conversation begins
    agent: str = ""  # its agent in a loop of several agents; empty: the main agent
    messages: tuple[Message, ...] = ()  # its conversation; the last ones may follow the last turn
    reward: float | None = None  # for this path, if set: see `Trajectory.reward_of`
    token_rewards: FloatArray | None = None  # one per response token, if set
    is_trainable: bool = True  # False: not for training, regardless of the mask
    images: tuple[ImageSpan, ...] = ()  # offsets into prompt and response together
    raw_logprobs: FloatArray | None = None
    aux: Mapping[AuxKind, tuple[PackedRows, ...]] | None = None

    @property
    def routed_experts(self) -> Values | None:
        """The experts of each position of prompt and response, `[positions, layers, experts per token]`.

        The last sampled token and the tokens after it have no row, because no forward pass has read them. None if
        the engines returned none.
        """
        parts = (self.aux or {}).get(AuxKind.ROUTED_EXPERTS)
        return None if parts is None else unpacked(parts).table

    @property
    def sampling_mask(self) -> tuple[IntArray, IntArray] | None:
        """The ids that top-k, top-p and min-p kept for each token of the response, as (ids, ends).

        The kept ids of response token i are `ids[ends[i - 1]:ends[i]]`, with 0 as the first bound; tokens that were
        not sampled have none. None if the engines returned none.
        """
        parts = (self.aux or {}).get(AuxKind.SAMPLING_MASK)
        if parts is None:
            return None
        sizes = np.zeros(len(self.response_ids), np.int32)
        turns = [part.unpacked() for part in parts]
        for turn in turns:
            first = turn.start - len(self.prompt_ids)
            sizes[first : first + turn.num_rows] = np.diff(turn.ends, prepend=0) if turn.ends is not None else 0
        return np.concatenate([turn.values for turn in turns]), np.cumsum(sizes, dtype=np.int32)

    @property
    def constrained(self) -> BoolArray:
        """A mask over the response of sampled tokens whose distribution was changed from outside the model.

        It has all tokens of a turn with a grammar (engines do not report where it allowed several tokens) or with a
        logit bias other than 0, and the first `min_tokens` of a turn with stop tokens, which are banned there.
        Penalties and truncation also change the distribution; the turn's `sampling` has them, and they are not in
        this mask. See docs/guides/distribution.md.
        """
        constrained = np.zeros(len(self.response_ids), np.bool_)
        for turn in self.turns:
            if turn.sampling is not None:
                num_constrained = turn.sampling.num_constrained(turn.end - turn.start)
                constrained[turn.start : turn.start + num_constrained] = True
        return constrained

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """The turns that its parent lacks."""
        return tuple(turn for turn in self.turns if self.parent is None or turn.end > self._first_own)

    @property
    def num_own_sampled_tokens(self) -> int:
        """The number of sampled tokens that its parent lacks, with masked ones."""
        return sum(self.own_tokens_by_version.values())

    @property
    def own_tokens_by_version(self) -> dict[int, int]:
        """`num_own_sampled_tokens` by weight version."""
        first, counts = self._first_own, dict[int, int]()
        for span in self.weight_versions:
            counts[span.version] = counts.get(span.version, 0) + max(span.end - max(span.start, first), 0)
        return counts

    @property
    def num_masked_tokens(self) -> int:
        """The number of masked tokens among `num_own_sampled_tokens`."""
        return self.num_own_sampled_tokens - int(self.response_mask.sum())

    @property
    def _first_own(self) -> int:
        """Index in the response of the first token that it does not share; negative if the prompts differ."""
        return self.num_shared - len(self.prompt_ids)

    @property
    def trained_versions(self) -> frozenset[int]:
        """The weight versions of the tokens in the mask."""
        spans = self.weight_versions
        return frozenset(span.version for span in spans if self.response_mask[span.start : span.end].any())


@dataclass(frozen=True, slots=True)
class Timings:
    """The time of a trajectory, in seconds."""

    queue_s: float = 0.0  # until a worker took it
    generate_s: float = 0.0
    tool_s: float = 0.0
    reward_s: float = 0.0
    total_s: float = 0.0
    unavailable_s: float = 0.0  # part of `generate_s`: the service was unavailable; deadlines do not count it
    engine_s: float = 0.0  # part of `generate_s`: in engines, for complete rounds; of loops only


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The final record of a sample. Usually one path; more if the history could not be extended exactly.

    `is_complete` is False if a call was lost, the rollout failed, or it was too stale: it is then never trainable.
    """

    task_id: str
    group_id: str
    sample_index: int
    paths: tuple[TokenPath, ...]
    stop_reason: StopReason
    is_complete: bool
    reward: float | None = None  # for the paths that `credit` selects
    reward_error: str | None = None
    error: str | None = None
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    attempt: int = 0
    timings: Timings = Timings()
    rollout_id: str = ""
    num_masked_tokens: int = 0  # sampled tokens that are masked
    num_stale_attempts: int = 0  # earlier attempts that were dropped because of staleness
    max_staleness: int | None = None  # the run's limit
    task_messages: tuple[Message, ...] = ()  # set in a session for a task, or if nothing was rendered
    components: Mapping[str, float] = field(default_factory=dict)  # the named parts of the reward
    metrics: Mapping[str, float] = field(default_factory=dict)  # named numbers for monitoring, not for training
    is_truncated: bool = False  # a limit cut the policy: TRUNCATIONS, or an incomplete last turn
    num_resampled_turns: int = 0  # turns that were lost and sampled again, which favors short turns
    thinking: Thinking = Thinking.KEEP  # the handling of earlier turns' reasoning in its prompts
    constraints: Mapping[str, str] = field(default_factory=dict)  # long ones, by `TurnSampling.constraint_digest`
    num_resumed_turns: int = 0  # turns of a lost worker that it resumed; the last one's tools may have run twice
    times: TrajectoryTimes | None = None  # None in records that lack them
    loop: str = ""  # the task's; empty: a session
    traceparent: str = ""  # the W3C trace context of its caller; empty: none
    trace_link: str = ""  # the trace context of its submission, which its trace links to
    adapter: str = ""  # it sampled all turns, and its versions are the weight versions; empty: the base weights
    end_reason: str = ""  # the environment's reason for the end of the episode
    credit: Credit = Credit.LINEAGE
    agent_rewards: Mapping[str, float] = field(default_factory=dict)  # by name, for agents with their own reward
    restart_reason: str = ""  # why it started again from its first turn after a lost worker
    # The last field: the coordinator writes it at the end of the encoded record (`api.encoded_record`).
    staleness: int | None = None  # its unmasked tokens' staleness when the coordinator received it

    @property
    def main_conversation(self) -> tuple[int, ...]:
        """Indices in `paths` of the main conversation's paths, ascending; empty if nothing was rendered.

        It begins with the path without a `lineage` and includes the paths that continue, retry or compact it. In a
        loop of several agents it is the main agent's, or the first agent's if the main agent sampled nothing.
        """
        linked = _linked(self.paths, _SAME_AGENT)
        return tuple(index for index in linked if self.paths[index].agent == self.paths[0].agent)

    @property
    def credited_paths(self) -> tuple[int, ...]:
        """Indices in `paths` of the paths that `credit` gives the trajectory's reward, ascending."""
        if self.credit is Credit.TRAJECTORY:
            return tuple(range(len(self.paths)))
        is_main = self.credit is Credit.MAIN  # each agent of a loop has a main conversation
        return _linked(self.paths, _SAME_AGENT if is_main else _SAME_AGENT | {PathKind.DELEGATES})

    @property
    def path(self) -> TokenPath:
        """The latest path of the main conversation: the only one, unless the history forked.

        Raises NotFound, with the stop reason, for a record without paths: it was dropped, or nothing was rendered.
        """
        if not self.paths:
            reason = f"{self.stop_reason.value}{f': {self.error}' if self.error else ''}"
            raise NotFound(
                f"sample {self.sample_index} of group {self.group_id!r} has no path: its stop reason is {reason}"
            )
        return self.paths[self.final_path]

    @property
    def final_path(self) -> int:
        """The index of `path`: the latest path after the last compaction of the main conversation.

        Raises ValueError for a record without paths.
        """
        main = self.main_conversation
        lineages = {index: self.paths[index].lineage for index in main}
        compactions = {
            index: lineage.parent
            for index, lineage in lineages.items()
            if lineage is not None and lineage.kind is PathKind.COMPACTS
        }
        places = _linked(self.paths, _SAME_TALK, [index for index, lineage in lineages.items() if lineage is None])
        # A later side call on the history before a compaction is not the final answer.
        while after := [index for index, parent in compactions.items() if parent in places and index not in places]:
            places = _linked(self.paths, _SAME_TALK, after[-1:])
        return max(places)

    @property
    def num_uncredited_tokens(self) -> int:
        """The number of sampled tokens in paths that do not receive the trajectory's reward."""
        credited = set(self.credited_paths)
        return sum(path.num_own_sampled_tokens for index, path in enumerate(self.paths) if index not in credited)

    @property
    def path_rewards(self) -> tuple[float | None, ...]:
        """The reward of each path for training: its own, else its agent's or the trajectory's if it is credited."""
        credited, by_agent = set(self.credited_paths), self.agent_rewards
        return tuple(
            by_agent.get(path.agent, self.reward) if path.reward is None and index in credited else path.reward
            for index, path in enumerate(self.paths)
        )

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of the agents that have paths, in the order of their first paths."""
        return tuple(dict.fromkeys(path.agent for path in self.paths))

    def of_agent(self, name: str) -> Trajectory:
        """Return the record of one agent: its paths, and its reward, or the trajectory's if it has none.

        Raises NotFound for an agent without paths.
        """
        kept = [index for index, path in enumerate(self.paths) if path.agent == name]
        if not kept:
            raise NotFound(f"no agent {name!r} sampled a turn; the trajectory's agents are {list(self.agents)}")
        index_of = {old: new for new, old in enumerate(kept)}
        paths = tuple(_moved(self.paths[index], index_of.get) for index in kept)
        reward = self.agent_rewards.get(name, self.reward)
        return replace(
            self,
            paths=tuple(replace(path, agent="") for path in paths),
            reward=reward,
            agent_rewards={},
            num_masked_tokens=sum(path.num_masked_tokens for path in paths),
        )

    def reward_of(self, place: int) -> float | None:
        """Return `path_rewards[place]`, the reward of the path at an index."""
        return self.path_rewards[place]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of `path`, for a reward function; the task's messages if nothing was rendered."""
        return self.path.messages if self.paths else self.task_messages

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions of its sampled tokens, ascending."""
        return tuple(sorted({span.version for path in self.paths for span in path.weight_versions}))

    @property
    def trained_versions(self) -> frozenset[int]:
        """The weight versions of the tokens in the mask."""
        return frozenset(version for path in self.paths for version in path.trained_versions)

    @property
    def oldest_trained_version(self) -> int | None:
        """The oldest weight version of the tokens in the mask; None if the mask is empty."""
        return min(self.trained_versions, default=None)

    @property
    def num_sampled_tokens(self) -> int:
        """The number of sampled tokens of all paths, with masked ones."""
        return sum(int(path.response_mask.sum()) for path in self.paths) + self.num_masked_tokens

    @property
    def is_sound(self) -> bool:
        """True if it is complete, its reward did not fail, and no weight update stopped it."""
        return self.is_complete and self.failure not in NOT_THE_POLICYS

    @property
    def is_trained(self) -> bool:
        """True if a trainer can use it: it is sound, and has tokens in the mask."""
        return self.is_sound and self.oldest_trained_version is not None

    @property
    def failure(self) -> FailureClass | None:
        """The class of the failure that ended it; None if it did not fail."""
        return failure_of_end(
            self.stop_reason,
            is_complete=self.is_complete,
            has_no_score=self.reward is None and self.reward_error is not None,
            is_tools_time=self.timings.tool_s > self.timings.generate_s,
        )

    @property
    def without_aux(self) -> Trajectory:
        """The record without auxiliary rows, for answers in JSON: the rows are binary and large."""
        if all(path.aux is None for path in self.paths):
            return self
        return replace(self, paths=tuple(replace(path, aux=None) for path in self.paths))

    def without_constrained(self) -> Trajectory:
        """Return the record with its constrained tokens masked, and counted in `num_masked_tokens`."""
        paths = tuple(replace(path, response_mask=path.response_mask & ~path.constrained) for path in self.paths)
        num_masked = self.num_sampled_tokens - sum(int(path.response_mask.sum()) for path in paths)
        return replace(self, paths=paths, num_masked_tokens=num_masked)


def _moved(path: TokenPath, index_of: Callable[[int], int | None]) -> TokenPath:
    """Return a copy of the path whose parent indices are converted by `index_of`."""
    lineage = path.lineage
    if lineage is not None and lineage.parent is not None:
        lineage = replace(lineage, parent=index_of(lineage.parent))
    return replace(path, parent=None if path.parent is None else index_of(path.parent), lineage=lineage)


def paths_of_agents(by_agent: Mapping[str, Sequence[TokenPath]]) -> tuple[TokenPath, ...]:
    """Return the paths of all agents as those of one trajectory, with the agents' names."""
    joined: list[TokenPath] = []
    for name, paths in by_agent.items():
        offset = len(joined)
        joined += [replace(_moved(path, offset.__add__), agent=name) for path in paths]
    return tuple(joined)


_SAME_TALK = frozenset({PathKind.CONTINUES, PathKind.RETRIES})
_SAME_AGENT = _SAME_TALK | {PathKind.COMPACTS}


def _linked(
    paths: Sequence[TokenPath], kinds: Set[PathKind], begin: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the indices of paths and of all that follow them by links of these kinds.

    `begin` are the indices of the first paths; by default those without a lineage.
    """
    children: dict[int | None, list[int]] = {}
    for index, path in enumerate(paths):
        if path.lineage is not None and path.lineage.kind in kinds:
            children.setdefault(path.lineage.parent, []).append(index)
    linked = [index for index, path in enumerate(paths) if path.lineage is None] if begin is None else [*begin]
    for index in linked:  # grows
        linked += children.get(index, ())
    return tuple(sorted(linked))
