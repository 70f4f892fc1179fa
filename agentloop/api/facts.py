"""The facts of a record: one row of numbers and names, made by the record's maker and listed without the record."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TypeAlias

from agentloop.api.annotations import RecordAnnotation
from agentloop.types import Message, Trajectory

Values: TypeAlias = tuple[str | int | float | None, ...]

MAX_LISTED = 200
MAX_QUERY_CHARS = 256
_MAX_LINE_CHARS = 64


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """One record in a listing. Its fields are the columns of the store's table."""

    seq: int  # grows in the order the records were committed
    rollout_id: str
    group_id: str
    sample_index: int
    attempt: int
    stop_reason: str
    is_complete: bool
    oldest_version: int | None  # of the tokens in its mask
    newest_version: int | None
    staleness: int | None
    task_id: str
    began_at: float | None  # seconds since 1970
    total_s: float
    reward: float | None
    failure: str | None
    num_turns: int
    num_paths: int
    num_tool_calls: int
    num_tool_errors: int
    num_prompt_tokens: int
    num_observed_tokens: int
    num_sampled_tokens: int
    num_cached_tokens: int
    num_lost_tokens: int
    replica: str  # of the last turn
    worker: str
    task: str  # the first line of the task, cut
    answer: str  # the first line of the last answer, cut


_NAMES = [one.name for one in fields(RecordFacts)]
FACT_NAMES = tuple(_NAMES[_NAMES.index("task_id") :])


def facts_of(trajectory: Trajectory) -> Values:
    """Return the values of `FACT_NAMES`. Text has no NUL, which PostgreSQL cannot store."""
    paths, times = trajectory.paths, trajectory.times
    turns = [turn for path in paths for turn in path.own_turns]
    messages, failure = trajectory.messages, trajectory.failure
    num_sampled = trajectory.num_sampled_tokens
    values = (
        trajectory.task_id,
        None if times is None else times.began_at,
        trajectory.timings.total_s,
        trajectory.reward,
        None if failure is None else failure.value,
        len(turns),
        len(paths),
        trajectory.num_tool_calls,
        trajectory.num_tool_errors,
        sum(len(path.prompt_ids) for path in paths),
        sum(len(path.response_ids) for path in paths) - num_sampled,
        num_sampled,
        sum(turn.cached_tokens for turn in turns),
        0 if times is None else sum(times.lost_tokens.values()),
        turns[-1].replica_id if turns else "",
        "" if times is None else times.worker,
        _line(next((one for one in messages if one.role == "user"), None)),
        _line(next((one for one in reversed(messages) if one.role == "assistant" and one.content), None)),
    )
    return tuple(value.replace("\0", "") if isinstance(value, str) else value for value in values)


def _line(message: Message | None) -> str:
    text = "" if message is None else message.content[: 16 * _MAX_LINE_CHARS].replace("\0", "").strip()
    return text.partition("\n")[0][:_MAX_LINE_CHARS]


class ListOrder(StrEnum):
    """The order of a listing."""

    NEWEST = "newest"
    SLOWEST = "slowest"
    BEST = "best"  # by reward; records without one are left out
    WORST = "worst"


@dataclass(frozen=True, slots=True)
class FactsQuery:
    """The records to list. A search for `text` is for newest-first listings. A range has its lower end, not its
    upper one; records without a reward are in no range of it."""

    order: ListOrder = ListOrder.NEWEST
    failed: bool = False  # only those that ended by a failure
    task: str = ""  # only those of this task id
    text: str = ""  # within the first lines of task and answer, in any case (with SQLite, of ASCII letters)
    limit: int = 50
    cursor: str = ""  # of the page before; empty: the first page
    group: str = ""  # only those of this "ROLLOUT/GROUP"
    min_reward: float | None = None
    max_reward: float | None = None
    min_s: float | None = None  # of `total_s`
    max_s: float | None = None
    has_totals: bool = True  # the first page has totals and histograms


@dataclass(frozen=True, slots=True)
class NotableRecord:
    """One record that is worth a look, and why."""

    record: RecordFacts
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordPage:
    """One record, to be looked at. A text is of one token alone; `missing` says why there are none."""

    record: Trajectory
    texts: dict[str, str]  # by token id, in digits
    missing: str = ""
    annotations: dict[str, RecordAnnotation] = field(default_factory=dict)  # the newest of each name


@dataclass(frozen=True, slots=True)
class FactsTotal:
    """The records so far that ended alike, deleted ones too. Sums are over them."""

    stop_reason: str
    failure: str | None
    newest_version: int | None
    num_records: int
    num_rewarded: int
    reward: float
    total_s: float
    num_sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Numbers of values by range: `counts[n]` of them are at least `edges[n]` and below `edges[n + 1]`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FactsPage:
    """One page of a listing."""

    records: tuple[RecordFacts, ...]
    cursor: str  # of the next page, which a search may fill; empty: this is the last
    totals: tuple[FactsTotal, ...]  # on the first page, where the query has them
    histograms: dict[str, Histogram] = field(default_factory=dict)  # as `totals`, by the name of the fact;
    # of the records that the query lists among the latest ones
    is_of_latest: bool = False  # the histograms leave older records out
