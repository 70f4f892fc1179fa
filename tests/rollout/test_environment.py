"""Environments: tools over a shared state, a user, an end and a score, created per trajectory, with deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import orjson
import pytest

from agentloop import parts
from agentloop.api.requests import TaskBody, parse_body, task_fields
from agentloop.errors import InvalidRequest, ToolError
from agentloop.rollout import EndEpisode, Environment, tasks_of, tool
from agentloop.rollout.environment import LoadedEnvironment, OpenEnvironment, load_environment
from agentloop.rollout.journal_homes import JournalFolder
from agentloop.rollout.models import ModelCall
from agentloop.rollout.tool import ToolSpec
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.score import Score
from agentloop.types import JSON, Message, RolloutTask, StopReason, Trajectory
from tests.support.engine.scripted import call, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.life import ending
from tests.support.fleet.lost_worker import HangingEngine, Relay, files
from tests.support.fleet.worker import running_worker, task

PATH = f"{__name__}:Kitchen"
made: list[Kitchen] = []


class Kitchen(Environment):
    """Pots over one fire. After each answer its cook says the next line of the task. `life` records the calls."""

    react_timeout_s = 0.3

    def open(self, task: RolloutTask) -> None:
        made.append(self)
        self.life = ["open"]
        self.pots: dict[str, int] = {}
        self.lines = list((task.reference or {}).get("lines", ()))

    @tool(timeout_s=0.3)
    async def put(self, pot: str, grams: int = 1) -> int:
        """Put something into a pot."""
        self.life.append(pot)
        await asyncio.sleep(1000 if pot == "hang" else 0)
        self.pots[pot] = self.pots.get(pot, 0) + grams
        return sum(self.pots.values())

    @tool
    def serve(self) -> None:
        """Serve what there is."""
        raise EndEpisode(reward=float(len(self.pots)), reason=f"served {', '.join(self.pots)}")

    async def react(self, messages: Sequence[Message]) -> str | None:
        self.life.append(f"heard {messages[-1].content}")
        said = self.lines.pop(0) if self.lines else None
        if said == "hang":
            await asyncio.sleep(1000)
        if said == "leave":
            raise EndEpisode(Score(-1.0, {"patience": 0.0}), "the cook left")
        return said

    async def score(self, task: RolloutTask, messages: Sequence[Message]) -> Score:
        self.life.append("score")
        return Score(float(sum(self.pots.values())), {"messages": len(messages)})

    def close(self) -> None:
        self.life.append("close")


class Clumsy(Kitchen):
    """An environment with a tool of another's name, and state that is not JSON."""

    @tool
    def calculator(self, expression: str) -> str:
        """Another one."""
        return expression

    def open(self, task: RolloutTask) -> None:
        super().open(task)
        self.shelf = [self.pots]  # stored twice


def kitchen_task(*lines: str, **fields: object) -> RolloutTask:
    given = {"tools": (), "reward": None, "environment": PATH, "reference": {"lines": lines}}
    return task(**{**given, **fields})


async def record_of(rollout_task: RolloutTask, *replies: str) -> Trajectory:
    made.clear()
    feeder = FakeCoordinator([rollout_task])
    async with running_worker(feeder, {"sim://a": scripted_engine(*replies)}), asyncio.timeout(60):
        await feeder.is_done.wait()
    assert [kitchen.life.count("close") for kitchen in made] == [1] * len(made)
    return feeder.records["t/0"]


def said(record: Trajectory) -> list[tuple[str, str]]:
    return [(one.role, one.content) for one in record.messages[1:] if not one.tool_calls]


