"""Facts of a record: one row of numbers and names for listings, which do not read the record itself.

The process that encodes the record computes them.
"""

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
    """One record in a listing. The fields are the columns of the store's table."""

    seq: int  # increases in commit order
    rollout_id: str
    group_id: str
    sample_index: int
    attempt: int
    stop_reason: str
    is_complete: bool
    oldest_version: int | None  # the range over the tokens in the loss mask
    newest_version: int | None
    staleness: int | None
    task_id: str
    began_at: float | None  # Unix time in seconds
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
    replica: str  # the replica of the last turn
    worker: str
    task: str  # the first line of the first user message, truncated
    answer: str  # the first line of the last assistant message, truncated


_NAMES = [column.name for column in fields(RecordFacts)]
FACT_NAMES = tuple(_NAMES[_NAMES.index("task_id") :])


def facts_of(trajectory: Trajectory) -> Values:
    """Return the values of `FACT_NAMES`, with NUL removed from text because PostgreSQL cannot store it."""
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
        _line(next((message for message in messages if message.role == "user"), None)),
        _line(next((each for each in reversed(messages) if each.role == "assistant" and each.content), None)),
    )
    return tuple(value.replace("\0", "") if isinstance(value, str) else value for value in values)


def _line(message: Message | None) -> str:
    text = "" if message is None else message.content[: 16 * _MAX_LINE_CHARS].replace("\0", "").strip()
    return text.partition("\n")[0][:_MAX_LINE_CHARS]


class ListOrder(StrEnum):
    """The order of a listing."""

    NEWEST = "newest"
    SLOWEST = "slowest"
    BEST = "best"  # by reward; records without a reward are omitted
    WORST = "worst"


@dataclass(frozen=True, slots=True)
class FactsQuery:
    """Filters and order of a listing of records.

    A search for `text` requires the order NEWEST. Ranges include the lower and exclude the upper bound; records
    without a reward match no range of rewards.
    """

    order: ListOrder = ListOrder.NEWEST
    failed: bool = False  # only records that ended with a failure
    task: str = ""  # only records of this task id
    text: str = ""  # substring of the `task` or `answer` line, case-insensitive (in SQLite only for ASCII letters)
    limit: int = 50
    cursor: str = ""  # `FactsPage.cursor` of the previous page; empty: the first page
    group: str = ""  # only records of this "ROLLOUT/GROUP"
    min_reward: float | None = None
    max_reward: float | None = None
    min_s: float | None = None  # range of `total_s`
    max_s: float | None = None
    has_totals: bool = True  # include totals and histograms in the first page


@dataclass(frozen=True, slots=True)
class NotableRecord:
    """A record that deserves attention, with the reasons."""

    record: RecordFacts
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordPage:
    """One record for display, with the text of each token. `missing` is the reason that `texts` is empty."""

    record: Trajectory
    texts: dict[str, str]  # the text of each single token, by token id in decimal digits
    missing: str = ""
    annotations: dict[str, RecordAnnotation] = field(default_factory=dict)  # the newest of each name


@dataclass(frozen=True, slots=True)
class FactsTotal:
    """Totals over all records, including deleted ones, with the same stop reason, failure and newest version."""

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
    """Histogram: `counts[n]` values are at least `edges[n]` and below `edges[n + 1]`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FactsPage:
    """One page of a listing."""

    records: tuple[RecordFacts, ...]
    cursor: str  # the next page's cursor; empty: this is the last page. A page of a search may have no records
    totals: tuple[FactsTotal, ...]  # only on the first page, with `has_totals`
    # By the name of the fact, over the matching records among the latest ones; only on the first page.
    histograms: dict[str, Histogram] = field(default_factory=dict)
    is_of_latest: bool = False  # the histograms omit older records
