"""Models that take turns on their accelerators: the awake model at each time, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentloop.api.coordinator import QueueStatus, ReplicaStatus, RolloutStatus, ServiceStatus
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import ALL_MEMORY, MemoryTag
from agentloop.errors import EngineLost, InvalidRequest
from agentloop.fleet.desired_state import TURN_REASON
from agentloop.types import Load
from agentloop_servers.coordinator.model_turns import IDLE_S, ModelTurns, TurnsModel, check_turns

STEP_S = 0.1


class Model:
    """A model whose calls take time while it is awake, and are frozen while it sleeps."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name = site, name
        self.calls: list[float] = []  # seconds of work that each still needs
        self.asleep = ALL_MEMORY
        self.reason = TURN_REASON
        self.has_started = False
        self.failures = 0
        self.sleep_failures = 0
        self.version: int | None = 0
        self.rollouts: tuple[RolloutStatus, ...] = ()
        self.num_awaiting_turn = 0

    async def status(self) -> ServiceStatus:
        running = [] if self.asleep else self.calls
        load = Load(num_running=len(running), num_waiting=len(self.calls) - len(running))
        replicas = (ReplicaStatus(self.name, "", "", 0, load, 0, 0.0),) if self.has_started else ()
        return ServiceStatus(
            not self.asleep,
            False,
            self.version,
            replicas,
            0,
            self.rollouts,
            (),
            asleep=tuple(self.asleep),
            sleep_reason=self.reason,
            queue=QueueStatus(0, sum(one.num_queued for one in self.rollouts), 0, 0),
            num_awaiting_turn=self.num_awaiting_turn,
        )

    async def sleep(self, level: int, reason: str) -> None:
        self.asleep, self.reason = ALL_MEMORY, reason
        if self.sleep_failures:
            self.sleep_failures -= 1
            raise EngineLost("a replica does not sleep")

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        if self.failures:
            self.failures -= 1
            raise EngineLost("it does not wake")
        await asyncio.sleep(0.5)
        others = [one.name for one in self.site.models.values() if one is not self and not one.asleep]
        assert not others, f"{self.name} wakes beside {others}"
        self.asleep, self.reason, self.has_started = frozenset(), "", True
        self.site.turns.append((self.name, round(self.site.clock.now(), 1)))


