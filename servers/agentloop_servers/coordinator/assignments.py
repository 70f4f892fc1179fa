"""The messages of a sample: its demand for a lease, its assignment to a worker, and records without a worker."""

from __future__ import annotations

import time
from dataclasses import replace

from agentloop.api.coordinator import Prefix, group_key
from agentloop.scheduling.lease_table import Demand
from agentloop.scheduling.samples import PendingRecord, Sample
from agentloop.types import Assignment, Lease, RolloutTask, Timings, Trajectory, TrajectoryTimes
from agentloop.values.capabilities import NO_NEEDS, Needs, needs_of

_CHARS_PER_TOKEN = 4  # estimates the tokens of a prompt that is not rendered yet
_MIN_PREFIX_TOKENS = 512


def demand(worker_id: str, sample: Sample) -> Demand:
    """Return the demand for a lease of a worker's next sample."""
    # A sample that continues, or whose tokens were dropped as stale, gets the newest weights.
    is_new = sample.attempt == sample.num_stale_attempts == 0
    limit = sample.group.staleness if is_new else None
    needs = replace(
        needs_of_task(sample.group.task),
        version=sample.group.task.weight_version,
        adapter=sample.rollout.terms.adapter,
        max_staleness=0 if limit is None else limit.max_staleness,
    )
    return Demand(
        holder_id=sample.assignment_id,
        process_id=worker_id,
        group_id=group_key(sample.assignment_id),
        num_prompt_tokens=_num_prompt_tokens(sample.group.task),
        group_size=sample.group.num_samples,
        needs=needs,
        prefixes=_prefixes(sample.group.task),
    )


def assignment(sample: Sample, lease: Lease) -> Assignment:
    """Return the assignment that the worker receives."""
    group = sample.group
    task, wanted = group.task, group.task.weight_version
    if wanted is not None:  # The sample has already waited in the queue for these weights.
        task = replace(task, weight_version=replace(wanted, wait_s=max(0.0, wanted.wait_s - sample.queued_s)))
    return Assignment(
        assignment_id=sample.assignment_id,
        group_id=group.group_id,
        sample_index=sample.sample_index,
        task=task,
        lease=lease,
        attempt=sample.attempt,
        queue_s=sample.queued_s,
        rollout_id=sample.rollout.rollout_id,
        staleness=group.staleness,
        num_stale_attempts=sample.num_stale_attempts,
        is_restored=sample.is_restored,
        lost_tokens=dict(+sample.lost_tokens),
        num_sampled_before=sample.num_sampled_before,
        traceparent=sample.rollout.terms.traceparent,
        trace_link=sample.rollout.terms.trace_link,
        adapter=sample.rollout.terms.adapter,
    )


def needs_of_task(task: RolloutTask) -> Needs:
    """Return the needs of every turn of a task, as far as they are known before its prompt is rendered."""
    needs = needs_of(task.sampling(1), _num_prompt_tokens(task), has_images=bool(task.images))
    # The prompt's length is only an estimate, so it decides nothing alone
    return replace(needs, version=None) if needs.features else NO_NEEDS


def _prefixes(task: RolloutTask) -> tuple[Prefix, ...]:
    """Return the task's first message, usually the system prompt, if it is long enough to share its KV."""
    text = task.messages[0].content if len(task.messages) > 1 else ""
    num_tokens = len(text) // _CHARS_PER_TOKEN
    return ((f"text-{hash(text):x}", num_tokens),) if num_tokens >= _MIN_PREFIX_TOKENS else ()


def _num_prompt_tokens(task: RolloutTask) -> int:
    return sum(len(message.content) for message in task.messages) // _CHARS_PER_TOKEN


def pending_record(pending: PendingRecord) -> Trajectory:
    """Return the record of a sample that no worker will finish."""
    sample = pending.sample
    return Trajectory(
        task_id=sample.group.task.task_id,
        group_id=sample.group.group_id,
        sample_index=sample.sample_index,
        paths=(),
        task_messages=sample.group.task.messages,
        stop_reason=pending.stop_reason,
        is_complete=False,
        error=pending.error,
        attempt=sample.attempt,
        timings=Timings(queue_s=sample.queued_s),
        rollout_id=sample.assignment_id.partition("/")[0],
        times=TrajectoryTimes(time.time(), 0, lost_tokens=dict(+sample.lost_tokens)),
        num_stale_attempts=sample.num_stale_attempts,
        max_staleness=sample.group.staleness.max_staleness if sample.group.staleness is not None else None,
        loop=sample.group.task.loop,
        traceparent=sample.rollout.terms.traceparent,
        trace_link=sample.rollout.terms.trace_link,
        adapter=sample.rollout.terms.adapter,
    )
