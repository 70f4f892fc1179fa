"""LoopContext: the API of an agent loop. It owns the messages, tokens and budget of one trajectory.

A turn has three steps: pending messages are rendered to token ids (the bridge), the engine samples the turn and the
parser reads it, and the turn is added to the token path. Sampled ids are never rendered again; only new messages
are rendered. Long renders run outside the event loop.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from structlog.contextvars import bind_contextvars

from agentloop.api.flight import Doing, Flight
from agentloop.concurrency.clock import Stopwatch
from agentloop.errors import (
    Conflict,
    InvalidRequest,
    RewardError,
    TemplateNotPrefixStable,
    WeightVersionNotServed,
)
from agentloop.generation.deadline import Deadline
from agentloop.generation.image_prompts import ImageAsker, ImagePlacer
from agentloop.generation.leased_engine import TURN_GRACE_S, LeasedEngine
from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.generation.turn_sampler import TurnRequest, sample_turn
from agentloop.images import ImageSpan
from agentloop.parsers.grammar import after_reasoning
from agentloop.rendering.port import Renderer, TurnEnd
from agentloop.rendering.renderer import off_loop
from agentloop.rollout.budget import Budget, LimitReached, StalenessGuard
from agentloop.rollout.models import ModelsPort, NoModels, OtherModel
from agentloop.rollout.toolbox import REACTION, KeepAnswers, ToolScope
from agentloop.rollout.turn_journal import FinishedTurn, KeptTurns, RunJournal, RunProgress, ToolAnswers
from agentloop.score import Score
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.trajectory.node import Reply
from agentloop.types import (
    JSON,
    FinishReason,
    GenerateRequest,
    KVPolicy,
    LossCause,
    Message,
    Move,
    OnExcess,
    RolloutTask,
    StopReason,
    ToolCall,
    ToolCallTimes,
    ToolOutcome,
    ToolResult,
)
from agentloop.values.aux_rows import routes_from
from agentloop.values.sampled_tokens import SampledTokens

REFUSAL_PAUSE_S = 1.0
_AGENT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class LoopContext:
    """One running trajectory. One loop uses it, with one call at a time."""

    def __init__(
        self,
        task: RolloutTask,
        trajectory_id: str,
        *,
        engine: LeasedEngine,
        reader: TurnReader,
        renderer: Renderer,
        tools: ToolScope,
        budget: Budget,
        kv_policy: KVPolicy,
        seed: int | None,
        turn_timeout_s: float,
        guard: StalenessGuard | None = None,
        placer: ImagePlacer | None = None,
        journal: RunJournal | None = None,
        stopwatch: Stopwatch | None = None,
        models: ModelsPort = NoModels(),  # noqa: B008 - it has no state
        lost_before: Mapping[LossCause, int] | None = None,
        trace_of: Callable[[str], str] = lambda turn_id: "",
    ) -> None:
        """`trace_of` returns a turn's `traceparent` for the engine; `lost_before` is from earlier attempts."""
        self.task = task
        self.stopwatch = Stopwatch() if stopwatch is None else stopwatch
        self.tool_calls: list[ToolCallTimes] = []
        self._idle_since_us = 0  # the end of the last turn or tool calls
        self._num_calls_kept = 0  # the length of the part of `tool_calls` that is in the journal
        self._moves_before: tuple[Move, ...] = ()
        self._lost_before = Counter(lost_before or {})
        self.trajectory_id = trajectory_id
        self._engine = engine
        self._reader = reader
        self._renderer = renderer
        self._tools = tools
        self._definitions = tools.definitions
        self._budget = budget
        self._kv_policy = kv_policy
        self._seed = seed
        self._turn_timeout_s = turn_timeout_s
        self._guard = guard
        self._placer = ImagePlacer(takes_images=False) if placer is None else placer
        self._path = GrowingPath(task.messages)
        self._last_turn: Reply | None = None
        self._end = TurnEnd()  # the end state of the last turn
        self._kv_version: int | None = None  # the weight version at the trajectory's start
        self._journal = journal
        self._models = models
        self._trace_of = trace_of
        self._kept_answers: dict[str, ToolResult] = {}  # journaled results of the resumed turn, by call id
        self._began_at = time.perf_counter()
        self._num_resampled_before, self._engine_before_s = 0, 0.0
        self.num_resumed_turns = 0
        self.spent_before_s = 0.0  # on lost workers
        self._score = Score()
        self.deadline = Deadline()  # the loop's deadline; a running turn ends at it and keeps its tokens
        self.has_lost_call = False  # a generation was started and its tokens were not received
        self._is_over, self.num_tool_errors = False, 0
        self.generate_s, self.tool_s = 0.0, 0.0
        self._agents: dict[str, LoopContext] = {}
        self.is_trained = True

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        return self._path.messages

    @property
    def path(self) -> GrowingPath:
        """The conversation's tokens so far."""
        return self._path

    @property
    def tool_definitions(self) -> Sequence[Mapping[str, JSON]]:
        """The definitions of the tools in the prompt, in the OpenAI format."""
        return self._definitions

    @property
    def budget(self) -> Budget:
        """The trajectory's limits and its usage so far."""
        return self._budget

    @property
    def environment(self) -> Any:
        """The instance of the task's environment class; None if the task has no environment."""
        return self._tools.environment

    @property
    def num_resampled_turns(self) -> int:
        """Generations that were repeated because their replica was lost."""
        return self._num_resampled_before + self._engine.num_resampled

    @property
    def engine_s(self) -> float:
        """Seconds that the engines spent on the turns so far."""
        return self._engine_before_s + self._engine.engine_s

    @property
    def flight(self) -> Flight:
        """The current activity of the trajectory: queued, prefill, decode, a tool call or the loop's own code."""
        now_us, turn = self.stopwatch(), self._engine.turn
        doing, since_us, tool_name = Doing.LOOP, self._idle_since_us, ""
        if turn is not None:
            doing, since_us = Doing.PREFILL, turn.begun_us
            if turn.queues_since_us is not None:
                doing, since_us = Doing.PLACE, turn.queues_since_us
            elif turn.first_token_us is not None:
                doing, since_us = Doing.DECODE, turn.first_token_us
        elif (call := self._tools.longest_call) is not None:
            tool_name, for_s = call
            doing, since_us = Doing.TOOL, now_us - round(for_s * 1e6)
        budget, left_s = self._budget, self.deadline.left_s
        return Flight(
            doing,
            (now_us - since_us) / 1e6,
            now_us / 1e6,
            tool_name,
            budget.num_turns,
            budget.num_sampled_tokens,
            None if math.isinf(left_s) else left_s,
        )

    @property
    def moves(self) -> tuple[Move, ...]:
        """The changes of replica so far, including those of earlier attempts."""
        return (*self._moves_before, *self._engine.moves)

    @property
    def lost_tokens(self) -> Mapping[LossCause, int]:
        """Number of sampled tokens that were discarded, by cause, including those of earlier attempts."""
        return self._lost_before + self._engine.lost_tokens

    @property
    def score(self) -> Score:
        """The score that the loop has set so far."""
        return self._score

    @property
    def contexts(self) -> Mapping[str, LoopContext]:
        """This context under the name "", and those of the other agents."""
        return {"": self, **self._agents}

    @property
    def turn_id(self) -> str:
        """The id of the last sampled turn. Raises RewardError before the first turn."""
        turn_id = self._path.last_turn_id
        if turn_id is None:
            raise RewardError("no turn was sampled yet: call ctx.sample() first")
        return turn_id

    @property
    def last_turn(self) -> Reply:
        """The last sampled turn. Raises InvalidRequest before the first turn."""
        if self._last_turn is None:
            raise InvalidRequest("no turn was sampled yet: call ctx.sample() first")
        return self._last_turn

    def resume(self, kept: KeptTurns, num_sampled_before: int) -> None:
        """Restore the journaled turns of a lost worker, which had reported `num_sampled_before` sampled tokens.

        Raises LimitReached if the last turn reached a limit.
        """
        last = kept.turns[-1]
        reply, progress = last.node.reply, last.progress
        self._path = GrowingPath.restored([turn.node for turn in kept.turns])
        self._kept_answers = {result.call_id: result for result in kept.answers}
        self._last_turn, self._end = reply, self._reader.end_of(reply, self._path.messages[:-1])
        versions = kept.turns[0].node.reply.weight_versions
        self._kv_version = versions[0].version if versions else None
        self._score = progress.score
        self.num_resumed_turns = len(kept.turns)
        self.spent_before_s = progress.spent_s
        self.num_tool_errors = progress.num_tool_errors
        self._num_resampled_before = progress.num_resampled_turns
        self.generate_s = progress.generate_s
        self.tool_s += progress.tool_s
        self._engine_before_s = progress.engine_s
        self.stopwatch = Stopwatch(progress.began_at)
        self.tool_calls = [call for turn in kept.turns for call in turn.progress.tool_calls]
        self._num_calls_kept = len(self.tool_calls)
        self._moves_before = progress.moves
        self._lost_before = Counter(progress.lost_tokens)
        # The lost worker had reported more tokens than it had journaled: those have to be sampled again.
        self._lost_before[LossCause.KILL] += max(num_sampled_before - kept.num_sampled, 0)
        if self._guard is not None and progress.newest_version is not None:
            self._guard.learn(progress.newest_version)
        # Count all but the last turn here: `turn_ended` counts the last one and applies the limits to it.
        budget = self._budget
        budget.num_turns = len(kept.turns) - 1
        budget.num_sampled_tokens = kept.num_sampled - len(reply.token_ids)
        budget.num_tool_calls = progress.num_tool_calls
        num_prompt = self._path.num_context_tokens - len(reply.token_ids)
        budget.turn_ended(num_prompt, len(reply.token_ids), reply.finish_reason, progress.max_tokens)
        self._check_abort(reply)

    def set_reward(self, reward: float, components: Mapping[str, float] | None = None) -> None:
        """Set the trajectory's reward and its named components. Later values replace earlier ones.

        The task's reward function, if it has one, replaces the reward. Scores are validated when the trajectory
        ends; a problem is recorded in `reward_error`.
        """
        self._score = self._score.updated(Score(reward, components or {}))

    def set_metrics(self, **metrics: float) -> None:
        """Set named numbers that are recorded but not used for training. Later values replace earlier ones."""
        self._score = self._score.updated(Score(metrics=metrics))

    def set_turn_reward(self, reward: float, turn_id: str | None = None) -> None:
        """Set the reward of one turn, by default the last. Raises RewardError before the first turn."""
        self._score = self._score.updated(
            Score(turn_rewards={self.turn_id if turn_id is None else turn_id: reward})
        )

    def exclude_path(self) -> None:
        """Exclude the path of the last turn from training. Raises RewardError before the first turn."""
        self._score = self._score.updated(Score(untrainable_turns=(self.turn_id,)))

    def close(self) -> None:
        """End the trajectory: later calls to sample or to run tools raise Conflict, also in an abandoned loop."""
        self._is_over = True
        for agent in self._agents.values():
            agent.close()

    async def _refuse(self) -> NoReturn:
        await asyncio.sleep(REFUSAL_PAUSE_S)  # a loop that catches every error must not spin
        raise Conflict(f"trajectory {self.trajectory_id} has ended: its loop must return")

    async def sample(self, *, max_tokens: int | None = None, temperature: float | None = None) -> Reply:
        """Sample one turn of the policy and append it to the conversation.

        A turn cut only by `max_tokens` is returned with finish reason LENGTH and `is_closed` false. Raises
        LimitReached if a limit of the task leaves no tokens for the turn or cut it, if the trajectory is too stale,
        or if the task's weight version is no longer served: the loop must not catch it, because it sets the stop
        reason. Raises Conflict after the trajectory has ended.
        """
        if self._is_over:
            await self._refuse()
        self._check_age()
        await self._observe_pending(max_tokens)
        num_prompt = self._path.num_context_tokens
        room = self._budget.tokens_for_turn(num_prompt, max_tokens)
        self.has_lost_call = True  # until the reply arrives: without it the trajectory is incomplete
        started = time.perf_counter()
        # At the deadline the engine aborts the turn and returns its tokens, which takes up to TURN_GRACE_S.
        with self.deadline.grace(TURN_GRACE_S):
            wanted = self._turn_request(room, temperature)
            try:
                reply = await sample_turn(self._engine, self._reader, wanted, self._continues_after_abort)
            except WeightVersionNotServed as error:
                # Before the first token there is no stale sample: the error itself is the outcome.
                if self._budget.num_sampled_tokens == 0:
                    raise
                self.has_lost_call = False
                raise LimitReached(StopReason.STALE) from error
        self.generate_s += time.perf_counter() - started
        self._idle_since_us = self.stopwatch()
        self.has_lost_call = False
        self._path.add_turn(reply)
        if reply.weight_versions:
            bind_contextvars(version=reply.weight_versions[-1].version)
            if self._kv_version is None:
                self._kv_version = reply.weight_versions[0].version
        self._last_turn, self._end = reply, self._reader.end_of(reply, self._path.messages[:-1])
        self._keep_turn(max_tokens)
        self._budget.turn_ended(num_prompt, len(reply.token_ids), reply.finish_reason, max_tokens)
        # Do not check the turn's own staleness here: if it is the last turn, the trajectory is already complete.
        self._check_abort(reply)
        return reply

    def agent(self, name: str, *messages: Message, has_tools: bool = True, is_trained: bool = True) -> LoopContext:
        """Return the context of another agent of this trajectory, which the policy plays too.

        The agent has its own conversation, which begins with `messages`, and its own reward (`set_reward`), which
        replaces the trajectory's for its paths. Agents may sample at the same time. The limits of the task count
        the turns and tokens of all agents; agents that sample at the same time may each exceed them by one turn.
        The record has the paths of all agents; `Trajectory.of_agent` returns those of one. Without `is_trained`, an
        agent's paths are recorded, but not trainable. The trajectory cannot be resumed: if its worker is lost, it
        starts again from its first turn.

        Raises Conflict after the trajectory has ended. Raises InvalidRequest for a name that is taken or is not 1
        to 64 letters, digits, `_` or `-`, without messages, in the context of another agent, and as `observe` does.
        """
        if _AGENT_NAME.fullmatch(name) is None or name in self._agents:
            raise InvalidRequest(
                f"agent {name[:128]!r}: expected a new name of 1 to 64 letters, digits, '_' or '-'", param="name"
            )
        if not messages:
            raise InvalidRequest(f"agent {name!r} has no messages: its conversation needs a first prompt")
        if self._path.prefix:
            raise InvalidRequest(f"agent {name!r}: only the main agent's context can start agents")
        if self._is_over:
            raise Conflict(f"trajectory {self.trajectory_id} has ended: its loop must return")
        _check_contents(messages)
        if self._journal is not None:
            self._journal.forget()
            self._journal = None
        agent = LoopContext(
            self.task,
            f"{self.trajectory_id}.{name}",
            engine=self._engine,
            reader=self._reader,
            renderer=self._renderer,
            tools=self._tools,
            budget=self._budget,
            kv_policy=self._kv_policy,
            # Otherwise agents with equal prompts would sample equal replies.
            seed=None if self._seed is None else (self._seed + zlib.crc32(name.encode())) % (1 << 31),
            turn_timeout_s=self._turn_timeout_s,
            guard=self._guard,
            placer=self._placer,
            stopwatch=self.stopwatch,
            models=self._models,
            trace_of=self._trace_of,
        )
        agent._path = GrowingPath(messages, prefix=f"{name}-")
        agent._definitions = self._definitions if has_tools else []
        agent.is_trained = is_trained
        agent.deadline = self.deadline
        self._agents[name] = agent
        return agent

    def model(self, name: str) -> OtherModel:
        """Return another model of the service, such as a user simulator or a judge.

        Its messages and tokens are not part of the trajectory.
        """
        return OtherModel(name, self._models, self.trajectory_id)

    async def run_tools(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """Run a turn's calls concurrently and append one tool message per call, in call order.

        A failed, unknown, malformed or timed-out call has an error message as its result and raises nothing.
        Raises LimitReached, EndEpisode (a tool ends the episode) and ToolLost; the loop must not catch them.
        """
        if self._is_over:
            await self._refuse()
        allowed = self._budget.calls_to_run(len(calls))
        self._check_age()  # do not run calls whose results no turn will read
        limits = self.task.limits
        started = time.perf_counter()
        results = await self._answers(calls[:allowed])
        self.tool_s += time.perf_counter() - started
        self._idle_since_us = self.stopwatch()
        excess = f"Error: too many calls in one turn, only the first {allowed} were run"
        results += [
            ToolResult(call.id, call.name, excess, True, outcome=ToolOutcome.EXCESS, begun_us=self.stopwatch())
            for call in calls[allowed:]
        ]
        self.tool_calls += (
            ToolCallTimes(result.name, result.begun_us, round(result.duration_s * 1e6), result.outcome)
            for result in results
        )
        self.num_tool_errors += sum(result.is_error for result in results)
        self._path.observe(
            *(Message("tool", result.content, tool_call_id=result.call_id, name=result.name) for result in results)
        )
        if limits.on_long_tool_response is OnExcess.STOP and any(result.is_truncated for result in results):
            raise LimitReached(StopReason.TOOL_RESPONSE_TOO_LONG)
        if self._tools.ended is not None:
            raise self._tools.ended
        return tuple(results)

    async def react(self) -> bool:
        """Append the environment user's reply to the last turn. Returns False if the user does not reply.

        Raises EndEpisode if the user ends the episode; the loop must not catch it.
        """
        if self._is_over:
            await self._refuse()
        journaled, started = self._kept_answers.pop(REACTION, None), time.perf_counter()
        reply = await self._tools.react(self.messages, self._keep) if journaled is None else journaled.content
        self._forget_unless_resumable()
        self.tool_s += time.perf_counter() - started
        self._idle_since_us = self.stopwatch()
        if reply is not None:
            self.observe(Message("user", reply))
        return reply is not None

    async def _answers(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return the results of calls in order. Calls with a journaled result are not run again."""
        journaled = {call.id: self._kept_answers.pop(call.id) for call in calls if call.id in self._kept_answers}
        missing = [call for call in calls if call.id not in journaled]
        max_bytes = self.task.limits.max_tool_response_bytes
        results = iter(await self._tools.run(missing, max_bytes, self._keep, self.stopwatch))
        self._forget_unless_resumable()
        return [journaled[call.id] if call.id in journaled else next(results) for call in calls]

    @property
    def _keep(self) -> KeepAnswers | None:
        return None if self._journal is None else self._keep_answers

    def _forget_unless_resumable(self) -> None:
        # A session without a snapshot has state that cannot move: another worker starts at the first turn.
        if self._journal is not None and not self._tools.can_resume:
            self._journal.forget()

    def _keep_turn(self, max_tokens: int | None) -> None:
        """Append the last turn, the loop's `max_tokens` for it and the current counters to the journal."""
        if self._journal is None or (node := self._path.last_turn) is None:
            return
        progress = RunProgress(
            left_s=self._left_s,
            spent_s=self.spent_before_s + time.perf_counter() - self._began_at,
            num_tool_calls=self._budget.num_tool_calls,
            num_tool_errors=self.num_tool_errors,
            num_resampled_turns=self.num_resampled_turns,
            generate_s=self.generate_s,
            tool_s=self.tool_s,
            score=self._score,
            newest_version=None if self._guard is None else self._guard.newest_version,
            max_tokens=max_tokens,
            engine_s=self.engine_s,
            began_at=self.stopwatch.began_at,
            tool_calls=tuple(self.tool_calls[self._num_calls_kept :]),
            moves=self.moves,
            lost_tokens=self.lost_tokens,
        )
        self._num_calls_kept = len(self.tool_calls)
        self._journal.append(FinishedTurn(node, progress))

    def _keep_answers(self, results: tuple[ToolResult, ...], states: Mapping[str, bytes | None]) -> None:
        if self._journal is not None:
            self._journal.append(ToolAnswers(self.turn_id, results, states, self._left_s))

    @property
    def _left_s(self) -> float | None:
        return None if math.isinf(self.deadline.at) else self.deadline.left_s

    def observe(self, *messages: Message) -> None:
        """Append messages that the policy did not write. The next turn's prompt includes them.

        Raises InvalidRequest for content that is not a string or cannot be encoded as UTF-8.
        """
        _check_contents(messages)
        self._path.observe(*messages)

    def replace_history(self, *messages: Message) -> None:
        """Replace the conversation by `messages`, such as the task's messages and a summary.

        The next turn's prompt has only these messages, and begins a new token path that `compacts` the present one.
        Raises InvalidRequest before the first turn, and as `observe` does.
        """
        if self._path.last_turn is None:
            raise InvalidRequest("no turn was sampled from the last prompt: call ctx.sample() first")
        _check_contents(messages)
        self._path.replace_history(messages)

    async def _observe_pending(self, wanted: int | None) -> None:
        """Add the token ids of pending messages to the path. Raises LimitReached if the next turn does not fit."""
        if not self._path.is_started:
            prompt, images = await self._placed(self._path.messages, self._render)
            self._budget.tokens_for_turn(len(prompt), wanted)
            self._path.start(prompt, images)
            return
        try:
            bridge, images = await self._placed(self._path.pending, self._bridge)
        except TemplateNotPrefixStable as error:
            # The template changes earlier tokens: render the complete conversation, including sampled reasoning.
            prompt, images = await self._placed(self._path.messages, self._render)
            self._budget.tokens_for_turn(len(prompt), wanted)
            self._path.extend_to(prompt, self._renderer.decode, images, cause=error.message)
            return
        self._budget.tokens_for_turn(self._path.num_context_tokens + len(bridge), wanted)
        self._path.add_observed(bridge, images)

    def _render(self) -> list[int]:
        return self._renderer.render(self._path.messages, self._definitions, self.task.template_kwargs)

    def _bridge(self) -> list[int]:
        path = self._path
        return self._renderer.bridge(path.pending, self._definitions, self._end, self.task.template_kwargs)

    async def _placed(
        self, messages: Sequence[Message], work: Callable[[], list[int]]
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Render messages with `work` and insert the placeholder tokens of their images."""
        ids = await off_loop(sum(len(message.content) for message in messages), work)
        known = {image.sha256: image for image in self.task.images}
        request_id = f"{self.trajectory_id}:{self._budget.num_turns}"
        asker = ImageAsker(known, self._engine, request_id, self.deadline)
        return await self._placer.place(ids, messages, asker)

    def _continues_after_abort(self, sampled: SampledTokens) -> bool:
        """Return True if a turn that the engine aborted may continue, that is, if it is not too stale."""
        return self._guard is None or not self._guard.must_end(self._path, sampled.weight_versions)

    def _check_age(self) -> None:
        if self._guard is not None:
            self._guard.check(self._path)

    def _check_abort(self, reply: Reply) -> None:
        """Raise LimitReached (STALE) if a weight update aborted the turn and the loop must not continue."""
        if reply.finish_reason is FinishReason.ABORT:
            if self.task.weight_version is not None:  # the task accepts only its own version
                raise LimitReached(StopReason.STALE)
            self._check_age()

    def _turn_request(self, max_tokens: int, temperature: float | None) -> TurnRequest:
        task, turn_index = self.task, self._budget.num_turns
        own_stop_ids = () if task.ignore_eos else self._renderer.stop_token_ids
        sampling = replace(
            task.sampling(max_tokens),
            temperature=task.temperature if temperature is None else temperature,
            seed=None if self._seed is None else self._seed + self._path.num_turns,
            stop_token_ids=tuple(dict.fromkeys((*own_stop_ids, *task.stop_token_ids))),
            min_tokens=min(task.min_tokens, max_tokens),
        )
        # The prompt opens a reasoning block: the constraint applies to the text after the reasoning.
        if sampling.constraint is not None and self._reader.is_thinking(self._path.context_ids):
            constraint = after_reasoning(sampling.constraint, self._reader.delimiters.reasoning)
            sampling = replace(sampling, constraint=constraint)
        keeps_kv = self._kv_policy is KVPolicy.KEEP
        bind_contextvars(turn=turn_index)
        return TurnRequest(
            GenerateRequest(
                request_id=f"{self.trajectory_id}:{turn_index}",
                token_ids=self._path.context_ids,
                sampling=sampling,
                timeout_s=self._turn_timeout_s,
                trajectory_id=self.trajectory_id,
                kv_version=self._kv_version if keeps_kv else None,
                images=self._path.context_images,
                image_data=self.task.images if self._path.context_images else (),
                keeps_late=not task.stop,
                keeps_kv=keeps_kv,
                traceparent=self._trace_of(self._path.next_turn_id),
                adapter=self._engine.adapter,
                num_known_tokens=self._path.num_known_tokens,
                routes_from=routes_from(self._path.num_known_tokens),
            ),
            Reading(self._definitions, turn_index, reads_calls=bool(self._definitions), reads_reasoning=True),
            stop=task.stop,
            deadline=self.deadline,
            stopwatch=self.stopwatch,
        )


def _check_contents(messages: Sequence[Message]) -> None:
    for message in messages:
        if not isinstance(message.content, str):
            raise InvalidRequest(
                f"the content of a {message.role} message must be a str, not {type(message.content).__name__}"
            )
        try:
            message.content.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the content of a {message.role} message cannot be encoded as UTF-8: {error}"
            ) from error
