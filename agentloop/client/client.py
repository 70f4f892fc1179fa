"""RolloutClient: the HTTP client for trainers and agents.

All calls retry failures that may pass (`transport.py`). This is safe because every call is idempotent or has a key;
a retried `generate` samples again. Errors of the service are raised as the classes of `errors.py`.

    async with RolloutClient(url) as client:
        rollout = await client.submit(tasks, num_samples=8)
        async for trajectory in rollout:
            train(trajectory)
        await client.update_weights(model.named_parameters(), version=1)
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
import orjson
import structlog
from pydantic import BaseModel

from agentloop.api.annotations import AnnotationValues, annotation_of
from agentloop.api.coordinator import (
    HostDrain,
    Page,
    ReplicaHold,
    RolloutStatus,
    ServiceStatus,
    UpdateReport,
    as_its_users,
)
from agentloop.api.facts import FactsPage, FactsQuery
from agentloop.api.findings import Finding
from agentloop.api.flight import FlightPage
from agentloop.api.history import HistoryPage
from agentloop.api.requests import (
    DEFAULT_HOLD_S,
    MAX_ANNOTATIONS,
    MAX_SCORED_PROMPTS,
    MAX_SCORES,
    MAX_TASKS,
    AcknowledgeBody,
    AnnotateBody,
    DrainBody,
    GenerateBody,
    PauseBody,
    SleepBody,
    SubmitBody,
    TokenScoreBody,
    UnloadAdapterBody,
    WakeBody,
    WeightsBody,
    check_body,
    task_fields,
)
from agentloop.api.sessions import DEFAULT_TTL_S, SESSIONS_ROLLOUT_ID, NewSessionBody, OnMalformedCall, OnOverflow
from agentloop.client.batches import Batch, BatchPosition, BatchRule, Carry, batches_of
from agentloop.client.hold import HeldReplicas, held_replicas
from agentloop.client.publish import PublishOptions, PublishReport, open_publisher, tensor_bytes
from agentloop.client.push import Pusher, PushOptions, Weights, open_pusher, precision_gap
from agentloop.client.rollout import PartPosition, Rollout, follow
from agentloop.client.session import AgentSession
from agentloop.client.transport import Retryable, Transport
from agentloop.concurrency.aio import run_to_end
from agentloop.engine.interface import MemoryTag, PushSource
from agentloop.errors import AgentLoopError, DeadlineExceeded, InvalidRequest, NotFound
from agentloop.types import (
    Credit,
    Generation,
    KVPolicy,
    Message,
    OnStale,
    PauseMode,
    RolloutTask,
    TokenScores,
    Trajectory,
    VersionDemand,
)
from agentloop.values import codec

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)

_FIRST_WAIT_S = 0.1
_FORGET_TIMEOUT_S = 5.0
_WHY_TIMEOUT_S = 5.0
_MAX_PART_BYTES = 8 << 20  # per request; the service accepts 32 MiB


class RolloutClient:
    """A client of one service, for any number of concurrent calls. Use it as an async context manager.

    `timeout_s` is the timeout of each HTTP request, in addition to the call's own waiting time. `retry_timeout_s`
    is the maximum time for retries of one call. Engines fetch pushed tensors from `listen_host`: by default
    127.0.0.1 if the service's URL is a loopback address, else this machine's address on the route to the service.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = 60.0,
        retry_timeout_s: float = 120.0,
        listen_host: str | None = None,
    ) -> None:
        user_key = api_key if api_key is not None else admin_key  # the admin key is valid for all routes
        self._transport = Transport(url, user_key, admin_key, timeout_s, retry_timeout_s)
        self._listen_host = listen_host
        self._pusher: Pusher | None = None  # created by the first push
        self._has_warned_of_truncation = False

    async def __aenter__(self) -> RolloutClient:
        await self._transport.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            if self._pusher is not None:
                await self._pusher.close()
        finally:
            await self._transport.close()

    @property
    def url(self) -> str:
        """The service's base URL."""
        return self._transport.url

    async def flight(self, limit: int = 20) -> FlightPage:
        """Return the activities of live trajectories and sessions, with the `limit` oldest. Needs the admin key."""
        return await self._get(f"/flight?limit={limit}", FlightPage, is_admin=True)

    async def history(self, *metrics: str, since: float = 0.0) -> HistoryPage:
        """Return metrics of the last 15 minutes, after the Unix time `since`. Needs the admin key.

        `metrics` are names in `agentloop.api.history.HISTORY_FAMILIES`; by default all of them.
        """
        query = urlencode([("since", since), *(("metric", name) for name in metrics)])
        return await self._get(f"/history?{query}", HistoryPage, is_admin=True)

    async def why(self, trajectory: str | None = None) -> tuple[Finding, ...]:
        """Return the causes that delay the service, the most decisive first. Needs the admin key.

        With the id of a live `trajectory` (see `flight`), its current activity is the first finding. Raises
        NotFound for an unknown id.
        """
        query = "" if trajectory is None else urlencode({"trajectory": trajectory})
        return tuple(await self._get(f"/why?{query}", list[Finding], is_admin=True))

    async def wait_until_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until a replica takes traffic. Raises DeadlineExceeded after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._transport.exchange("GET", "/health")
                    except (Retryable, NotFound):  # a proxy may return 404 while the service starts
                        await asyncio.sleep(_FIRST_WAIT_S)
                    else:
                        return
        except TimeoutError as error:
            why = await self._first_finding()
            raise DeadlineExceeded(
                f"the service at {self._transport.url} is not ready after {timeout_s:g} s{why}"
            ) from error

    async def _first_finding(self) -> str:
        try:
            async with asyncio.timeout(_WHY_TIMEOUT_S):
                return f": {(await self.why())[0].text}"
        except (AgentLoopError, TimeoutError):  # the service is down, or the client has no admin key
            return ""

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        timeout_s: float = 600.0,
        model: str | None = None,
        weight_version: VersionDemand | None = None,
    ) -> Generation:
        """Sample a continuation of the given token ids. `model` is an adapter, or a model other than the policy.

        Raises ContextLengthExceeded, Overloaded, NotFound for an unknown model, and WeightVersionNotServed if the
        service does not serve an accepted version within the demand's `wait_s`.
        """
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": list(stop_token_ids),
            "weight_version": None if weight_version is None else codec.to_builtins(weight_version),
        }
        body = {"token_ids": list(token_ids), "sampling": sampling, "timeout_s": timeout_s, "model": model}
        checked = check_body(body, GenerateBody)
        return await self._post("/generate", checked, Generation, extra_s=timeout_s)

    async def score(
        self,
        batch: Sequence[Sequence[int]],
        *,
        start: int | Sequence[int] = 1,
        top_k: int = 0,
        model: str | None = None,
        weight_version: VersionDemand | None = None,
        timeout_s: float = 600.0,
    ) -> list[TokenScores]:
        """Return the logprobs of each sequence's tokens from index `start` on, under the served weights.

        `start` is one value for all sequences or one per sequence. It is at least 1, because the first token of a
        sequence has no logprob. `top_k` is at most the service's `engine.max_logprobs`. A sequence with more scores
        than an answer may have is scored in parts under one version; WeightVersionNotServed is raised if updates
        prevent that. `model` and errors are those of `generate`.
        """
        starts = [start] * len(batch) if isinstance(start, int) else start
        if len(starts) != len(batch):
            raise InvalidRequest(
                f"start has {len(starts)} values for {len(batch)} sequences: pass one per sequence, or an int",
                param="start",
            )
        sequences = [_score_parts(list(ids), first, top_k) for ids, first in zip(batch, starts, strict=True)]
        prompts = [part for parts in sequences for part in parts]
        demand = None if weight_version is None else codec.to_builtins(weight_version)
        options = {"top_k": top_k, "timeout_s": timeout_s, "weight_version": demand, "model": model}
        scores = list[TokenScores]()
        while len(scores) < len(prompts):
            part = _next_scores(prompts, len(scores), top_k)
            body = check_body({"prompts": part, **options}, TokenScoreBody)
            accept = codec.MSGPACK  # millions of numbers
            answer = await self._transport.call("POST", "/score", body=body, accept=accept, extra_s=timeout_s)
            scores += codec.decode(answer, list[TokenScores])
        found = iter(scores)
        joined = [_joined_scores([next(found) for _ in parts]) for parts in sequences]
        for place, score in enumerate(joined):
            if score is None:  # an update came between its parts
                newest = VersionDemand(exact_version=max(one.weight_version for one in scores))
                one, first = [batch[place]], starts[place]
                (joined[place],) = await self.score(
                    one, start=first, top_k=top_k, model=model, weight_version=newest, timeout_s=timeout_s
                )
        return [score for score in joined if score is not None]

    async def submit(
        self,
        tasks: Sequence[RolloutTask],
        *,
        num_samples: int = 1,
        keep: int | None = None,
        max_staleness: int | None = None,
        on_stale: OnStale = OnStale.MASK,
        trajectories_per_version: int | None = None,
        run_id: str | None = None,
        priority: int = 0,
        share: float = 1.0,
        max_running: int | None = None,
        adapter: str | None = None,
        credit: Credit | None = None,
        timeout_s: float = 3600.0,
        part_id: Callable[[int], str] | None = None,
    ) -> Rollout:
        """Submit tasks, each sampled `num_samples` times. Returns once the service has stored all of them durably.

        Staleness: `max_staleness` is the maximum age of a trajectory's tokens in weight versions; 0 is on-policy.
        `on_stale` is the policy for older tokens; by default they are removed from the loss mask.
        `trajectories_per_version` is the number of trajectories that the trainer consumes per version: trajectories
        start only as far ahead as the staleness limit allows. Submits with one `run_id` count together. Samples
        that wait for a version fill the service's queue: do not await a submit that exceeds it before you train.

        Groups: with `keep`, a task's first `keep` complete samples form its group and the others are cancelled,
        so that the slowest do not delay it. Every sample has a record, and the cancelled ones are not complete.

        Scheduling: samples of a higher `priority` always start first, so an evaluation overtakes training. Runs of
        equal priority share the capacity in proportion to `share`. At most `max_running` trajectories of a run are
        live. Without these options and without a `run_id`, the work of one key starts in submit order. An `adapter`
        samples all turns, and weight versions are its versions. `credit` replaces the `credit` of all tasks.
        While the service's queue is full, the tasks are submitted in smaller parts; `part_id` maps the index of a
        part's first task to its rollout id (default: random). After `timeout_s`, DeadlineExceeded is raised. A
        failed submit cancels its accepted parts. Raises InvalidRequest for an invalid task.
        """
        self._warn_of_truncation(tasks)
        if credit is not None:
            tasks = [replace(task, credit=credit) for task in tasks]
        bodies = [_with_lists(task_fields(task)) for task in tasks]
        staleness = _staleness_fields(max_staleness, on_stale, trajectories_per_version)
        if staleness or max_running is not None or share != 1.0:
            run_id = run_id or _new_id()  # the limits apply to all parts together
        options: dict[str, Any] = {"num_samples": num_samples, "keep": keep, "run_id": run_id, "priority": priority}
        options |= {"share": float(share), "max_running": max_running, "adapter": adapter, **staleness}
        rollout = Rollout(self)
        try:
            async with asyncio.timeout(timeout_s):
                await self._submit_all(rollout, bodies, options, part_id or (lambda first: _new_id()))
        except TimeoutError as error:
            await self._forget(rollout)
            raise DeadlineExceeded(
                f"the service did not accept all {len(tasks)} tasks within {timeout_s:g} s: its queue is full or "
                "it is slow; the accepted ones are cancelled"
            ) from error
        except BaseException:
            await self._forget(rollout)
            raise
        return rollout

    async def batches(
        self,
        tasks: Iterable[RolloutTask],
        *,
        num_groups: int,
        num_samples: int,
        over_provision: float = 1.0,
        carry: Carry | str = Carry.NEXT,
        max_replaced: int = 0,
        acknowledge: bool = False,
        resume: str | None = None,
        cancel_on_close: bool = True,
        **options: Any,
    ) -> AsyncGenerator[Batch, None]:
        """Yield batches of the first `num_groups` complete groups, until all `tasks` have ended.

        At the start of a batch, `num_groups * over_provision` groups are in progress: first those left over from
        earlier batches, then new ones. With `carry` "next", unfinished groups continue while the caller trains;
        with "cancel", they are cancelled. `tasks` may be infinite: it is read only as needed. Short trajectories
        finish first: see `Batch.ages` and `Batch.carried_share`. `options` are those of `submit`; `max_staleness`
        and `on_stale` limit the age of groups that carry over. With `num_samples` 1, each group is one trajectory.

        Dynamic sampling: up to `max_replaced` groups of a batch whose complete samples all have the same reward are
        left out, and groups of further tasks take their places; `Batch.num_replaced` is their number.

        With `acknowledge`, the service may delete a batch's records once the next batch is requested. Closing the
        iterator cancels the unfinished groups, unless `cancel_on_close` is false. Raises the errors of `submit`.

        Restart: a trainer stores `Batch.position` with the weights that this batch trained. Another process passes
        it as `resume`, with the same `tasks` and options: every later group is then yielded once, also groups that
        were submitted after the position was stored. `BatchPosition(NAME).encode()` is the position before the
        first batch, for a checkpoint of the start; NAME must be new. Raises NotFound if the service does not have
        the rollouts of the position.
        """
        rule = BatchRule(num_groups, over_provision, Carry(carry), max_replaced)
        position = BatchPosition(_new_id()) if resume is None else BatchPosition.decode(resume)
        # One run, so older groups start first.
        options = {"num_samples": num_samples, "run_id": position.name, **options}

        async def submit(part: Sequence[RolloutTask], first: int) -> Rollout:
            return await self.submit(part, part_id=lambda index: f"{position.name}-{first + index}", **options)

        rollout = self._rollout_at(position.parts)
        try:
            batches = batches_of(
                rollout, tasks, rule, submit, acknowledge=acknowledge, position=position, num_samples=num_samples
            )
            async for batch in batches:
                yield batch
        finally:
            if cancel_on_close:
                await self._forget(rollout)

    def rollout(self, position: str) -> Rollout:
        """Return the rollout of an earlier process, after the records that were delivered at `Rollout.position`."""
        try:
            return self._rollout_at(msgspec.json.decode(position, type=list[PartPosition]))
        except msgspec.DecodeError as error:
            raise InvalidRequest(
                f"expected Rollout.position, not {position[:80]!r}: {error}", param="position"
            ) from error

    def _rollout_at(self, positions: Iterable[PartPosition]) -> Rollout:
        rollout = Rollout(self)
        rollout.continue_at(positions)
        return rollout

    async def rollout_status(self, rollout_id: str) -> RolloutStatus:
        """Return the status of a rollout. Raises NotFound."""
        return await self._get(f"/rollouts/{rollout_id}", RolloutStatus)

    async def acknowledge(self, rollout_id: str, cursor: int) -> RolloutStatus:
        """Allow the service to delete the records up to `cursor`, which the caller has stored.

        `cursor` is `Page.cursor` of a `read`. The service's setting `retention` controls the deletion. Raises
        NotFound and Gone.
        """
        body = check_body({"cursor": cursor}, AcknowledgeBody)
        return await self._post(f"/rollouts/{rollout_id}/acknowledge", body, RolloutStatus)

    async def annotate(self, record: Trajectory, name: str, values: AnnotationValues) -> None:
        """Store a trainer's numbers for a record, such as advantages. The viewer shows them.

        `values` is a number, one number per path, or one array per path: empty, or one value per token of the
        path's response. They are stored as 32-bit floats; NaN and infinite values are refused. A record may have
        several annotations of one name; the newest is shown. Raises InvalidRequest for values that do not fit the
        record, NotFound, Gone, and Conflict for a record with 64 annotations.
        """
        await self.annotate_all(name, [(record, values)])

    async def annotate_all(self, name: str, annotated: Iterable[tuple[Trajectory, AnnotationValues]]) -> None:
        """Annotate many records, like `annotate`.

        Each request has up to 512 records of one rollout, and the service stores all of them or none.
        """
        by_rollout = defaultdict[str, list[dict[str, Any]]](list)
        for record, values in annotated:
            annotation = annotation_of(values)
            sample = {
                "group_id": record.group_id,
                "sample_index": record.sample_index,
                "scope": annotation.scope.value,
            }
            by_rollout[record.rollout_id].append(
                {**sample, "values": [each.tolist() for each in annotation.values]}
            )
        for rollout_id, left in by_rollout.items():
            num_sent = 0
            while num_sent < len(left):
                part = _next_part(left, num_sent, MAX_ANNOTATIONS)
                body = check_body({"name": name, "annotations": part}, AnnotateBody)
                await self._post(f"/rollouts/{rollout_id}/annotate", body, RolloutStatus)
                num_sent += len(part)

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        """Cancel the queued and running samples of a rollout. Each still gets a record. Raises NotFound."""
        return await self._post(f"/rollouts/{rollout_id}/cancel", None, RolloutStatus)

    async def read(self, rollout_id: str, *, after: int = 0, limit: int = 64, wait_s: float = 0.0) -> Page:
        """Return finished trajectories after the cursor `after`. Waits up to `wait_s` for one. Raises NotFound."""
        path = f"/rollouts/{rollout_id}/trajectories?after={after}&limit={limit}&wait_s={wait_s:g}"
        page = codec.decode(await self._transport.call("GET", path, accept=codec.MSGPACK, extra_s=wait_s), Page)
        return replace(page, trajectories=tuple(map(as_its_users, page.trajectories)))

    def session(
        self,
        *,
        rollout_id: str = SESSIONS_ROLLOUT_ID,
        group_id: str | None = None,
        task_id: str | None = None,
        sample_index: int = 0,
        session_id: str | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        on_overflow: OnOverflow = "length",
        on_malformed_call: OnMalformedCall = "content",
        task_messages: Iterable[Message] = (),
        weight_version: VersionDemand | None = None,
        adapter: str | None = None,
        credit: Credit = Credit.LINEAGE,
        max_retries: int = 2,
        timeout_s: float = 600.0,
    ) -> AgentSession:
        """Create a recorded session for an agent. Enter it with `async with`; leaving the context finishes it.

        The record is sample `sample_index` of `group_id`, by default of a new group. A session that is not finished
        within `ttl_s` ends with an incomplete record. `max_retries` and `timeout_s` are for its OpenAI client.
        `NewSessionBody` describes `on_overflow`, `on_malformed_call`, `task_messages`, `weight_version`, `adapter`
        and `credit`.
        """
        # The client chooses the id, so that a retried request creates only one session.
        names = {"session_id": session_id or f"s-{uuid.uuid4().hex}", "rollout_id": rollout_id}
        place = {"group_id": group_id, "task_id": task_id, "sample_index": sample_index, "ttl_s": float(ttl_s)}
        demand = None if weight_version is None else codec.to_builtins(weight_version)
        policy = {"on_overflow": on_overflow, "on_malformed_call": on_malformed_call, "weight_version": demand}
        policy |= {"adapter": adapter, "credit": str(credit)}
        messages = [{"role": message.role, "content": message.content} for message in task_messages]
        body = check_body({**names, **place, **policy, "task_messages": messages}, NewSessionBody)
        return AgentSession(self._transport, body, max_retries=max_retries, timeout_s=timeout_s)

    def finished_sessions(
        self,
        rollout_id: str = SESSIONS_ROLLOUT_ID,
        *,
        after: int = 0,
        idle_s: float | None = None,
        acknowledge: bool = False,
    ) -> AsyncIterator[Trajectory]:
        """Iterate over the records of finished sessions in commit order, including future ones.

        Ends after `idle_s` without a new record; None: never. Use `read` instead to get cursors, from which a
        trainer can resume. With `acknowledge`, a page is acknowledged when the caller requests the record after its
        last one.
        """
        return follow(self, rollout_id, after=after, idle_s=idle_s, acknowledge=acknowledge)

    async def update_weights(
        self,
        weights: Weights,
        *,
        version: int,
        kv_policy: KVPolicy | None = None,
        transport: str = "auto",
        dtype: str | None = None,
        timeout_s: float = 900.0,
        all_ranks: bool = True,
        force: bool = False,
        late_grace_s: float = 10.0,
    ) -> UpdateReport:
        """Update all replicas to new weights: named tensors, or a directory at the same path on all hosts.

        Tensors have the checkpoint's names and must not change until this returns. They are sent over `transport`
        (auto, nccl, ipc, shm, tcp); floating-point tensors are cast to `dtype`, by default the dtype in which the
        fleet computes. Under torch.distributed, every rank calls this with its shards or copies and receives the
        same report; with `all_ranks` false, only this process calls it, with complete tensors. A missing receiver
        is left out `late_grace_s` after the last other one arrived.

        With `force`, the version may be lower than the current one (to resume from an older checkpoint), and
        weights that fail the canary check are served. Needs the admin key if keys are set. Raises Conflict,
        CheckpointUnreadable, WeightUpdateFailed and WeightsRefused (the fleet keeps its weights).
        """
        options = PushOptions(version, kv_policy, transport, dtype, timeout_s, all_ranks, force, late_grace_s)
        if not isinstance(weights, str | Path):
            if self._pusher is None:
                self._pusher = open_pusher(self, self._listen_host)
            return await self._pusher.push(weights, options)
        if transport != "auto" or dtype is not None:
            raise InvalidRequest(
                "transport and dtype apply to tensors only: engines read a directory unchanged", param="weights"
            )
        return await self._update({"directory": _absolute(weights)}, options)

    async def update_adapter(
        self,
        directory: str | Path,
        *,
        version: int,
        name: str | None = None,
        kv_policy: KVPolicy | None = None,
        timeout_s: float = 900.0,
        force: bool = False,
    ) -> UpdateReport:
        """Update all replicas to a LoRA adapter (PEFT format) on the base weights, like `update_weights`.

        With a `name`, which requires `max_loras` in the service's config, the adapter is loaded in addition to
        others without a pause, and the version is the adapter's. Raises AdaptersFull while all loaded adapters are
        in use.
        """
        options = PushOptions(version, kv_policy, timeout_s=timeout_s, force=force)
        return await self._update({"adapter": _absolute(directory), "name": name}, options)

    async def unload_adapter(self, name: str, *, timeout_s: float = 900.0) -> None:
        """Unload a named adapter. Raises NotFound, and AdapterInUse while calls or rollouts use it."""
        body = check_body({"lora_name": name}, UnloadAdapterBody)
        await self._transport.call("POST", "/v1/unload_lora_adapter", body=body, is_admin=True, extra_s=timeout_s)

    async def publish(
        self,
        weights: Weights,
        *,
        version: int,
        store: str,
        run: str,
        encoding: str = "xor",
        checksum: str = "xxh3-128",
        full_every: int = 16,
        cache: str | None = None,
        dtype: str | None = None,
    ) -> PublishReport:
        """Publish weights as a version of a run in a store, and notify the service, which follows the store.

        `weights` are complete tensors or a directory, as for `update_weights`; only one process publishes. The
        store is a directory or an fsspec URL. This host keeps the last version in `cache` to compute the next
        delta; every `full_every`-th publication is full. If the notification is lost, the service's next poll finds
        the version. Raises PointerWentBack for a version that is not greater than the last one, LayoutMismatch,
        StoreUnreachable and StoreRefused.
        """
        options = PublishOptions(store, run, encoding, checksum, full_every, cache)
        publisher = await asyncio.to_thread(open_publisher, options)
        report = await run_to_end(asyncio.to_thread(publisher.publish, tensor_bytes(weights, dtype), version))
        try:
            await self._transport.exchange("POST", "/admin/weights/follow", is_admin=True)
        except (AgentLoopError, Retryable) as error:
            _log.warning("store_follower_not_woken", reason=str(error))
        return report

    async def update_from(self, push: PushSource, options: PushOptions) -> UpdateReport:
        """Update all replicas with weights that they fetch from a listening process.

        `update_weights` calls this.
        """
        body = _with_lists(codec.to_builtins(push))
        for name in ("num_receivers", "num_optional", "is_optional"):  # set by the service
            del body[name]
        return await self._update({"push": body}, options)

    async def sleep(self, level: int = 1, *, reason: str = "", timeout_s: float = 900.0) -> None:
        """Freeze all replicas and release their memory: level 1 keeps the weights in host memory, 2 discards them.

        Requests in flight resume after `wake`. The status shows the reason. Idempotent; needs the admin key.
        """
        body = check_body({"level": level, "reason": reason}, SleepBody)
        await self._transport.call("POST", "/admin/sleep", body=body, is_admin=True, extra_s=timeout_s)

    async def wake(self, tags: Iterable[MemoryTag] | None = None, *, timeout_s: float = 900.0) -> None:
        """Allocate released memory again, by default all of it. Generation resumes once all memory is back.

        Idempotent; needs the admin key.
        """
        body = check_body({"tags": None if tags is None else [str(tag) for tag in tags]}, WakeBody)
        await self._transport.call("POST", "/admin/wake", body=body, is_admin=True, extra_s=timeout_s)

    async def pause(self, mode: PauseMode = PauseMode.KEEP, *, reason: str = "", timeout_s: float = 900.0) -> None:
        """Pause generation on all replicas until `resume`. Idempotent; needs the admin key."""
        body = check_body({"mode": mode.value, "reason": reason}, PauseBody)
        await self._transport.call("POST", "/admin/pause", body=body, is_admin=True, extra_s=timeout_s)

    async def resume(self, *, timeout_s: float = 900.0) -> None:
        """End a pause. Idempotent; needs the admin key."""
        await self._transport.call("POST", "/admin/resume", is_admin=True, extra_s=timeout_s)

    async def drain(self, host: str, *, undo: bool = False) -> HostDrain:
        """Stop assigning work to one of several hosts, also across restarts, or undo that.

        `host` is its address. Returns its remaining work. Idempotent; needs the admin key. Raises NotFound and
        Conflict.
        """
        body = check_body({"host": host, "undo": undo}, DrainBody)
        return await self._post("/admin/drain", body, HostDrain, is_admin=True)

    def hold(
        self, replicas: int, *, timeout_s: float = DEFAULT_HOLD_S
    ) -> AbstractAsyncContextManager[HeldReplicas]:
        """Keep `replicas` replicas at the served weight version inside the `async with` block.

        Weight updates skip them, and they catch up afterwards, at the latest after `timeout_s`. Needs the admin
        key. Raises Conflict if too few replicas are ready.
        """
        return held_replicas(self._hold, replicas, timeout_s)

    async def _hold(self, path: str, body: BaseModel) -> ReplicaHold:
        return await self._post(path, body, ReplicaHold, is_admin=True)

    async def status(self) -> ServiceStatus:
        """Return the current status of the service."""
        return await self._get("/status", ServiceStatus)

    async def list_records(self, query: FactsQuery = FactsQuery()) -> FactsPage:  # noqa: B008 - frozen
        """Return a page of facts of the caller's stored records; with the admin key, of all.

        Raises InvalidRequest.
        """
        fields = codec.to_builtins(query)
        parameters = urlencode({name: value for name, value in fields.items() if value is not None})
        return await self._get(f"/trajectories?{parameters}", FactsPage, is_admin=True)

    async def check_precision(self, dtype: str) -> str | None:
        """Compare a trainer's dtype ("bfloat16", "torch.float32") with the engines' dtypes.

        Returns a sentence and logs it as a warning if they differ; None if they do not, or if the engines report no
        dtype. The first push of tensors makes this check automatically.
        """
        gap = precision_gap(await self.status(), dtype)
        if gap is not None:
            _log.warning("precision_differs", reason=gap)
        return gap

    def _warn_of_truncation(self, tasks: Sequence[RolloutTask]) -> None:
        """Warn once about top_p, top_k and min_p: the logprobs then belong to a truncated distribution.

        The trainer can correct this only with the ids that the engines kept (docs/guides/distribution.md).
        """
        cut = next((task for task in tasks if task.top_p < 1 or task.top_k > 0 or task.min_p > 0), None)
        if cut is not None and not self._has_warned_of_truncation:
            self._has_warned_of_truncation = True
            _log.warning(
                "truncated_sampling",
                task=cut.task_id,
                top_p=cut.top_p,
                top_k=cut.top_k,
                min_p=cut.min_p,
                reason="recorded logprobs are normalized over the truncated distribution, so importance ratios "
                "are wrong by the removed probability mass; record the kept ids with engine.sampling_mask_top_k, "
                "or set engine.logprobs_mode to raw or both",
            )

    async def _submit_all(
        self,
        rollout: Rollout,
        tasks: list[dict[str, Any]],
        options: dict[str, Any],
        part_id: Callable[[int], str],
    ) -> None:
        """Submit tasks in as few parts as the service accepts. Each part is a separate rollout of the service."""
        num_sent, size = 0, MAX_TASKS
        while num_sent < max(len(tasks), 1):  # validate an empty list too, which raises
            part = _next_part(tasks, num_sent, size)
            rollout_id = part_id(num_sent)
            checked = check_body({"tasks": part, "rollout_id": rollout_id, **options}, SubmitBody)
            # Register the part first: if the response is lost, `_forget` has to cancel it.
            rollout.expect(rollout_id, len(part), checked.num_samples)
            try:
                await self._transport.call("POST", "/rollouts", body=checked, repeat_overloaded=False)
            except Retryable as failure:
                rollout.drop(rollout_id)
                if size == 1:  # the queue is completely full
                    wait_s = failure.retry_after_s if failure.retry_after_s is not None else _FIRST_WAIT_S
                    await asyncio.sleep(wait_s)
                size = max(1, len(part) // 2)  # a smaller part may fit
            else:
                num_sent, size = num_sent + len(part), min(2 * size, MAX_TASKS)

    async def _update(self, source: dict[str, Any], options: PushOptions) -> UpdateReport:
        kv_policy = None if options.kv_policy is None else options.kv_policy.value
        order = {"version": options.version, "kv_policy": kv_policy, "force": options.force}
        body = check_body({**source, **order}, WeightsBody)
        return await self._post("/admin/weights", body, UpdateReport, is_admin=True, extra_s=options.timeout_s)

    async def _forget(self, rollout: Rollout) -> None:
        """Cancel the accepted parts of a failed submit or of abandoned batches. Best effort."""
        try:
            async with asyncio.timeout(_FORGET_TIMEOUT_S):
                for rollout_id in rollout.rollout_ids:
                    await self._transport.exchange("POST", f"/rollouts/{rollout_id}/cancel")
        except (AgentLoopError, Retryable, TimeoutError) as error:
            _log.info("rollouts_not_cancelled", rollouts=rollout.rollout_ids, reason=str(error))

    async def _get(self, path: str, kind: type[T], *, is_admin: bool = False) -> T:
        return codec.from_builtins(_loads(await self._transport.call("GET", path, is_admin=is_admin)), kind)

    async def _post(
        self, path: str, body: BaseModel | None, kind: type[T], *, is_admin: bool = False, extra_s: float = 0.0
    ) -> T:
        answer = await self._transport.call("POST", path, body=body, is_admin=is_admin, extra_s=extra_s)
        return codec.from_builtins(_loads(answer), kind)


def _new_id() -> str:
    return f"r-{uuid.uuid4().hex[:16]}"


def _next_part(items: list[dict[str, Any]], start: int, max_items: int) -> list[dict[str, Any]]:
    """Return the next items that fit into one request, at least one."""
    num_bytes, end = 0, start
    while end < min(len(items), start + max_items):
        num_bytes += len(orjson.dumps(items[end]))
        if num_bytes > _MAX_PART_BYTES and end > start:
            break
        end += 1
    return items[start:end]


def _score_parts(token_ids: list[int], start: int, top_k: int) -> list[dict[str, Any]]:
    """Split the scores of a sequence into parts that an answer may have; each part repeats the ids before it."""
    num_each = max(1, MAX_SCORES // (1 + top_k))
    starts = range(start, len(token_ids), num_each) if start >= 1 else [start]  # the body's check refuses others
    return [{"token_ids": token_ids[: first + num_each], "start": first} for first in starts or [start]]


def _joined_scores(parts: Sequence[TokenScores]) -> TokenScores | None:
    """Return the parts of a sequence as one; None if they have different weight versions."""
    first = parts[0]
    if any(part.weight_version != first.weight_version for part in parts):
        return None
    return replace(
        first,
        token_ids=tuple(one for part in parts for one in part.token_ids),
        logprobs=tuple(one for part in parts for one in part.logprobs),
        top_logprobs=tuple(one for part in parts for one in part.top_logprobs),
    )


def _next_scores(prompts: Sequence[dict[str, Any]], begin: int, top_k: int) -> Sequence[dict[str, Any]]:
    """Return the next sequences whose scores fit into one response, at least one."""
    num_scores, end = 0, begin
    while end < min(len(prompts), begin + MAX_SCORED_PROMPTS):
        num_scores += (len(prompts[end]["token_ids"]) - prompts[end]["start"]) * (1 + top_k)
        if num_scores > MAX_SCORES and end > begin:
            break
        end += 1
    return prompts[begin:end]


def _staleness_fields(
    max_staleness: int | None, on_stale: OnStale, trajectories_per_version: int | None
) -> dict[str, Any]:
    """Return the fields of a submission's staleness limit; empty without one."""
    if max_staleness is None and trajectories_per_version is None:
        return {}
    per_version = {"trajectories_per_version": trajectories_per_version}
    return {"max_staleness": max_staleness, "on_stale": on_stale.value, **per_version}


def _with_lists(value: Any) -> Any:
    # The strict bodies accept lists, but no tuples.
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _absolute(directory: str | Path) -> str:
    return os.path.abspath(directory)


def _loads(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise AgentLoopError("the response is not JSON: check that the URL is an agentloop service") from error
