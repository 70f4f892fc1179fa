"""What a session remembers: its graph of turns, its table of calls, and the record of both. Synchronous."""

from __future__ import annotations

from collections.abc import Iterable

from agentloop.chat import ChatResult
from agentloop.errors import InvariantBroken
from agentloop.sessions.calls import CallTable
from agentloop.sessions.facts import SessionFacts
from agentloop.trajectory import CallRecord, Node, TurnGraph, token_paths
from agentloop.types import FAILURES, StopReason, Timings, Trajectory

_MAX_ERROR_CHARS = 500


class SessionMemory:
    """The turns and calls of one session."""

    def __init__(self, nodes: Iterable[Node] = (), calls: Iterable[CallRecord] = ()) -> None:
        """`nodes` and `calls` are what the journal has, in its order."""
        self.graph = TurnGraph()
        self.table = CallTable(calls)
        self.first_version: int | None = None  # the weight version that the session's first token was sampled under
        self._num_tool_calls = 0
        for node in nodes:
            self.take(node)

    @property
    def num_bytes(self) -> int:
        """An estimate of the memory it takes up."""
        return self.graph.num_bytes + self.table.num_bytes

    def take(self, node: Node) -> None:
        """Have a node that the journal has. Raises InvariantBroken for one that does not fit."""
        self.graph.add(node)
        self._num_tool_calls += len(node.reply.message.tool_calls)
        if self.first_version is None and node.reply.weight_versions:
            self.first_version = node.reply.weight_versions[0].version

    def answer_again(self, record: CallRecord, session_id: str) -> ChatResult:
        """The answer that a committed call had. Looks at every turn: retries are few, and an index would not be."""
        nodes = tuple(node for node in self.graph.nodes if node.call_id == record.call_id)
        if not nodes:
            raise InvariantBroken(f"call {record.call_id} is committed, but has no turn")
        first = nodes[0]
        before = () if first.parent_id is None else self.graph.context_ids(first.parent_id)
        prompt_ids = (*before, *first.observed_ids.tolist())
        return ChatResult(record.call_id, record.created_at, session_id, prompt_ids, nodes)

    def is_complete(self, facts: SessionFacts) -> bool:
        """Whether nothing is open, nothing was lost, and the agent did not fail."""
        is_ended_well = facts.stop_reason not in FAILURES | {StopReason.CANCELLED} and not facts.error
        return is_ended_well and not self.table.live and not self.table.lost()

    def trajectory(self, facts: SessionFacts, *, total_s: float) -> Trajectory:
        """The record of this moment. Costs all the tokens there are."""
        return Trajectory(
            task_id=facts.task_id,
            group_id=facts.group_id or facts.session_id,
            sample_index=facts.sample_index,
            paths=token_paths(self.graph),
            stop_reason=facts.stop_reason if facts.stop_reason is not None else StopReason.COMPLETED,
            is_complete=self.is_complete(facts),
            reward=facts.reward,
            reward_error=facts.reward_error or None,
            error=self._error(facts),
            num_tool_calls=self._num_tool_calls,
            timings=Timings(
                generate_s=sum(record.generate_s for record in self.table.records), total_s=max(total_s, 0.0)
            ),
            rollout_id=facts.rollout_id,
        )

    def _error(self, facts: SessionFacts) -> str | None:
        """One line that says what went wrong; None for nothing."""
        table, parts = self.table, [facts.error]
        if table.live:
            parts.append(f"{len(table.live)} calls are open")
        if lost := table.lost():
            parts.append(f"{len(lost)} of {len(table.records)} calls were lost, the first: {lost[0].error}")
        line = " ".join("; ".join(part for part in parts if part).split())
        return line[:_MAX_ERROR_CHARS] or None
