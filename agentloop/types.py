"""The values that move through the service. Frozen inside a process; `values/codec.py` puts them on a wire.

Token ids are plain `int`s while a turn is built and `int32` arrays in a finished trajectory. A weight version is
the trainer's counter: an integer; 0 is one. How tokens are sampled is in `values/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from agentloop.errors import NotFound
from agentloop.images import Image, ImageRef, ImageSpan
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
"""For each sampled token the likeliest (id, logprob), best first."""

JSON: TypeAlias = Any
"""What `json.loads` can return."""

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


class FinishReason(StrEnum):
    """The reason why one generation ended."""

    STOP = "stop"  # a stop token was sampled; it is the last id
    LENGTH = "length"  # `max_tokens` were sampled
    ABORT = "abort"  # somebody asked for it; the ids so far are valid
    DEADLINE = "deadline"  # the turn's time was over, so it was asked for; no engine says this by itself
    REPLACED = "replaced"  # the weights that it accepts were; the ids so far are valid. It stays within the service


class PauseMode(StrEnum):
    """The fate of requests in flight at a pause."""

    ABORT = "abort"  # they end now, with the tokens they have
    WAIT = "wait"  # they run to their end first
    KEEP = "keep"  # they freeze between two tokens and go on at resume


class KVPolicy(StrEnum):
    """The fate of keys and values computed under older weights, at a weight update."""

    KEEP = "keep"  # a trajectory goes on with the KV it has; new trajectories never see old KV
    FRESH = "fresh"  # every turn starts from KV of the current version
    RECOMPUTE = "recompute"  # KV of requests in flight too is dropped and prefilled under the new weights


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for token ids. `kv_version` is the weight version whose KV may be reused; None: the current one.

    Under an `adapter` the tokens' versions are the adapter's, `kv_version` and `keeps_kv` say nothing: KV is shared
    by the calls under one version of it alone.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float = 600.0  # in which the engine is not frozen
    trajectory_id: str | None = None
    kv_version: int | None = None
    images: tuple[ImageSpan, ...] = ()  # the spans of `token_ids` that show images, in their order
    image_data: tuple[Image, ...] = ()  # each image that they name, once
    keeps_late: bool = False  # when its time is over, what was sampled is the answer (FinishReason.DEADLINE)
    keeps_kv: bool = False  # what continues it goes on with the KV of the version that it began under
    traceparent: str = ""  # the W3C trace context for the engine's own spans; empty: none
    adapter: str = ""  # the name of a served one; empty: the base weights
    num_known_tokens: int = 0  # length of the earlier context that the prompt extends; 0: it extends none


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """The span of tokens `[start, end)` sampled under weight `version`; offsets are into its list."""

    version: int
    start: int
    end: int


def append_span(spans: list[WeightVersionSpan], span: WeightVersionSpan) -> None:
    """Append a span; an adjacent one of the same version becomes part of the last."""
    if spans and spans[-1].version == span.version and spans[-1].end == span.start:
        span = WeightVersionSpan(span.version, spans.pop().start, span.end)
    spans.append(span)


def shifted_spans(spans: Iterable[WeightVersionSpan], offset: int) -> list[WeightVersionSpan]:
    """Return a list's spans as those of a longer list that begins `offset` earlier."""
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
    """An engine's load at one moment; the balancer's input."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    weight_version: int | None = None
    num_steps: int = 0  # of its scheduler so far, prefills too: it grows as long as the engine works
    num_sampled_tokens: int = 0  # since the engine started, those that nobody got included
    num_preemptions: int = 0  # since it started: KV taken from a request in flight, for another's or by a RECOMPUTE
    num_prefill_tokens: int = 0  # of the prompts that wait for their first token, what is cached of them included


@dataclass(frozen=True, slots=True)
class Generation:
    """Token ids out: `token_ids` includes the stop token; one logprob (nats) an id; spans tile `[0, n)`.

    `top_logprobs` is empty unless asked for; else it has one entry an id, under the distribution of `logprobs`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[WeightVersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    replica_id: str = ""  # stamped by the replica, not by the engine
    load: Load = Load()
    top_logprobs: TopLogprobs = ()
    raw_logprobs: tuple[float, ...] = ()  # one an id in mode BOTH
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    standstill_s: float = 0.0  # in which the engine was frozen
    engine_s: float = 0.0  # in the engine, from the call to its end
    engine: str = ""  # the replica's, as `EngineInfo.name`; stamped with its id
    decode_s: float | None = None  # in the engine, from its first token to its last; None: not known
    quantization: str = ""  # the engine's, as in `EngineInfo`; stamped with its name


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Given ids and their logprobs (nats, one an id): the plain softmax's at temperature 1, under one version.

    `top_logprobs` is empty unless asked for; else it has one entry an id.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    top_logprobs: TopLogprobs = ()


class ToolCallStatus(StrEnum):
    """The parser's verdict on one tool call."""

    OK = "ok"
    MALFORMED = "malformed"  # marked as a call, not parseable as one


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of the policy. A MALFORMED one has `error`; a tool error answers it.

    Of a call that is OK, `error` says what a lenient parser forgave.
    """

    id: str
    name: str
    arguments: Mapping[str, JSON] = field(default_factory=dict)
    status: ToolCallStatus = ToolCallStatus.OK
    error: str | None = None
    token_start: int = 0  # the call's tokens within the turn's sampled ids: [token_start, token_end)
    token_end: int = 0
    text: str = ""  # what the policy wrote: of a MALFORMED one, and of any where the template shows no calls
    written_id: str = ""  # the id that the policy gave it, in formats that have ids: what a template shows as `id`
    partial_arguments: str | None = None  # of one that the turn's end cut behind its name: JSON as far as it goes


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in the terms of the OpenAI chat format."""

    role: str  # system | user | assistant | tool
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""  # what an assistant thought before `content`, without its marks
    images: tuple[ImageRef, ...] = ()  # in the order they are shown


class ToolOutcome(StrEnum):
    """The outcome of one tool call."""

    OK = "ok"
    ERROR = "error"  # the tool failed, or the call was malformed
    TIMEOUT = "timeout"
    LOST = "lost"  # the tool, for the rest of the trajectory
    UNKNOWN = "unknown"  # no such tool
    EXCESS = "excess"  # not run: a limit of the task


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer of a tool; `content` is already capped and carries a visible mark where it was cut."""

    call_id: str
    name: str
    content: str
    is_error: bool = False
    is_truncated: bool = False
    duration_s: float = 0.0
    outcome: ToolOutcome = ToolOutcome.OK
    begun_us: int = 0  # since the trajectory began


class OnExcess(StrEnum):
    """The reaction to a limit that can be answered instead of ending the trajectory."""

    ANSWER = "answer"  # tell the policy (a tool-error message, a truncation mark) and go on
    STOP = "stop"  # end the trajectory with the limit's StopReason


@dataclass(frozen=True, slots=True)
class Limits:
    """The budgets of one trajectory. All are finite; None for the context means the engine's own limit.

    `timeout_s` does not bound the reward function, which begins after the end.
    """

    max_turns: int = 16
    max_tool_calls_per_turn: int = 8
    max_tool_calls: int = 64
    max_tokens_per_turn: int = 1024
    max_sampled_tokens: int = 8192
    max_context_tokens: int | None = None
    max_tool_response_bytes: int = 16_384
    timeout_s: float = 600.0
    reward_timeout_s: float = 30.0  # of the reward function
    on_excess_tool_calls: OnExcess = OnExcess.ANSWER
    on_long_tool_response: OnExcess = OnExcess.ANSWER


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward by another model of the service: it reads the rubric and the conversation, and answers yes, no, or a
    number from 0 to 1."""

    model: str
    rubric: str


@dataclass(frozen=True, slots=True)
class RolloutTask(SamplingOptions):
    """A task to roll out. `reference` is for the reward function only: the policy never sees it.

    `stop` are stop strings. `loop` and `reward` are names of shipped ones or import paths
    (`my_package.my_loop:MyLoop`), or `reward` is a `Judge`; `tools` are names that the service configures, beside
    those of the `environment`, an import path.
    """

    task_id: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    loop: str = "tool_loop"
    reward: str | Judge | None = None
    reference: JSON = None
    limits: Limits = Limits()
    images: tuple[Image, ...] = ()  # those that `messages` show, each once
    template_kwargs: Mapping[str, JSON] = field(default_factory=dict)  # arguments of the chat template
    tool_setup: Mapping[str, JSON] = field(default_factory=dict)  # by tool: what its `open` finds, such as files
    stop: tuple[str, ...] = ()
    environment: str | None = None

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Return the sampling of one of its turns, with at most `max_tokens`."""
        asked = {one.name: getattr(self, one.name) for one in fields(SamplingOptions)}
        return SamplingParams(max_tokens, **asked)


class OnStale(StrEnum):
    """The fate of a trajectory that falls behind the weights of the fleet by more versions than its run allows.

    None interrupts a turn. docs/trainers.md compares the three.
    """

    DROP = "drop"  # its tokens are discarded, and its sample is rolled out again under current weights
    MASK = "mask"  # it continues to its own end; then its tokens that are too old leave the mask
    FINISH = "finish"  # it stops before its next turn or tool calls, without a reward (`FailureClass.STALE`)


@dataclass(frozen=True, slots=True)
class StalenessLimit:
    """The number of versions that the fleet may be ahead of a trajectory's oldest tokens. 0: on-policy.

    `trajectories_per_version` is the number that the trainer consumes for one new version: no more are begun than
    it can consume in time. Submits of one `run_id` share that budget while one of them is unfinished; empty: the
    submit has its own.
    """

    max_staleness: int
    on_stale: OnStale = OnStale.MASK
    trajectories_per_version: int | None = None
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """`num_samples` trajectories of one task, placed and counted together.

    With `keep` the first so many that are complete make the group, and the others are cancelled.
    """

    group_id: str
    task: RolloutTask
    num_samples: int
    rollout_id: str = ""
    staleness: StalenessLimit | None = None  # None: no limit
    keep: int | None = None  # None: all


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one trajectory to a place on a replica, for all its turns."""

    lease_id: str
    replica_id: str
    url: str
    engine: str = ""  # the replica's, as `EngineInfo.name`
    can: Capabilities = ANYTHING  # what that engine can do
    quantization: str = ""  # that engine's, as in `EngineInfo`


@dataclass(frozen=True, slots=True)
class Assignment:
    """One trajectory handed to a worker: sample `sample_index` of `group`, with its lease."""

    assignment_id: str  # "{rollout_id}/{group_id}/{sample_index}"
    group_id: str
    sample_index: int
    task: RolloutTask
    lease: Lease
    attempt: int = 0
    queue_s: float = 0.0  # how long it waited for a worker
    rollout_id: str = ""
    staleness: StalenessLimit | None = None
    num_stale_attempts: int = 0  # attempts before this one that were dropped for their age
    is_restored: bool = False  # an earlier coordinator accepted it, and may have had it begun
    lost_tokens: Mapping[LossCause, int] = field(default_factory=dict)  # of the attempts before this one, all of
    num_sampled_before: int = 0  # which those of a worker's that was lost are so many, but for what is resumed
    traceparent: str = ""  # the W3C trace context of its submit, and this one as `Trajectory` has it
    trace_link: str = ""
    adapter: str = ""  # that its turns are sampled under; empty: the base weights


class TurnTimes(NamedTuple):
    """The times of one turn in microseconds; the first three since `TrajectoryTimes.began_at`."""

    begun_us: int
    first_token_us: int | None  # None: not known
    ended_us: int
    queue_us: int = 0  # of it: it waited for a place on a replica
    standstill_us: int = 0  # of it: its engine was frozen, or lost


class ToolCallTimes(NamedTuple):
    """One call of the policy. `begun_us` is since `TrajectoryTimes.began_at`; the wait for a slot is before it."""

    name: str
    begun_us: int
    duration_us: int
    outcome: ToolOutcome


class Move(NamedTuple):
    """The change to another replica, since `TrajectoryTimes.began_at`."""

    at_us: int
    replica_id: str  # the new one


class LossCause(StrEnum):
    """The reason why sampled tokens were thrown away."""

    KILL = "kill"  # their worker or engine was lost
    STALE = "stale"  # they were older than the run allows
    CANCEL = "cancel"  # their turn was cut from outside: by a cancellation, a deadline, a client that left
    RESAMPLE = "resample"  # their turn could not go on elsewhere, and was sampled anew


class TrajectoryTimes(NamedTuple):
    """The course of one trajectory. Times within it pass as a monotonic clock does: the wall clock is read once."""

    began_at: float  # seconds since 1970
    ended_us: int  # since then
    worker: str = ""  # the process that ended it
    tool_calls: tuple[ToolCallTimes, ...] = ()  # each call of the policy, turn by turn; a session's are its agent's
    moves: tuple[Move, ...] = ()
    lost_tokens: Mapping[LossCause, int] = {}  # sampled, and in no path; those of earlier attempts too


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation within a path. `[start, end)` are its sampled tokens, as offsets into the response."""

    prompt_len: int  # tokens of the whole prompt this turn was sampled from
    start: int
    end: int
    finish_reason: FinishReason
    replica_id: str
    cached_tokens: int
    turn_id: str = ""  # unique in the trajectory; a turn that paths share has one
    reward: float | None = None  # of this turn alone
    sampling: TurnSampling | None = None  # None in records of a service that did not keep it
    seed: int | None = None
    engine: str = ""  # that sampled it (its end, if it was moved): "vllm", "sglang"; empty in records without it
    times: TurnTimes | None = None  # None in records of a service that did not keep them
    traceparent: str = ""  # the W3C trace context of its call; empty: none
    quantization: str = ""  # of the engine's weights, whose logprobs these are; empty: none


class Thinking(StrEnum):
    """The fate of earlier thoughts at a user's message."""

    KEEP = "keep"  # they stay, as they were sampled: a conversation has one path
    TEMPLATE = "template"  # as the template's own rendering does: where it drops thoughts, the path forks


class SplitReason(StrEnum):
    """Reason why a prompt could not extend a trajectory token for token."""

    BRANCH = "branch"  # it does extend an earlier turn, which has gone on otherwise: a sibling, a rollback
    NEW_CONVERSATION = "new_conversation"  # nothing in common: a sub-agent
    SYSTEM_CHANGED = "system_changed"  # another system message before the same conversation
    TOOLS_CHANGED = "tools_changed"  # other tool definitions
    HISTORY_EDIT = "history_edit"  # a message differs, is missing or was put in: compaction, rewriting
    AMBIGUOUS = "ambiguous"  # the history fits several turns of different tokens
    TEMPLATE = "template"  # the chat template renders earlier messages otherwise than before


@dataclass(frozen=True, slots=True)
class TokenPath:
    """One root-to-leaf token sequence, the unit a trainer trains on. All response arrays have one length.

    `response_mask` is true where the policy sampled, but for tokens taken out: for their staleness, or by
    `without_constrained`. `logprobs` hold 0.0 where it did not, and are under the distribution that the turn's
    `sampling` names. `raw_logprobs` are under the plain softmax, and NaN for the sampled tokens of a turn without
    them; None unless an engine gave both. `weight_versions` tile the sampled tokens, masked ones too: spans are
    over the response, and observed tokens belong to no span.

    Paths of one trajectory may branch: the first `num_shared` tokens of prompt and response are then those of path
    `parent`, and what of them was sampled is in the mask of the first path that has it, and in no other.
    """

    prompt_ids: IntArray
    response_ids: IntArray
    response_mask: BoolArray
    logprobs: FloatArray
    weight_versions: tuple[WeightVersionSpan, ...]
    turns: tuple[Turn, ...]
    split_reason: SplitReason | None = None  # why this path could not extend the one before; None for the first
    parent: int | None = None  # the path that it was split from, by its place in the trajectory
    num_shared: int = 0  # tokens of prompt and response that are the parent's own
    split_detail: str | None = None  # the first difference, decoded: what was there and what came instead
    messages: tuple[Message, ...] = ()  # its conversation; at the end may be some that no turn has read any more
    reward: float | None = None  # of this path alone, where one was given: see `Trajectory.reward_of`
    token_rewards: FloatArray | None = None  # one for each response token, where they were given
    is_trainable: bool = True  # false: for the record only, whatever is in the mask
    images: tuple[ImageSpan, ...] = ()  # offsets into prompt and response together
    raw_logprobs: FloatArray | None = None

    @property
    def constrained(self) -> BoolArray:
        """The sampled tokens whose distribution was bent from outside the model, as a mask over the response.

        Marked are all tokens of a turn under a grammar (engines do not say where it left a choice) or with a bias
        other than 0, and the first `min_tokens` of a turn with stop tokens, which are banned there. Penalties and
        truncation bend too and are not marked: the turn's `sampling` has them. See docs/distribution.md.
        """
        constrained = np.zeros(len(self.response_ids), np.bool_)
        for turn in self.turns:
            if turn.sampling is not None:
                num_constrained = turn.sampling.num_constrained(turn.end - turn.start)
                constrained[turn.start : turn.start + num_constrained] = True
        return constrained

    @property
    def begins_conversation(self) -> bool:
        """Tell if it does not continue another path's conversation.

        Under another system message or other tools a conversation continues only if the prompt echoes one of its
        turns: a title call repeats at most the user's words.
        """
        if self.split_reason in (SplitReason.SYSTEM_CHANGED, SplitReason.TOOLS_CHANGED) and self.num_shared == 0:
            return sum(message.role == "assistant" for message in self.messages) <= len(self.turns)
        return self.split_reason in (None, SplitReason.NEW_CONVERSATION, SplitReason.AMBIGUOUS)

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """The turns that no parent has."""
        return tuple(turn for turn in self.turns if self.parent is None or turn.end > self._first_own)

    @property
    def num_own_sampled_tokens(self) -> int:
        """Sampled tokens that no parent has, masked ones too."""
        first = self._first_own
        return sum(max(span.end - max(span.start, first), 0) for span in self.weight_versions)

    @property
    def num_masked_tokens(self) -> int:
        """Its own sampled tokens that are out of the mask."""
        return self.num_own_sampled_tokens - int(self.response_mask.sum())

    @property
    def _first_own(self) -> int:
        """The first token of the response that is not the parent's; negative if no token is."""
        return self.num_shared - len(self.prompt_ids)

    @property
    def trained_versions(self) -> frozenset[int]:
        """The weight versions of the tokens in the mask."""
        spans = self.weight_versions
        return frozenset(span.version for span in spans if self.response_mask[span.start : span.end].any())


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent by one trajectory."""

    queue_s: float = 0.0  # before a worker took it
    generate_s: float = 0.0
    tool_s: float = 0.0
    reward_s: float = 0.0
    total_s: float = 0.0
    standstill_s: float = 0.0  # of `generate_s`: the service itself stood still, and no deadline counts them
    engine_s: float = 0.0  # of `generate_s`: in engines, whose answers came whole; of loops only


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The terminal record of one sample. Usually one path; more where history could not be extended exactly.

    `is_complete` is false when a call was lost, the rollout failed, or it was too stale: it never looks trainable.
    """

    task_id: str
    group_id: str
    sample_index: int
    paths: tuple[TokenPath, ...]
    stop_reason: StopReason
    is_complete: bool
    reward: float | None = None  # of the main conversation
    reward_error: str | None = None
    error: str | None = None
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    attempt: int = 0
    timings: Timings = Timings()
    rollout_id: str = ""
    num_masked_tokens: int = 0  # sampled tokens that were taken out of the mask
    num_stale_attempts: int = 0  # attempts before this one that were dropped for their staleness
    max_staleness: int | None = None  # what its run allows
    task_messages: tuple[Message, ...] = ()  # of a session for a task, or where nothing was rendered
    components: Mapping[str, float] = field(default_factory=dict)  # the named parts of the reward
    metrics: Mapping[str, float] = field(default_factory=dict)  # named numbers to look at, not to train on
    is_truncated: bool = False  # a limit cut the policy: TRUNCATIONS, or a last turn without its end
    num_resampled_turns: int = 0  # samplings that were lost and begun anew, which favours short turns
    thinking: Thinking = Thinking.KEEP  # the rule by which its prompts show the thoughts of earlier turns
    constraints: Mapping[str, str] = field(default_factory=dict)  # long ones, by `TurnSampling.constraint_digest`
    num_resumed_turns: int = 0  # turns of a lost worker that it goes on from; calls of the last may have run twice
    times: TrajectoryTimes | None = None  # None in records without them
    loop: str = ""  # the task's; empty: a session
    traceparent: str = ""  # the W3C trace context of its caller, in whose trace it is; empty: none
    trace_link: str = ""  # that of a submit of several, which its own trace links to
    adapter: str = ""  # that sampled it, whose versions all its weight versions are; empty: the base weights
    end_reason: str = ""  # what ended the episode, by the environment's own word
    restart_reason: str = ""  # why it started again from its first turn after a lost worker; empty: it did not
    # The last field: the coordinator writes it at the end of the encoded record (`api.encoded_record`).
    staleness: int | None = None  # of the tokens in its mask, when the coordinator took it; None without any

    @property
    def main_conversation(self) -> tuple[int, ...]:
        """Places in `paths` of the main conversation; empty if nothing was rendered.

        A path that goes on from another one, rewritten or branched off, belongs to that one's conversation, unless
        it `begins_conversation`. The main one begins with the own messages of the task, where `task_messages` tell
        them; else it has the most turns; of equals it sampled most tokens, then began first.
        """
        task = _opening(self.task_messages)

        def weight(places: tuple[int, ...]) -> tuple[int, ...]:
            paths = [self.paths[place] for place in places]
            is_task = bool(task) and any(_opening(path.messages)[: len(task)] == task for path in paths)
            sizes = ((len(one.own_turns), one.num_own_sampled_tokens, one.split_reason is None) for one in paths)
            return is_task, *map(sum, zip(*sizes, strict=True))

        return max(_conversations(self.paths), key=weight, default=())

    @property
    def path(self) -> TokenPath:
        """The latest path of the main conversation: the only one, unless history forked.

        Raises NotFound, naming the stop reason, for a record without paths: dropped, or without a rendered prompt.
        """
        if not self.paths:
            reason = f"{self.stop_reason.value}{f': {self.error}' if self.error else ''}"
            raise NotFound(
                f"sample {self.sample_index} of group {self.group_id!r} has no path: it ended as {reason}"
            )
        return self.paths[self.main_conversation[-1]]

    def reward_of(self, place: int) -> float | None:
        """Return the reward of the path at this place: its own, or on the main conversation the trajectory's."""
        own = self.paths[place].reward
        return self.reward if own is None and place in self.main_conversation else own

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of `path`: what a reward function sees. Those of the task if nothing was rendered."""
        return self.path.messages if self.paths else self.task_messages

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions its sampled tokens come from, ascending."""
        return tuple(sorted({span.version for path in self.paths for span in path.weight_versions}))

    @property
    def trained_versions(self) -> frozenset[int]:
        """The weight versions of the tokens in the mask."""
        return frozenset(version for path in self.paths for version in path.trained_versions)

    @property
    def oldest_trained_version(self) -> int | None:
        """The oldest weight version of the tokens in the mask; None if it is empty."""
        return min(self.trained_versions, default=None)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled, over all paths, masked ones too."""
        return sum(int(path.response_mask.sum()) for path in self.paths) + self.num_masked_tokens

    @property
    def is_sound(self) -> bool:
        """True if it is complete, its scoring has not failed, and no weight update stopped it."""
        return self.is_complete and self.failure not in NOT_THE_POLICYS

    @property
    def is_trained(self) -> bool:
        """True if the trainer consumes it: it has not failed, and has tokens in the mask."""
        return self.is_sound and self.oldest_trained_version is not None

    @property
    def failure(self) -> FailureClass | None:
        """The class of the failure that ended it, by the party at fault; None: there was none."""
        return failure_of_end(
            self.stop_reason,
            is_complete=self.is_complete,
            has_no_score=self.reward is None and self.reward_error is not None,
            is_tools_time=self.timings.tool_s > self.timings.generate_s,
        )

    def without_constrained(self) -> Trajectory:
        """Return the record with its constrained tokens out of the mask, and counted in `num_masked_tokens`."""
        paths = tuple(replace(path, response_mask=path.response_mask & ~path.constrained) for path in self.paths)
        num_masked = self.num_sampled_tokens - sum(int(path.response_mask.sum()) for path in paths)
        return replace(self, paths=paths, num_masked_tokens=num_masked)


def _opening(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return what was said, without what agents write beside it: instructions, and blanks at the ends."""
    return [(one.role, one.content.strip()) for one in messages if one.role not in ("system", "developer")]


def _conversations(paths: Sequence[TokenPath]) -> list[tuple[int, ...]]:
    """Return the places of the paths of each conversation, ascending, in the order of their first paths."""
    linked = list(range(len(paths)))  # each path to another one of its conversation; one of them to itself

    def end_of(place: int) -> int:
        while linked[place] != place:
            linked[place] = linked[linked[place]]
            place = linked[place]
        return place

    for place, path in enumerate(paths):
        if not path.begins_conversation:
            origin = max(place - 1, 0) if path.parent is None else path.parent
            linked[end_of(place)] = end_of(origin)
    found: dict[int, list[int]] = {}
    for place in range(len(paths)):
        found.setdefault(end_of(place), []).append(place)
    return [tuple(places) for places in found.values()]