async def test_tools_share_a_state_the_user_answers_and_the_end_is_scored():
    record = await record_of(
        kitchen_task("More salt."), call("put", pot="soup"), "Done?", call("put", pot="salt", grams=2), "Done."
    )
    assert said(record) == [
        ("tool", "1"),
        ("assistant", "Done?"),
        ("user", "More salt."),
        ("tool", "3"),
        ("assistant", "Done."),
    ]
    assert (*ending(record), record.components, record.end_reason) == (
        StopReason.COMPLETED,
        None,
        3.0,
        {"messages": 8.0},
        "",
    )
    life = ["open", "soup", "heard Done?", "salt", "heard Done.", "score", "close"]
    assert [kitchen.life for kitchen in made] == [life]


async def test_arguments_are_held_to_the_schema_and_a_turns_calls_run_one_after_the_other():
    both = call("put", pot="a") + "\n" + call("put", pot="b", grams="many") + "\n" + call("put", pot="c")
    record = await record_of(kitchen_task(), both, "Done.")
    assert [content for _, content in said(record)[:3]] == [
        "1",
        "Error: invalid arguments: grams: Input should be a valid integer, unable to parse string as an integer",
        "2",
    ]
    assert made[0].life == ["open", "a", "c", "heard Done.", "score", "close"]


async def test_a_tool_ends_the_episode_with_its_reward_and_reason():
    serves = call("put", pot="soup") + "\n" + call("serve") + "\n" + call("put", pot="late")
    record = await record_of(kitchen_task(), serves, "never said")
    assert ending(record) == (StopReason.COMPLETED, None, 1.0)
    assert record.end_reason == "served soup"
    assert [content for _, content in said(record)] == ["1", "served soup", "Error: the episode has ended"]
    assert made[0].life == ["open", "soup", "close"]


async def test_the_user_ends_it_too():
    record = await record_of(kitchen_task("leave"), "Hello?")
    assert (*ending(record), record.components) == (StopReason.COMPLETED, None, -1.0, {"patience": 0.0})
    assert (record.end_reason, made[0].life) == ("the cook left", ["open", "heard Hello?", "close"])


@pytest.mark.parametrize(
    ("lines", "reply", "error"),
    [
        ((), call("put", pot="hang"), "tool 'put' is lost: timed out after 0.3 s"),
        (("hang",), "Hello?", f"react of '{PATH}': timed out after 0.3 s"),
    ],
)
async def test_one_that_is_late_is_lost_and_has_no_reward(lines, reply, error):
    record = await record_of(kitchen_task(*lines), reply, "Done.")
    assert ending(record) == (StopReason.TOOL_FAILED, error, None)
    assert len(made) == 1


async def reward_of_pots(task: RolloutTask, messages: Sequence[Message], environment: Kitchen) -> float:
    assert environment.life[-2:] == ["score", "looked"]
    return float(len(environment.pots))


class Looking:
    """A user's own loop that asks the environment's user and reads the state."""

    async def run(self, task: RolloutTask, ctx) -> None:
        reply = await ctx.sample()
        assert not await ctx.react()
        await ctx.run_tools(reply.calls)
        ctx.set_metrics(pots=len(ctx.environment.pots))
        ctx.environment.__class__ = Looked


class Looked(Kitchen):
    async def score(self, task: RolloutTask, messages: Sequence[Message]) -> Score:
        self.life += ["score", "looked"]
        return Score(components={"of_the_kitchen": 0.5})


async def test_loops_and_rewards_of_ones_own_reach_the_state():
    own = {"loop": f"{__name__}:Looking", "reward": f"{__name__}:reward_of_pots", "tools": ("calculator",)}
    record = await record_of(kitchen_task(**own), call("put", pot="soup"))
    assert ending(record) == (StopReason.COMPLETED, None, 1.0)
    assert (record.metrics, record.components) == ({"pots": 1.0}, {"of_the_kitchen": 0.5})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"environment": f"{__name__}:Looking"}, "is not a subclass of agentloop.rollout.Environment"),
        ({"environment": f"{__name__}:Clumsy", "tools": ("calculator",)}, "both have a tool 'calculator'"),
        ({"environment": "no_module:Shop"}, "no module named 'no_module'"),
        ({"tool_setup": {"kitchen": {}}}, "tool_setup names 'kitchen'"),
    ],
)
async def test_what_cannot_be_loaded_is_an_invalid_task(fields, problem):
    record = await record_of(kitchen_task(**fields), "Done.")
    assert record.stop_reason is StopReason.INVALID_TASK
    assert problem in (record.error or "")


