"""The client SDK: everything a trainer asks of the service, over HTTP.

Every call repeats what can succeed later (`transport.py`). That is safe because each is keyed or idempotent; a
repeated `generate` samples anew. Errors are those of `errors.py`, as the service raised them.

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
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import orjson
import structlog
from pydantic import BaseModel

from agentloop.api.annotations import AnnotationValues, annotation_of
from agentloop.api.coordinator import (
    HostDrain,
    Page,
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
from agentloop.client.batches import Batch, BatchRule, Carry, batches_of
from agentloop.client.publish import PublishOptions, PublishReport, open_publisher, tensor_bytes
from agentloop.client.push import Pusher, PushOptions, Weights, open_pusher, precision_gap
from agentloop.client.rollout import Rollout, follow
from agentloop.client.session import AgentSession
from agentloop.client.transport import Retryable, Transport
from agentloop.concurrency.aio import run_to_end
from agentloop.engine.interface import MemoryTag, PushSource
from agentloop.errors import AgentLoopError, DeadlineExceeded, InvalidRequest, NotFound
from agentloop.types import (
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
_MAX_PART_BYTES = 8 << 20  # of one submit; the service takes 32 MiB


class RolloutClient:
    """A connection to one service, for any number of concurrent calls. Use as an async context manager.

    `timeout_s` bounds each HTTP exchange beyond the time that the call itself asks for; `retry_timeout_s` is the
    budget of repeats for each call. Engines fetch pushed tensors from `listen_host`: by default 127.0.0.1 if the
    service's URL is a loopback address, else this machine's address on the route to it.
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
        user_key = api_key if api_key is not None else admin_key  # the admin key opens every route
        self._transport = Transport(url, user_key, admin_key, timeout_s, retry_timeout_s)
        self._listen_host = listen_host
        self._pusher: Pusher | None = None  # made by the first push
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
        """Return what live trajectories and sessions do, with rows of the `limit` oldest. Needs the admin key."""
        return await self._get(f"/flight?limit={limit}", FlightPage, is_admin=True)

    async def history(self, *metrics: str, since: float = 0.0) -> HistoryPage:
        """Return the last quarter of an hour, a row a second, from `since` on (seconds since 1970): the series of
        these names, or all that are kept (`agentloop.api.history.HISTORY_FAMILIES`). Needs the admin key."""
        query = urlencode([("since", since), *(("metric", name) for name in metrics)])
        return await self._get(f"/history?{query}", HistoryPage, is_admin=True)

    async def why(self, trajectory: str | None = None) -> tuple[Finding, ...]:
        """Return why nothing moves, or why it is slow, the most decisive finding first. Needs the admin key.

        `trajectory` is an id as `flight` has it: what that one waits for comes first. Raises NotFound.
        """
        query = "" if trajectory is None else urlencode({"trajectory": trajectory})
        return tuple(await self._get(f"/why?{query}", list[Finding], is_admin=True))

    async def wait_until_ready(self, timeout_s: float = 300.0) -> None:
        """Return once a replica takes traffic. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._transport.exchange("GET", "/health")
                    except (Retryable, NotFound):  # a proxy before it may say 404
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
        except (AgentLoopError, TimeoutError):  # it is not there, or says it to an admin alone
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
        """Sample a continuation of exactly these ids. A `model` is an adapter, or one beside the policy.

        Raises ContextLengthExceeded, Overloaded and others, NotFound for an unknown model, and
        WeightVersionNotServed for a demand that the service does not meet in its time.
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
        """Return the logprobs of each sequence's own ids from `start` on, under the served weights.

        `start`, one for all or one for each, is at least 1: a sequence's first token has no logprob. `model` is as
        in `generate`. Raises what that raises.
        """
        starts = [start] * len(batch) if isinstance(start, int) else start
        if len(starts) != len(batch):
            raise InvalidRequest(f"{len(starts)} starts for {len(batch)} sequences", param="start")
        prompts = [{"token_ids": list(ids), "start": first} for ids, first in zip(batch, starts, strict=True)]
        demand = None if weight_version is None else codec.to_builtins(weight_version)
        options = {"top_k": top_k, "timeout_s": timeout_s, "weight_version": demand, "model": model}
        found = list[TokenScores]()
        while len(found) < len(batch):
            part = _next_scores(prompts, len(found), top_k)
            body = check_body({"prompts": part, **options}, TokenScoreBody)
            found += await self._post("/score", body, list[TokenScores], extra_s=timeout_s)
        return found

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
        timeout_s: float = 3600.0,
    ) -> Rollout:
        """Submit tasks, each sampled `num_samples` times; returns once the service holds all of them durably.

        `max_staleness` is the number of weight versions by which a trajectory's tokens may be old; 0 is on-policy.
        `on_stale` says what happens beyond it: by default the tokens that are too old leave the mask. With
        `trajectories_per_version`, the number that the trainer consumes for each new version, trajectories start
        only as far ahead as that allows; submits of one `run_id` count together.
        What waits for a version stays in the service's queue: do not await a submit that the queue cannot hold
        before you train.

        With `keep`, the first `keep` complete samples of each task make its group, and the rest of `num_samples` is
        cancelled: the longest need not end. Every sample still has its record; those of the rest are CANCELLED
        and not complete, and a group never has more complete ones than it keeps.

        Of a higher `priority` everything goes out first: an evaluation overtakes training. Runs of one priority
        have the service's places by their `share`; no more than `max_running` trajectories of a run live at a time.
        Without these, and without a name, the work of one key starts in the order of its submits. With an
        `adapter` all turns are sampled under it, and weight versions are its versions.

        Where the service's queue is full this waits, in ever smaller parts, up to `timeout_s` (DeadlineExceeded).
        What was accepted of a submit that fails is cancelled. Raises InvalidRequest for a task that cannot be.
        """
        self._warn_of_truncation(tasks)
        bodies = [_with_lists(task_fields(task)) for task in tasks]
        has_limit = max_staleness is not None or trajectories_per_version is not None
        if has_limit or max_running is not None or share != 1.0:
            run_id = run_id or _new_id()  # its parts count together
        options: dict[str, Any] = {"num_samples": num_samples, "keep": keep, "run_id": run_id, "priority": priority}
        options |= {"share": float(share), "max_running": max_running, "adapter": adapter}
        if has_limit:
            options |= {"max_staleness": max_staleness, "on_stale": on_stale.value}
            options |= {"trajectories_per_version": trajectories_per_version}
        rollout = Rollout(self)
        try:
            async with asyncio.timeout(timeout_s):
                await self._submit_all(rollout, bodies, options)
        except TimeoutError as error:
            await self._forget(rollout)
            raise DeadlineExceeded(f"the service did not take all tasks within {timeout_s:g} s") from error
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
        acknowledge: bool = False,
        **options: Any,
    ) -> AsyncGenerator[Batch, None]:
        """Yield batches of the `num_groups` groups that are whole first, until all `tasks` have ended.

        Each batch begins with `num_groups * over_provision` groups unfinished: those that the one before has left,
        which go first, and new ones. With `carry` "next" the unfinished ones run on while the caller trains; with
        "cancel" they end, and are in no batch. `tasks` may be endless: no more are read than are offered. Short
        groups are whole first: watch `Batch.ages` and `carried_share`. `options` are those of `submit`, whose
        `max_staleness` and `on_stale` bound what runs on; with `num_samples` 1, trajectories are counted.

        With `acknowledge` the service may delete a batch's records once the next one is asked for. What is
        unfinished when the iteration is closed is cancelled. Raises as `submit`.
        """
        rule = BatchRule(num_groups, over_provision, Carry(carry))
        options = {"num_samples": num_samples, "run_id": _new_id(), **options}  # one run: an older group goes first

        async def submit(part: Sequence[RolloutTask]) -> Rollout:
            return await self.submit(part, **options)

        rollout = Rollout(self)
        try:
            async for batch in batches_of(rollout, tasks, rule, submit, acknowledge=acknowledge):
                yield batch
        finally:
            await self._forget(rollout)

    async def rollout_status(self, rollout_id: str) -> RolloutStatus:
        """A rollout's counts. Raises NotFound."""
        return await self._get(f"/rollouts/{rollout_id}", RolloutStatus)

    async def acknowledge(self, rollout_id: str, cursor: int) -> RolloutStatus:
        """Say that the records up to `cursor` are kept elsewhere: the service may delete them.

        A cursor is what `read` gave with them. Whether anything is deleted is the service's setting `retention`.
        Raises NotFound, Gone.
        """
        body = check_body({"cursor": cursor}, AcknowledgeBody)
        return await self._post(f"/rollouts/{rollout_id}/acknowledge", body, RolloutStatus)

    async def annotate(self, record: Trajectory, name: str, values: AnnotationValues) -> None:
        """Store a trainer's numbers beside a record, such as its advantage; the viewer shows them.

        `values` are a number; a number for each path; or for each path an array with a number for each token of its
        response, or empty. They are stored as 32-bit floats; NaN and infinite ones are refused. A later annotation
        of a name is added, and the newest is shown. Raises InvalidRequest for values that do not fit the record,
        NotFound, Gone, and Conflict for a record with 64 annotations.
        """
        await self.annotate_all(name, [(record, values)])

    async def annotate_all(self, name: str, annotated: Iterable[tuple[Trajectory, AnnotationValues]]) -> None:
        """As `annotate`, for many records: up to 512 of a rollout in one call, which stores all of its or none."""
        by_rollout = defaultdict[str, list[dict[str, Any]]](list)
        for record, values in annotated:
            made = annotation_of(values)
            place = {"group_id": record.group_id, "sample_index": record.sample_index, "scope": made.scope.value}
            by_rollout[record.rollout_id].append({**place, "values": [one.tolist() for one in made.values]})
        for rollout_id, left in by_rollout.items():
            num_sent = 0
            while num_sent < len(left):
                part = _next_part(left, num_sent, MAX_ANNOTATIONS)
                body = check_body({"name": name, "annotations": part}, AnnotateBody)
                await self._post(f"/rollouts/{rollout_id}/annotate", body, RolloutStatus)
                num_sent += len(part)

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        """End what is queued or running; each sample still gets its record. Raises NotFound."""
        return await self._post(f"/rollouts/{rollout_id}/cancel", None, RolloutStatus)

    async def read(self, rollout_id: str, *, after: int = 0, limit: int = 64, wait_s: float = 0.0) -> Page:
        """Finished trajectories after a cursor; waits up to `wait_s` for the first. Raises NotFound."""
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
        max_retries: int = 2,
        timeout_s: float = 600.0,
    ) -> AgentSession:
        """A recorded session for an agent, to be entered with `async with`; leaving it finishes it.

        The record is sample `sample_index` of `group_id`, by default of a group of its own. A session that is not
        finishes within `ttl_s` ends as an incomplete record. `max_retries`, `timeout_s`: of its OpenAI client.
        `on_overflow`, `on_malformed_call`, `task_messages`, `weight_version`, `adapter`: as `NewSessionBody` says.
        """
        names = {"session_id": session_id or f"s-{uuid.uuid4().hex}", "rollout_id": rollout_id}
        place = {"group_id": group_id, "task_id": task_id, "sample_index": sample_index, "ttl_s": float(ttl_s)}
        demand = None if weight_version is None else codec.to_builtins(weight_version)
        policy = {"on_overflow": on_overflow, "on_malformed_call": on_malformed_call, "weight_version": demand}
        policy |= {"adapter": adapter}
        said = [{"role": message.role, "content": message.content} for message in task_messages]
        body = check_body({**names, **place, **policy, "task_messages": said}, NewSessionBody)
        return AgentSession(self._transport, body, max_retries=max_retries, timeout_s=timeout_s)

    def finished_sessions(
        self,
        rollout_id: str = SESSIONS_ROLLOUT_ID,
        *,
        after: int = 0,
        idle_s: float | None = None,
        acknowledge: bool = False,
    ) -> AsyncIterator[Trajectory]:
        """The records of finished sessions in commit order, also those still to come; the trainer's side.

        Ends once nothing new came for `idle_s`; None: never. `read` gives the same records with their cursors, so
        that a trainer can go on where it stopped. With `acknowledge` each page is acknowledged once its last record
        was handled, which asking for the next one says.
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
        """Bring every replica to new weights: named tensors, or a directory that the service sees at the same path.

        Tensors have the checkpoint's names, and must not change until this returns. They go over `transport` (auto,
        nccl, ipc, shm, tcp); floating-point ones as `dtype`, by default the one that the fleet computes in. Under
        torch.distributed every rank calls this alike, with its shards or copies, and gets the same report; with
        `all_ranks` false this process alone calls, and has all tensors whole. A receiver that is dead, hung or late
        is left out `late_grace_s` after the others are there.

        With `force` the version need not grow: a trainer goes on from an older checkpoint; and weights that make
        the model noise are served all the same. Needs the admin key where keys are set. Raises Conflict,
        CheckpointUnreadable, WeightUpdateFailed or WeightsRefused (the fleet then serves what it served).
        """
        options = PushOptions(version, kv_policy, transport, dtype, timeout_s, all_ranks, force, late_grace_s)
        if not isinstance(weights, str | Path):
            if self._pusher is None:
                self._pusher = open_pusher(self, self._listen_host)
            return await self._pusher.push(weights, options)
        if transport != "auto" or dtype is not None:
            raise InvalidRequest("a directory is read as it is: it has no transport and no dtype", param="weights")
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
        """Bring every replica to a LoRA adapter (PEFT format) over the base weights; else as `update_weights`.

        With a `name`, in a service with `max_loras`, the adapter is loaded beside others, nothing pauses, and the
        version is that name's. Raises AdaptersFull while every place has an adapter in use.
        """
        options = PushOptions(version, kv_policy, timeout_s=timeout_s, force=force)
        return await self._update({"adapter": _absolute(directory), "name": name}, options)

    async def unload_adapter(self, name: str, *, timeout_s: float = 900.0) -> None:
        """Serve an adapter no more. Raises NotFound, and AdapterInUse while calls or rollouts are under it."""
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
        """Publish weights as a version of a run in a store, and wake the service, which follows it by itself.

        Whole tensors, or a directory, as `update_weights` takes them; one process publishes. The store is a
        directory or a URL of fsspec's. The last version is kept on this host, in `cache`, for the next delta; every
        `full_every`th publication is full. Raises PointerWentBack for a version that is not beyond the last one,
        LayoutMismatch, StoreUnreachable, StoreRefused. A service that does not answer is no error: it polls.
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
        """Have every replica fetch its weights from a process that listens. `update_weights` does all of it."""
        body = _with_lists(codec.to_builtins(push))
        for name in ("num_receivers", "num_optional", "is_optional"):  # the service counts
            del body[name]
        return await self._update({"push": body}, options)

    async def sleep(self, level: int = 1, *, reason: str = "", timeout_s: float = 900.0) -> None:
        """Freeze every replica and give its memory back: level 1 keeps the weights in host memory, 2 discards them.

        Idempotent; needs the admin key. Requests in flight go on after `wake`. The status shows the reason.
        """
        body = check_body({"level": level, "reason": reason}, SleepBody)
        await self._transport.call("POST", "/admin/sleep", body=body, is_admin=True, extra_s=timeout_s)

    async def wake(self, tags: Iterable[MemoryTag] | None = None, *, timeout_s: float = 900.0) -> None:
        """Take memory back, by default all; generation goes on once all is. Idempotent; needs the admin key."""
        body = check_body({"tags": None if tags is None else [str(tag) for tag in tags]}, WakeBody)
        await self._transport.call("POST", "/admin/wake", body=body, is_admin=True, extra_s=timeout_s)

    async def pause(self, mode: PauseMode = PauseMode.KEEP, *, reason: str = "", timeout_s: float = 900.0) -> None:
        """Pause generation on every replica until `resume`. Idempotent; needs the admin key."""
        body = check_body({"mode": mode.value, "reason": reason}, PauseBody)
        await self._transport.call("POST", "/admin/pause", body=body, is_admin=True, extra_s=timeout_s)

    async def resume(self, *, timeout_s: float = 900.0) -> None:
        """Undo a pause. Idempotent; needs the admin key."""
        await self._transport.call("POST", "/admin/resume", is_admin=True, extra_s=timeout_s)

    async def drain(self, host: str, *, undo: bool = False) -> HostDrain:
        """Give a host of several no more work, over restarts too, or end that. Returns what it still has.

        `host` is its address. Idempotent; needs the admin key. Raises NotFound, Conflict.
        """
        body = check_body({"host": host, "undo": undo}, DrainBody)
        return await self._post("/admin/drain", body, HostDrain, is_admin=True)

    async def status(self) -> ServiceStatus:
        """The service at this moment."""
        return await self._get("/status", ServiceStatus)

    async def list_records(self, query: FactsQuery = FactsQuery()) -> FactsPage:  # noqa: B008 - frozen
        """A page of the facts of stored records: the caller's, or with the admin key all. Raises InvalidRequest."""
        parameters = urlencode({name: one for name, one in codec.to_builtins(query).items() if one is not None})
        return await self._get(f"/trajectories?{parameters}", FactsPage, is_admin=True)

    async def check_precision(self, dtype: str) -> str | None:
        """Compare the type that a trainer computes in ("bfloat16", "torch.float32") with the engines'.

        Returns a sentence, which is logged as a warning too, where they differ; None where they do not, or do not
        say. A push of tensors compares by itself, the first time.
        """
        gap = precision_gap(await self.status(), dtype)
        if gap is not None:
            _log.warning("precision_differs", reason=gap)
        return gap

    def _warn_of_truncation(self, tasks: Sequence[RolloutTask]) -> None:
        """Say once that truncated sampling bends the ratio: no engine returns the ids that it kept."""
        cut = next((task for task in tasks if task.top_p < 1 or task.top_k > 0 or task.min_p > 0), None)
        if cut is not None and not self._has_warned_of_truncation:
            self._has_warned_of_truncation = True
            _log.warning(
                "truncated_sampling",
                task=cut.task_id,
                top_p=cut.top_p,
                top_k=cut.top_k,
                min_p=cut.min_p,
                reason="recorded logprobs are renormalised over the ids that the engine kept: a ratio to your "
                "softmax is wrong by the mass that was cut, unless the service's logprobs_mode is raw or both",
            )

    async def _submit_all(self, rollout: Rollout, tasks: list[dict[str, Any]], options: dict[str, Any]) -> None:
        """Submit tasks in as few parts as the service takes; each part is a rollout of its own there."""
        num_sent, size = 0, MAX_TASKS
        while num_sent < max(len(tasks), 1):  # without tasks: once, for the refusal
            part = _next_part(tasks, num_sent, size)
            rollout_id = _new_id()
            checked = check_body({"tasks": part, "rollout_id": rollout_id, **options}, SubmitBody)
            rollout.expect(rollout_id, len(part), checked.num_samples)
            try:
                await self._transport.call("POST", "/rollouts", body=checked, repeat_overloaded=False)
            except Retryable as full:
                rollout.drop(rollout_id)
                if size == 1:  # no room at all
                    await asyncio.sleep(full.retry_after_s if full.retry_after_s is not None else _FIRST_WAIT_S)
                size = max(1, len(part) // 2)
            else:
                num_sent, size = num_sent + len(part), min(2 * size, MAX_TASKS)

    async def _update(self, source: dict[str, Any], options: PushOptions) -> UpdateReport:
        kv_policy = None if options.kv_policy is None else options.kv_policy.value
        order = {"version": options.version, "kv_policy": kv_policy, "force": options.force}
        body = check_body({**source, **order}, WeightsBody)
        return await self._post("/admin/weights", body, UpdateReport, is_admin=True, extra_s=options.timeout_s)

    async def _forget(self, rollout: Rollout) -> None:
        """Cancel what was accepted, of a submit that failed or batches that were left. Best effort."""
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
    """The next items that fit one request: at least one, whatever its size."""
    num_bytes, end = 0, start
    while end < min(len(items), start + max_items):
        num_bytes += len(orjson.dumps(items[end]))
        if num_bytes > _MAX_PART_BYTES and end > start:
            break
        end += 1
    return items[start:end]


def _next_scores(prompts: Sequence[dict[str, Any]], begin: int, top_k: int) -> Sequence[dict[str, Any]]:
    """Return the next sequences whose scores fit one answer: at least one, however long it is."""
    num_scores, end = 0, begin
    while end < min(len(prompts), begin + MAX_SCORED_PROMPTS):
        num_scores += len(prompts[end]["token_ids"]) * (1 + top_k)
        if num_scores > MAX_SCORES and end > begin:
            break
        end += 1
    return prompts[begin:end]


def _with_lists(value: Any) -> Any:
    """The value as a JSON parser would give it: the strict bodies take no tuples."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _absolute(directory: str | Path) -> str:
    return os.path.abspath(directory)


def _loads(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise AgentLoopError("the answer is not JSON: is this an agentloop service?") from error