class Site:
    """A policy and two models that share accelerators."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.models = {name: Model(self, name) for name in ("", "judge", "user")}
        self.turns: list[tuple[str, float]] = []
        self.ports = {name: TurnsModel(one.status, one.sleep, one.wake, 1) for name, one in self.models.items()}
        self.settings = {"min_stay_s": 5.0, "max_wait_s": 20.0, "start_timeout_s": 60.0}
        self.keeper = ModelTurns(self.ports, self.clock, **self.settings)

    async def work(self) -> None:
        while True:
            await self.clock.sleep(STEP_S)
            for model in self.models.values():
                if not model.asleep:
                    model.calls = [left - STEP_S for left in model.calls if left > STEP_S]


def virtually(test: Callable[[Site], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        site = Site()

        async def main() -> None:
            async with asyncio.TaskGroup() as group:  # a failure of either task ends the test
                tasks = [group.create_task(site.keeper.run()), group.create_task(site.work())]
                while len(site.turns) < 3:
                    await site.clock.sleep(STEP_S)
                await test(site)
                assert not any(task.done() for task in tasks)
                for task in tasks:
                    task.cancel()

        site.clock.run(main())

    run.__doc__ = test.__doc__
    return run


@virtually
async def test_each_starts_alone_and_the_policy_stays_awake(site: Site) -> None:
    assert [name for name, _ in site.turns] == ["judge", "user", ""]
    await site.clock.sleep(60)
    assert len(site.turns) == 3
    assert {name for name, model in site.models.items() if not model.asleep} == {""}


@virtually
async def test_an_idle_model_gives_way_and_a_busy_one_after_its_time(site: Site) -> None:
    await site.clock.sleep(10)
    site.models["judge"].calls = [1.0] * 8
    await site.clock.sleep(2)
    assert site.turns[-1][0] == "judge", "the policy was idle"
    site.models[""].calls = [100.0]
    await site.clock.sleep(IDLE_S + 3)
    assert (site.turns[-1][0], site.models["judge"].calls) == ("", [])
    began = site.turns[-1][1]
    site.models["user"].calls = [1.0]
    site.models["judge"].calls = [1.0]
    await site.clock.sleep(19)
    assert site.turns[-1] == ("", began), "it has work, and the others have not waited long"
    await site.clock.sleep(12)
    assert {name for name, at in site.turns if at > began + 15} == {"judge", "user", ""}
    await site.clock.sleep(120)
    assert not any(model.calls for model in site.models.values()), "a switch ends nothing"


@virtually
async def test_samples_that_are_held_for_new_weights_do_not_want_the_turn(site: Site) -> None:
    """A weight update that waits for the turn does request it."""
    await site.models[""].sleep(1, TURN_REASON)
    site.models["judge"].calls = [1000.0]
    await site.clock.sleep(10)
    num_turns = len(site.turns)
    site.models[""].rollouts = (RolloutStatus("r", 8, 2, 0, 6, num_held=6),)
    await site.clock.sleep(100)
    assert site.turns[num_turns:] == []
    site.models[""].rollouts = (RolloutStatus("r", 8, 2, 0, 6, num_held=5),)
    await site.clock.sleep(30)
    assert site.turns[num_turns][0] == "", "one sample may run"
    site.models[""].rollouts, num_turns = (), len(site.turns)
    await site.clock.sleep(30)
    assert site.turns[-1][0] == "judge"
    site.models[""].num_awaiting_turn, num_turns = 1, len(site.turns)
    await site.clock.sleep(30)
    assert site.turns[num_turns][0] == ""


@virtually
async def test_a_stream_of_calls_to_two_models_does_not_thrash(site: Site) -> None:
    for _ in range(120):
        site.models[""].calls.append(3.0)
        site.models["judge"].calls.append(3.0)
        await site.clock.sleep(1)
    gaps = [after - before for (_, before), (_, after) in zip(site.turns[3:], site.turns[4:], strict=False)]
    assert len(gaps) >= 3
    assert min(gaps) >= 5.0, gaps


@virtually
async def test_a_sleep_by_somebody_else_holds_for_all(site: Site) -> None:
    """A trainer that shares the accelerators put the models to sleep."""
    await site.models[""].sleep(1, "training")
    site.models["judge"].calls = [1.0]
    await site.clock.sleep(60)
    assert all(model.asleep for model in site.models.values())
    site.models[""].reason = TURN_REASON
    await site.clock.sleep(5)
    assert [name for name, model in site.models.items() if not model.asleep] == ["judge"] or site.models[
        "judge"
    ].calls == []


@virtually
async def test_a_new_coordinator_goes_on_with_the_model_that_is_awake(site: Site) -> None:
    site.models["user"].calls = [30.0]
    await site.clock.sleep(5)
    num_turns = len(site.turns)
    again = ModelTurns(site.ports, site.clock, **site.settings)
    task = asyncio.create_task(again.run())
    await site.clock.sleep(10)
    assert site.turns[num_turns:] == []
    task.cancel()


@virtually
async def test_a_model_that_does_not_wake_is_tried_again(site: Site) -> None:
    site.models["judge"].failures = 2
    site.models["judge"].calls = [1.0]
    await site.clock.sleep(20)
    assert site.models["judge"].calls == []


@virtually
async def test_a_switch_is_repeated_until_all_others_sleep(site: Site) -> None:
    site.models[""].sleep_failures = 3
    site.models["judge"].calls = [1.0]
    num_turns = len(site.turns)
    await site.clock.sleep(5)
    assert [name for name, _ in site.turns[num_turns:]] == ["judge"]
    assert site.models[""].sleep_failures == 0, "it was woken next to a replica that is awake"


@virtually
async def test_a_model_without_weights_wants_the_turn_for_an_update_only(site: Site) -> None:
    site.models["judge"].version, site.models["judge"].calls = None, [1.0]
    num_turns = len(site.turns)
    await site.clock.sleep(60)
    assert site.turns[num_turns:] == []
    site.models["judge"].num_awaiting_turn = 1
    await site.clock.sleep(5)
    assert site.turns[num_turns][0] == "judge"


def test_models_whose_weights_the_host_cannot_hold_asleep_are_refused_with_the_sum() -> None:
    sizes = {"policy": 3 * 2**30, "judge": 5 * 2**30, "user": 2 * 2**30}
    asleep_bytes = 8 * 2**30  # the minimum: all models except the smallest

    check_turns(sizes, asleep_bytes)
    with pytest.raises(InvalidRequest, match=r"8\.0 GiB .*policy 3\.0 \+ judge 5\.0 \+ user 2\.0") as refused:
        check_turns(sizes, asleep_bytes - 1)
    assert refused.value.param == "turns"