async def test_it_goes_on_after_a_lost_worker_behind_what_the_user_said(tmp_path):
    """The worker dies in the third turn: the call's state, the cook's line and the remaining lines are restored."""
    made.clear()
    feeder = Relay([kitchen_task("More.", "Thanks.")])
    replies = [call("put", pot="soup"), "Done?", call("put", pot="salt"), "Done.", "Bye."]
    first, journal = HangingEngine(*replies, hangs_at=2), TurnJournal(JournalFolder(tmp_path), 0.02, young_s=0.0)
    async with running_worker(feeder, {"sim://a": first}, journal=journal), asyncio.timeout(60):
        await first.is_hanging.wait()
        while not files(tmp_path):
            await asyncio.sleep(0.01)
    await journal.close()
    feeder.lose_worker()
    engine, journal = HangingEngine(*replies), TurnJournal(JournalFolder(tmp_path), 0.02, young_s=0.0)
    async with running_worker(feeder, {"sim://a": engine}, journal=journal), asyncio.timeout(60):
        await feeder.is_done.wait()
    await journal.close()
    record = feeder.records["t/0"]
    assert (record.num_resumed_turns, record.reward, engine.num_turns) == (2, 2.0, 3)
    assert [content for role, content in said(record) if role == "user"] == ["More.", "Thanks."]
    assert [kitchen.life for kitchen in made] == [
        ["open", "soup", "heard Done?", "close"],
        ["open", "soup", "heard Done?", "salt", "heard Done.", "heard Bye.", "score", "close"],
    ]


async def test_an_episode_that_had_ended_when_its_worker_died_ends_the_same_way(tmp_path):
    """The call that ended the episode runs again: its answer alone does not say that it ended the episode."""
    made.clear()
    feeder = Relay([kitchen_task()])
    feeder.refuses = {StopReason.COMPLETED}
    replies = [call("put", pot="soup"), call("serve"), "never said"]

    async def run(engine: HangingEngine, is_done: asyncio.Event) -> None:
        journal = TurnJournal(JournalFolder(tmp_path), 0.02, young_s=0.0)
        async with running_worker(feeder, {"sim://a": engine}, journal=journal), asyncio.timeout(60):
            await is_done.wait()
            await journal.flush()
        await journal.close()

    await run(HangingEngine(*replies), feeder.is_refused)
    feeder.refuses = set()
    feeder.lose_worker()
    await run(engine := HangingEngine(*replies), feeder.is_done)
    record = feeder.records["t/0"]
    assert (record.num_resumed_turns, engine.num_turns) == (2, 0)
    assert (*ending(record), record.end_reason) == (StopReason.COMPLETED, None, 1.0, "served soup")


@pytest.mark.parametrize("odd", [(1, 2), {1: 2}, float("nan"), object(), {"a", "b"}])
async def test_only_a_state_that_json_gives_back_as_it_is_has_a_snapshot(odd: JSON):
    kitchen, other = Kitchen(), Kitchen()
    kitchen.pots = {"soup": 1, "nested": [{"a": [1.5, None, True]}]}
    await other.restore(await kitchen.snapshot())
    assert other.pots == kitchen.pots
    kitchen.odd = odd
    with pytest.raises(ToolError, match="odd"):
        await kitchen.snapshot()
    clumsy = Clumsy()
    clumsy.open(kitchen_task())
    with pytest.raises(ToolError, match="referenced twice"):
        await clumsy.snapshot()


class Sloted:
    __slots__ = ("__hidden", "heat")

    def __init__(self) -> None:
        self.__hidden, self.heat = 1, 1

    def turn(self) -> None:
        self.__hidden += 1
        self.heat = 9

    @property
    def hidden(self) -> int:
        return self.__hidden


