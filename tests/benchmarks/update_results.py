"""Results of `weight_updates`, and their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.link_speed import LinkSpeed
from tests.benchmarks.report import table
from tests.benchmarks.site import Memory, PrefillCounts
from tests.benchmarks.streams import Gaps


@dataclass(frozen=True, slots=True)
class Updates:
    """Some updates of one kind. Times in milliseconds: medians, or the largest where the name says so."""

    num_updates: int
    gaps: Gaps
    ordinary_gap_ms: float  # median between two pieces of a request, just before the update
    stall_p50_ms: float  # from pause to resume
    stall_max_ms: float
    transport: str
    staging_device: str | None = None
    num_bytes: int = 0
    transfer_ms: float = 0.0
    stage_ms: float = 0.0
    swap_ms: float = 0.0
    verify_ms: float = 0.0
    num_verified: int = 0
    parts: Mapping[str, Gaps] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Staging:
    """Throughput while weights are staged one after another, compared with the throughput just before and after."""

    undisturbed_tokens_per_s: float
    staging_tokens_per_s: float  # within `stage` calls
    num_stages: int
    share_of_time: float  # share of the window within `stage` calls
    transfer_ms: float  # median
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Consecutive:
    """Updates in a row, under load."""

    updates: Updates
    before: Memory
    after: Memory
    num_requests: int
    num_lost: int


@dataclass(frozen=True, slots=True)
class Staged:
    """All results of the `staged` variant."""

    single: Updates
    staging: Staging
    consecutive: Consecutive
    kept: PrefillCounts  # sum over all these updates
    recomputed: PrefillCounts  # one more update under RECOMPUTE: proves that the counters count


@dataclass(frozen=True, slots=True)
class Plain:
    """A baseline. Its figures are meaningless if the weights did not arrive."""

    updates: Updates
    has_delivered: bool
    agreement_before: float
    agreement_after: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A variant that failed."""

    error: str


def is_bad(result: object) -> bool:
    """Return True if a variant failed, lost a request, or did not deliver."""
    if isinstance(result, Plain):
        return not result.has_delivered
    if isinstance(result, Staged):
        return result.consecutive.num_lost > 0
    return isinstance(result, Failed)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Return markdown tables by heading, for the variants that ran."""
    found = {"Stall and transfer": _stalls(results)}
    for name, result in results.items():
        updates = result.single if isinstance(result, Staged) else result
        if isinstance(updates, Updates) and updates.parts:
            rows = [(part, times.p50, times.maximum) for part, times in updates.parts.items()]
            found[f"Parts of the gap, {name}"] = table(("", "p50 ms", "max ms"), rows)
    staged = results.get("staged")
    if isinstance(staged, Staged):
        found["Throughput while staging"] = _throughput(staged.staging)
        found["Updates in a row"] = _consecutive(staged.consecutive)
        if staged.recomputed != PrefillCounts():  # SGLang has no counters
            found["Prefilled again, from vLLM's counters"] = _prefilled(staged)
    link = results.get("link")
    if isinstance(link, LinkSpeed):
        rows = [("NCCL broadcast, GPU to GPU", link.broadcast_gbps), ("copy within a GPU", link.copy_gbps)]
        found["What the hardware gives (torch, 1 GiB)"] = table(("", "GB/s"), rows)
    for name, result in results.items():
        if isinstance(result, Plain):
            sentence = f"greedy answers as under our transfer: {result.agreement_after:.0%} after the first update"
            verdict = "arrived" if result.has_delivered else "DID NOT ARRIVE: its figures mean nothing"
            found[f"Delivery by {name}"] = f"{sentence}, {result.agreement_before:.0%} before: weights {verdict}"
        elif isinstance(result, Failed):
            found[f"{name} failed"] = f"`{result.error}`"
    return found


def _stalls(results: Mapping[str, Any]) -> str:
    columns = (
        "", "gap p50 ms", "gap max ms", "no update: p50 ms", "pause to resume p50 ms", "max ms", "transfer ms",
        "GB", "GB/s", "swap ms", "verify ms", "verified", "held in", "transport", "updates",
    )  # fmt: skip
    updates: dict[str, Updates] = {}
    for name, result in results.items():
        match result:
            case Staged():
                updates[name] = result.single
                updates[f"{name}, in a row"] = result.consecutive.updates
            case Plain():
                updates[name] = result.updates
            case Updates():
                updates[name] = result
    reference = updates.get("staged")
    rows = [_stall_row(name, one) for name, one in updates.items()]
    text = table(columns, rows)
    if reference is not None:
        ratios = [
            f"{name}: {one.gaps.p50 / reference.gaps.p50:.1f} times its gap p50, "
            f"{one.stall_p50_ms / reference.stall_p50_ms:.1f} times its pause to resume"
            for name, one in updates.items()
            if not name.startswith("staged")
        ]
        text += "\n\n" + "; ".join(["Against `staged`", *ratios]) + "."
    return text


def _stall_row(name: str, one: Updates) -> tuple[object, ...]:
    gbps = one.num_bytes / one.transfer_ms / 1e6 if one.transfer_ms and one.num_bytes else None
    return (
        name, one.gaps.p50, one.gaps.maximum, one.ordinary_gap_ms, one.stall_p50_ms, one.stall_max_ms,
        one.transfer_ms, one.num_bytes / 1e9 or None, gbps, one.swap_ms or None, one.verify_ms or None,
        one.num_verified or None, one.staging_device, one.transport, one.num_updates,
    )  # fmt: skip


def _throughput(staging: Staging) -> str:
    share = staging.staging_tokens_per_s / staging.undisturbed_tokens_per_s
    rows = [
        ("undisturbed, tok/s of the streams", staging.undisturbed_tokens_per_s),
        ("within stage calls, tok/s", staging.staging_tokens_per_s),
        ("share of undisturbed", f"{share:.1%}"),
        ("stages, one after the other", staging.num_stages),
        ("share of the window within stage calls", f"{staging.share_of_time:.0%}"),
        ("transfer ms, median", staging.transfer_ms),
        ("GB", staging.num_bytes / 1e9),
    ]
    return table(("", "figure"), rows)


def _consecutive(row: Consecutive) -> str:
    mib = 2**20
    rows: list[tuple[object, ...]] = [
        (f"GPU {n} in use, MiB", before / mib, after / mib, (after - before) / mib)
        for n, (before, after) in enumerate(zip(row.before.gpus, row.after.gpus, strict=True))
    ]
    before, after = row.before.resident / mib, row.after.resident / mib
    rows.append(("resident, all processes, MiB", before, after, after - before))
    text = table(("", "before", "after", "difference"), rows)
    return (
        f"{text}\n\n{row.updates.num_updates} updates, {row.num_requests} requests in flight, {row.num_lost} lost."
    )


def _prefilled(staged: Staged) -> str:
    num_updates = staged.single.num_updates + staged.consecutive.updates.num_updates
    names = (f"{num_updates} updates under KEEP", "1 update under RECOMPUTE")
    rows = [
        (name, counts.num_prefilled_again, counts.num_preempted, counts.num_prompt_computed)
        for name, counts in zip(names, (staged.kept, staged.recomputed), strict=True)
    ]
    columns = (
        "", "preempted_queries - preempted_hits, tokens", "num_preempted_reqs", "prompt tokens computed, new"
    )  # fmt: skip
    return table(columns, rows)
