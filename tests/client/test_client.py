"""The client against the real HTTP app on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from agentloop.api.facts import FactsQuery, ListOrder
from agentloop.client.client import RolloutClient
from agentloop.client.push import PushOptions
from agentloop.client.rollout import Rollout
from agentloop.engine.interface import MemoryTag, PushSource, TensorInfo, WeightUpdate
from agentloop.errors import (
    AgentLoopError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineLost,
    Forbidden,
    InvalidRequest,
    NoHealthyReplica,
    NotFound,
    Overloaded,
    ServiceUnavailable,
    Unauthorized,
)
from agentloop.types import FinishReason, KVPolicy, Message, OnStale, PauseMode, RolloutTask, StalenessLimit
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.app import create_app
from tests.support.endpoint.front_door import cutting_proxy, serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.records.samples import make_task


@dataclass
class Service:
    url: str
    coordinator: FakeCoordinator
    engine: ReversingEngine
    root: Path


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    coordinator, engine = FakeCoordinator(), ReversingEngine()
    async with serving(create_app(coordinator, engine.connect, Keys(), weight_roots=[tmp_path])) as url:
        yield Service(url, coordinator, engine, tmp_path)


def client_of(service: Service, retry_timeout_s: float = 30.0) -> RolloutClient:
    return RolloutClient(service.url, retry_timeout_s=retry_timeout_s)


def tasks_of(count: int) -> list[RolloutTask]:
    return [make_task(f"t{index}") for index in range(count)]


async def test_ten_lines_are_enough_for_a_trainer(service: Service) -> None:
    async with RolloutClient(service.url) as client:
        await client.wait_until_ready(30)
        rollout = await client.submit(tasks_of(3), num_samples=2)
        rewards = [trajectory.reward async for trajectory in rollout]
        report = await client.update_weights(service.root, version=1)
    assert rewards == [1.0] * 6
    assert (report.version, report.kv_policy, report.stall_ms) == (1, KVPolicy.RECOMPUTE, 20.0)


async def test_generate_gives_ids_logprobs_and_spans(service: Service) -> None:
    async with client_of(service) as client:
        generation = await client.generate([1, 2, 3], max_tokens=2, temperature=0.0, seed=0, stop_token_ids=(9,))
    assert (generation.token_ids, generation.finish_reason) == ((3, 2), FinishReason.LENGTH)
    assert len(generation.logprobs) == 2
    [(_, request)] = service.engine.requests
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.stop_token_ids) == (0.0, 0, (9,))


async def test_every_trajectory_comes_once_though_connections_are_cut(service: Service) -> None:
    async with (
        cutting_proxy(service.url, lambda n: n % 3 != 0) as url,
        RolloutClient(url, retry_timeout_s=60.0) as client,
    ):
        rollout = await client.submit(tasks_of(40), num_samples=4)
        keys = [(t.group_id, t.sample_index) async for t in rollout]
    assert len(keys) == len(set(keys)) == 160
    # The submit whose answer was lost was retried and counted once.
    assert sum(map(len, service.coordinator.groups.values())) == 40


async def test_iteration_waits_for_work_in_progress_and_goes_on_where_it_was_left(service: Service) -> None:
    service.coordinator.is_holding = True
    async with client_of(service) as client:
        rollout = await client.submit(tasks_of(2), num_samples=3)
        reading = asyncio.create_task(anext(aiter(rollout)))
        await asyncio.sleep(0.1)
        assert not reading.done()
        service.coordinator.finish_held(*rollout.rollout_ids)
        async with asyncio.timeout(20):
            first = await reading
            rest = [trajectory async for trajectory in rollout]
            assert [trajectory async for trajectory in rollout] == []
        assert len({(t.group_id, t.sample_index) for t in [first, *rest]}) == 6
        assert (await rollout.status()).is_done


async def test_a_deleted_record_ends_the_iteration_all_the_same(service: Service) -> None:
    async with client_of(service) as client:
        rollout = await client.submit(tasks_of(1), num_samples=3)
        [rollout_id] = rollout.rollout_ids
        service.coordinator.finished[rollout_id].pop(1)
        service.coordinator.groups[rollout_id].clear()  # the rollout is done with one record less than accepted
        async with asyncio.timeout(20):
            assert len([trajectory async for trajectory in rollout]) == 2


async def test_a_full_queue_is_fed_in_pieces(service: Service) -> None:
    service.coordinator.num_queue_groups = 10
    async with client_of(service) as client:
        rollout = await client.submit(tasks_of(25), num_samples=2)
        assert rollout.num_trajectories == 50
        assert len([trajectory async for trajectory in rollout]) == 50
        status = await rollout.status()
    groups = [group for part in service.coordinator.groups.values() for group in part.values()]
    assert [group.task.task_id for group in groups] == [f"t{index}" for index in range(25)]
    assert len(rollout.rollout_ids) > 2
    assert (status.num_accepted, status.num_finished) == (50, 50)


async def test_the_pieces_of_a_submit_share_one_staleness_limit(service: Service) -> None:
    service.coordinator.num_queue_groups = 10
    async with client_of(service) as client:
        limit = {"max_staleness": 0, "on_stale": OnStale.DROP, "trajectories_per_version": 4}
        rollout = await client.submit(tasks_of(25), **limit)  # type: ignore[arg-type]
        await client.submit(tasks_of(1), max_staleness=2, run_id="run")
        await client.submit(tasks_of(1))
        with pytest.raises(InvalidRequest, match="requires max_staleness"):
            await client.submit(tasks_of(1), trajectories_per_version=4)
    assert len(rollout.rollout_ids) > 2
    groups = [group for part in service.coordinator.groups.values() for group in part.values()]
    (shared,) = {group.staleness for group in groups[:25]}
    assert shared is not None
    assert shared == StalenessLimit(0, OnStale.DROP, 4, shared.run_id)
    assert shared.run_id
    assert [group.staleness for group in groups[25:]] == [StalenessLimit(2, run_id="run"), None]


async def test_no_part_waits_for_another(service: Service) -> None:
    service.coordinator.num_queue_groups = 2
    service.coordinator.is_holding = True
    async with client_of(service) as client:
        rollout = await client.submit(tasks_of(4))
        first, *others = rollout.rollout_ids
        for rollout_id in others:
            service.coordinator.finish_held(rollout_id)
        async with asyncio.timeout(20):
            trajectories = aiter(rollout)
            early = [
                await anext(trajectories)
                for _ in range(rollout.num_trajectories - len(service.coordinator.groups[first]))
            ]
            service.coordinator.finish_held(first)
            late = [trajectory async for trajectory in trajectories]
    assert {t.rollout_id for t in early} == set(others)
    assert {t.rollout_id for t in late} == {first}


async def test_a_submit_of_many_bytes_is_sent_in_pieces(service: Service) -> None:
    tasks = [RolloutTask(f"t{index}", (Message("user", "x" * 1_000_000),)) for index in range(40)]  # over 32 MiB
    async with client_of(service) as client:
        rollout = await client.submit(tasks)
        assert len([trajectory async for trajectory in rollout]) == 40


async def test_a_submit_that_never_fits_ends_and_is_cancelled(service: Service) -> None:
    service.coordinator.num_queue_groups = 0
    async with client_of(service) as client:
        with pytest.raises(DeadlineExceeded):
            await client.submit(tasks_of(3), timeout_s=0.5)
    service.coordinator.num_queue_groups = 8000
    async with client_of(service) as client:
        with pytest.raises(InvalidRequest, match=r"messages"):
            await client.submit([*tasks_of(4100), RolloutTask("bad", ())])
    assert service.coordinator.is_cancelled


async def test_overload_is_repeated_until_it_passes_or_the_budget_is_spent(service: Service) -> None:
    async with client_of(service) as client:
        service.coordinator.next_errors = [Overloaded("busy"), NoHealthyReplica("none")]
        assert (await client.generate([1], max_tokens=1)).token_ids == (1,)
        assert service.coordinator.num_leased == 1
    async with client_of(service, retry_timeout_s=0.2) as client:
        service.coordinator.next_errors = [Overloaded("busy")] * 100
        with pytest.raises(Overloaded, match="busy"):
            await client.generate([1], max_tokens=1)
        assert len(service.coordinator.next_errors) >= 98  # Retry-After is longer than the time budget


async def test_errors_arrive_as_their_own_class(service: Service) -> None:
    async with client_of(service, retry_timeout_s=0.1) as client:
        service.engine.errors = [ContextLengthExceeded("too long", param="token_ids")]
        with pytest.raises(ContextLengthExceeded, match="too long") as caught:
            await client.generate([1], max_tokens=1)
        assert caught.value.param == "token_ids"
        service.engine.errors = [EngineLost("gone"), EngineLost("gone")]
        with pytest.raises(EngineLost):
            await client.generate([1], max_tokens=1)
        with pytest.raises(NotFound):
            await client.cancel("unknown")
        with pytest.raises(InvalidRequest):
            await client.update_weights("/", version=1)
        service.coordinator.next_errors = [ValueError("a bug")]
        with pytest.raises(AgentLoopError, match="internal error"):
            await client.status()


async def test_what_cannot_be_sent_is_refused_here(service: Service) -> None:
    async with client_of(service) as client:
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await client.generate([1], max_tokens=0)
        with pytest.raises(InvalidRequest, match="token_ids"):
            await client.generate([-1], max_tokens=1)
        with pytest.raises(InvalidRequest, match="tasks"):
            await client.submit([])
        with pytest.raises(InvalidRequest, match="reference"):
            await client.submit([RolloutTask("t", (Message("user", "x"),), reference=float("nan"))])
    assert service.coordinator.submitted == []
    with pytest.raises(InvalidRequest, match="context manager"):
        await client.status()


async def test_pause_resume_status_and_cancel(service: Service) -> None:
    async with client_of(service) as client:
        await client.pause(PauseMode.WAIT)
        assert service.coordinator.paused is PauseMode.WAIT
        assert (await client.status()).is_paused
        await client.resume()
        rollout = await client.submit(tasks_of(1))
        assert (await rollout.cancel()).rollout_id == rollout.rollout_ids[0]
        [status] = (await client.status()).rollouts
        assert (status.num_accepted, status.num_finished) == (1, 1)


async def test_records_are_listed(service: Service) -> None:
    query = FactsQuery(ListOrder.BEST, failed=True, task="t & u", text="50%", limit=3, cursor="[1.5,2]", min_s=0.5)
    async with client_of(service) as client:
        page = await client.list_records(query)
        await client.list_records()
    assert service.coordinator.listed == [query, FactsQuery()]
    assert (page.records[0].seq, page.records[0].reward, page.totals[0].num_records) == (7, 0.5, 1)


async def test_adapters_sleep_and_wake(service: Service) -> None:
    async with client_of(service) as client:
        report = await client.update_adapter(service.root, version=4, kv_policy=KVPolicy.KEEP)
        assert (report.version, report.kv_policy) == (4, KVPolicy.KEEP)
        assert service.coordinator.updates[0][0].adapter == str(service.root)
        await client.sleep(2)
        assert (await client.status()).asleep == (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
        await client.wake([MemoryTag.WEIGHTS])
        assert (await client.status()).asleep == (MemoryTag.KV_CACHE,)
        await client.wake()
        assert (await client.status()).asleep == ()
        with pytest.raises(InvalidRequest, match="level"):
            await client.sleep(3)


async def test_a_process_that_listens_is_announced(service: Service) -> None:
    source = PushSource(("127.0.0.1:5000",), "t", (TensorInfo("w", "float32", (2,)),))
    async with client_of(service) as client:
        assert (await client.update_from(source, PushOptions(5))).version == 5
    assert service.coordinator.updates == [(WeightUpdate(5, push=source), None)]


async def test_a_directory_has_no_transport(service: Service) -> None:
    async with client_of(service) as client:
        for options in ({"transport": "nccl"}, {"dtype": "bfloat16"}):
            with pytest.raises(InvalidRequest, match="read a directory unchanged"):
                await client.update_weights(service.root, version=1, **options)
        with pytest.raises(InvalidRequest, match="unknown transport"):
            await client.update_weights({}, version=1, transport="pigeon")


async def test_keys_are_sent_where_they_belong(tmp_path: Path) -> None:
    coordinator, engine = FakeCoordinator(), ReversingEngine()
    app = create_app(coordinator, engine.connect, Keys.of(["user"], "admin"), weight_roots=[tmp_path])
    async with serving(app) as url:
        async with RolloutClient(url, api_key="user", admin_key="admin") as client:
            await client.status()
            await client.update_weights(tmp_path, version=2)
        async with RolloutClient(url, api_key="user") as client:
            with pytest.raises(Forbidden):
                await client.resume()
        async with RolloutClient(url, api_key="wrong") as client:
            with pytest.raises(Unauthorized):
                await client.status()


async def test_a_service_that_is_not_there_or_not_ready(service: Service) -> None:
    async with RolloutClient("http://127.0.0.1:9", retry_timeout_s=0.3) as client:
        with pytest.raises(ServiceUnavailable, match="no response"):
            await client.status()
        rollout = Rollout(client)
        rollout.expect("r1", num_groups=1, num_samples=2)
        with pytest.raises(ServiceUnavailable, match=r"iterate this rollout again.*client\.read\('r1', after=0\)"):
            await anext(aiter(rollout))
    service.coordinator.is_ready = False
    async with client_of(service) as client:
        with pytest.raises(DeadlineExceeded):
            await client.wait_until_ready(0.3)
        waiting = asyncio.create_task(client.wait_until_ready(20))
        await asyncio.sleep(0.05)
        service.coordinator.is_ready = True
        await waiting


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (500, "Internal Server Error", ServiceUnavailable),
        (404, "Path not found", NotFound),
        (200, "ok", AgentLoopError),
    ],
)
async def test_answers_that_are_not_ours(status: int, text: str, expected: type[AgentLoopError]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        async with RolloutClient(f"http://127.0.0.1:{port}", retry_timeout_s=0.2) as client:
            with pytest.raises(expected):
                await client.status()
    finally:
        await runner.cleanup()


async def test_what_was_iterated_is_acknowledged_page_by_page(service: Service) -> None:
    async with client_of(service) as client:
        coordinator = service.coordinator
        rollout = await client.submit(tasks_of(3), num_samples=2)
        await rollout.acknowledge()  # nothing has been read yet
        assert coordinator.acknowledged == {}
        async for _ in rollout:
            await rollout.acknowledge()
        assert coordinator.acknowledged == {rollout.rollout_ids[0]: 6}
        status = await client.acknowledge(rollout.rollout_ids[0], 6)
        assert status.is_done
        seen = [one async for one in client.finished_sessions(rollout.rollout_ids[0], idle_s=0.0, acknowledge=True)]
        assert len(seen) == 6
        with pytest.raises(NotFound):
            await client.acknowledge("nobody", 1)


async def test_annotations_go_in_few_calls(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.client.client.MAX_ANNOTATIONS", 4)
    async with client_of(service) as client:
        rollouts = [await client.submit(tasks_of(3), num_samples=2), await client.submit(tasks_of(1))]
        records = [record for rollout in rollouts for record in [one async for one in rollout]]
        tokens = [np.linspace(-1, 1, len(record.path.response_ids)) for record in records]
        await client.annotate_all("advantage", zip(records, ([one] for one in tokens), strict=True))
        await client.annotate(records[0], "score", 0.5)
        with pytest.raises(InvalidRequest, match="must be finite"):
            await client.annotate(records[0], "score", float("nan"))
    calls = service.coordinator.annotated
    assert [(len(given), given[0].name) for given in calls] == [
        *[(4, "advantage"), (2, "advantage"), (1, "advantage"), (1, "score")]
    ]
    sent = [one for given in calls[:3] for one in given]
    assert [(one.group_id, one.sample_index) for one in sent] == [(r.group_id, r.sample_index) for r in records]
    for one, values in zip(sent, tokens, strict=True):
        [arrived] = one.annotation.values
        assert arrived.tolist() == values.astype(np.float32).tolist()


async def test_a_submit_says_how_many_samples_it_keeps(service: Service) -> None:
    async with client_of(service) as client:
        rollout = await client.submit(tasks_of(2), num_samples=4, keep=3)
        kept = [group.keep for name in rollout.rollout_ids for group in service.coordinator.groups[name].values()]
        assert kept == [3, 3]
        with pytest.raises(InvalidRequest, match="keep"):
            await client.submit(tasks_of(1), num_samples=2, keep=3)


async def test_another_precision_than_the_engines_is_warned_of(service: Service) -> None:
    service.coordinator.weight_dtypes = ["bfloat16", "bfloat16"]
    async with client_of(service) as client:
        with capture_logs() as logs:
            assert await client.check_precision("torch.bfloat16") is None
            assert logs == []
            gap = await client.check_precision("float32")
    assert gap is not None
    assert "float32" in gap
    assert "bfloat16" in gap
    assert [(one["event"], one["log_level"]) for one in logs] == [("precision_differs", "warning")]
    service.coordinator.weight_dtypes = [None]
    async with client_of(service) as client:
        assert await client.check_precision("float32") is None


async def test_truncated_sampling_is_warned_of_once(service: Service) -> None:
    cut = [replace(task, top_p=0.9) for task in tasks_of(2)]
    async with client_of(service) as client:
        with capture_logs() as logs:
            await client.submit(tasks_of(1))
            assert logs == []
            for tasks in (cut, [replace(cut[0], top_p=1.0, top_k=5)]):
                await client.submit(tasks)
    assert [(one["event"], one["top_p"]) for one in logs] == [("truncated_sampling", 0.9)]