class Stove(Sloted, Environment):
    """An environment with state in attributes, in slots of two classes, and in names that the service sets."""

    __slots__ = ("flame", "gas")
    hint = "of the class"

    def open(self, task: RolloutTask) -> None:
        self.hint, self.gas, self.pots = "of the object", "on", [1]


CHANGES: dict[str, Callable[[Stove], object]] = {
    "an attribute is deleted": lambda stove: stove.__delattr__("hint"),
    "an attribute is added": lambda stove: setattr(stove, "lid", None),
    "slots of two classes": lambda stove: (stove.turn(), setattr(stove, "flame", {"blue": [1.5]})),
    "a slot is deleted": lambda stove: stove.__delattr__("gas"),
    "its own seed": lambda stove: setattr(stove, "seed", 99),
    "its own task": lambda stove: setattr(stove, "task", {"id": 7}),
    "no task": lambda stove: stove.__delattr__("task"),
    "nothing": lambda stove: None,
}


async def opened(kind: type[Environment], given: RolloutTask | None = None) -> OpenEnvironment:
    session = LoadedEnvironment(kind, PATH).open_session("t/0", 3)
    await session.open(given or kitchen_task())
    return session


@pytest.mark.parametrize("change", CHANGES)
async def test_a_restored_environment_equals_the_one_that_died(change: str) -> None:
    died, restored = await opened(Stove), await opened(Stove)
    before = died.environment
    CHANGES[change](before)
    await restored.restore(await died.snapshot())
    after = restored.environment
    names = {*vars(before), *vars(after), "hint", "gas", "flame", "heat", "hidden", "lid"} - {"_given", "_models"}
    for name in names:
        assert getattr(after, name, "missing") == getattr(before, name, "missing"), name
    assert vars(before).keys() == vars(after).keys()
    assert await restored.snapshot() == await died.snapshot(), "a second death loses nothing either"


def version(number: int) -> type[Environment]:
    class Versioned(Environment):
        def open(self, task: RolloutTask) -> None:
            self.pots = 1

    class Versioned2(Environment):
        def open(self, task: RolloutTask) -> None:
            self.kettles = 1

    class Versioned3(Environment):
        def open(self, task: RolloutTask) -> None:
            self.pots = 1 + 0

    return (Versioned, Versioned2, Versioned3)[number]


@pytest.mark.parametrize(("number", "named"), [(1, "field 'kettles'"), (2, "its code")])
async def test_a_snapshot_of_another_version_changes_nothing(number: int, named: str) -> None:
    died, other = await opened(version(0)), await opened(version(number))
    died.environment.pots = 5
    before = dict(vars(other.environment))
    with pytest.raises(ToolError, match=f"another version of .*: {named} differs"):
        await other.restore(await died.snapshot())
    assert vars(other.environment) == before


async def test_a_state_beside_its_attributes_has_no_snapshot() -> None:
    class Bag(Environment, dict):  # type: ignore[type-arg]
        pass

    with pytest.raises(ToolError, match="it inherits from dict"):
        await (await opened(Bag)).snapshot()
    kitchen = await opened(Kitchen, kitchen_task(reference={"lines": ["More."]}))
    kitchen.environment.task.reference["lines"].clear()
    with pytest.raises(ToolError, match="modified in place"):
        await kitchen.snapshot()


async def test_a_model_says_the_users_part():
    calls: list[ModelCall] = []

    class User:
        async def chat(self, call: ModelCall) -> str:
            calls.append(call)
            return "Bye. ###STOP###" if len(calls) > 1 else "Where is it?"

    kitchen = LoadedEnvironment(Kitchen, PATH, User()).open_session("t/0", 0).environment
    talk = [Message("system", "Rules"), Message("user", "Hi"), Message("tool", "1"), Message("assistant", "Yes?")]
    assert await kitchen.model_user("user", "You are hungry.", talk) == "Where is it?"
    assert await kitchen.model_user("user", "You are hungry.", talk) is None
    persona = Message("system", "You are hungry.")
    assert calls[0].messages == (persona, Message("assistant", "Hi"), Message("user", "Yes?"))


def test_a_task_names_it_on_the_wire_and_its_life_is_finite():
    given = kitchen_task(reference=None)
    assert parse_body(orjson.dumps(task_fields(given)), TaskBody).to_task() == given
    assert list(load_environment(PATH).methods) == ["put", "serve"]
    Looked.open_timeout_s = 1e6
    with pytest.raises(InvalidRequest, match=r"is 1.00007e\+06 s, but must be positive and at most 1800"):
        load_environment(f"{__name__}:Looked")
    del Looked.open_timeout_s


class Market(Environment):
    """An environment with stalls of one kind. Each task has its own tools; one tool is not in the prompt."""

    @classmethod
    def variants(cls) -> Sequence[str]:
        return ["flowers", "fruit", "fruit-2"]

    @classmethod
    def tasks(cls) -> Sequence[RolloutTask]:
        return [kitchen_task(f"{cls.variant} {number}", task_id=f"{number}") for number in range(5)]

    @classmethod
    def task_tools(cls, task: RolloutTask) -> Sequence[ToolSpec]:
        return [ToolSpec("buy", "Buy.", {}), ToolSpec("haggle", "Haggle.", {}, is_listed=False)]

    def call_tool(self, name: str, arguments: Mapping[str, JSON]) -> str:
        if name == "haggle" and not arguments:
            raise ToolError("say a price")
        return f"{name} {self.variant} {sorted(arguments)}"


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the environment `market`."""
    monkeypatch.setattr(parts, "registered", lambda group: {"market": f"{__name__}:Market"})


def test_a_variant_and_a_choice_of_tasks_by_name(market):
    assert [one.task_id for one in tasks_of("market:fruit-2", count=2)] == ["0", "1"]
    shuffled = [one.task_id for one in tasks_of("market:fruit", seed=3)]
    assert shuffled == [one.task_id for one in tasks_of("market:flowers", seed=3)]
    assert sorted(shuffled) == ["0", "1", "2", "3", "4"]
    assert shuffled != sorted(shuffled)
    assert tasks_of("market:fruit", count=1)[0].environment == "market:fruit"
    assert load_environment("market:fruit").kind is load_environment("market:fruit").kind


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("market:fruits", "'market' has no variant 'fruits'; did you mean fruit"),
        ("market:zzz", "has no variant 'zzz'; expected flowers, fruit, fruit-2"),
        ("market", "'market' needs a variant, as in market:flowers; expected flowers, fruit"),
    ],
)
def test_an_unknown_variant_is_refused_with_the_nearest_names(market, name, problem):
    with pytest.raises(InvalidRequest, match=problem):
        load_environment(name)


def test_a_class_without_variants_has_none(monkeypatch):
    monkeypatch.setattr(parts, "registered", lambda group: {"kitchen": PATH})
    with pytest.raises(InvalidRequest, match="environment 'kitchen' has no variants: remove ':large'"):
        load_environment("kitchen:large")


async def test_a_tasks_own_tools_answer_and_one_of_them_is_not_in_the_prompt(market):
    turns = [call("buy", of=2), call("haggle"), call("haggle", price=1), call("steal"), "done"]
    record = await record_of(replace(kitchen_task(), environment="market:fruit"), *turns)
    assert [one.content for one in record.messages if one.role == "tool"] == [
        "buy fruit ['of']",
        "Error: say a price",
        "haggle fruit ['price']",
        "Error: unknown tool 'steal'. Available: buy",
    ]
    tools = LoadedEnvironment(Market, PATH, task=kitchen_task()).tools()
    assert [name for name, one in tools.items() if one.spec.is_listed] == ["buy"]
