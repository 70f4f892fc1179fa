"""The Python blocks of README, get-started and guides run against the whole service with simulated engines.

A block without its own test has the comment `<!-- excerpt of FILE -->` above it: each of its lines is in that file.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import sys
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI

import agentloop.client
from agentloop.api.facts import FactsQuery
from agentloop.client import RolloutClient, load_tasks
from agentloop.rollout import Environment, call
from agentloop.rollout.tool import ToolSpec
from agentloop.score import Score
from agentloop.testing import play, validate
from agentloop.types import Limits, Message, OnStale, RolloutTask, Trajectory
from agentloop_tools.sandbox.bubblewrap import refusal
from agentloop_trainers import group_rows, teacher_logprobs
from tests.support.fleet.live_run import write_checkpoint
from tests.support.service.whole_service import simulated_config, whole_service
from tests.support.transfer.adapters import shipped_policy

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/get-started/*.md", "docs/guides/*.md")
BLOCK = re.compile(r"(?:<!-- excerpt of (\S+) -->\n+)?```python\n(.*?)```", re.DOTALL)
TESTED_ELSEWHERE = {("docs/guides/trainers.md", 0): "tests/parts/trainers/test_page.py"}
URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Site:
    """A running service, and the values for a block's prepared names."""

    url: str
    client: RolloutClient
    folder: Path

    async def records(self, num_tasks: int = 2) -> list[Trajectory]:
        rollout = await self.client.submit(TASKS[:num_tasks], num_samples=2)
        return [trajectory async for trajectory in rollout]


Names = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Program:
    """One block: names that the page leaves undefined, replacements of its text, and the check of its results."""

    names: Callable[[Site], Awaitable[Names]] | None = None
    edits: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Names, Site], Awaitable[None]] | None = None
    prints: str = ""  # part of the last printed line
    config: Mapping[str, Any] = field(default_factory=dict)


TASKS = load_tasks(ROOT / "examples" / "data" / "tasks.jsonl")
MODEL = torch.nn.Linear(4, 4)


async def agent(base_url: str, api_key: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        await openai.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )


async def with_client(site: Site) -> Names:
    return {"client": site.client, "tasks": TASKS[:4], "model": MODEL, "group_rows": group_rows, "url": site.url}


async def session_is_recorded(names: Names, site: Site) -> None:
    assert len(names["trajectory"].path.logprobs) > 0


async def shop_is_faultless(names: Names, site: Site) -> None:
    shop = names["Shop"]
    [task] = shop.tasks()
    assert (await play(shop, policy=shop.gold(task))).reward == 1.0
    assert await validate(shop) == []


async def learning(site: Site) -> Names:
    async def batches(rollout: Any, recipe: Any) -> AsyncIterator[list[list[Trajectory]]]:
        yield [group async for group in rollout.groups()]

    trained: list[int] = []
    step = {"train_step": lambda model, optimizer, rows, recipe: trained.append(len(rows)), "trained": trained}
    free = {
        "optimizer": None,
        "recipe": None,
        "version": 1,
        "OnStale": OnStale,
        "batches": batches,
        "asyncio": asyncio,
    }
    return {**await with_client(site), **step, **free}


async def has_trained(names: Names, site: Site) -> None:
    assert sum(names["trained"]) > 0
    assert (await site.client.status()).weight_version == 1


async def monitored(site: Site) -> Names:
    logprobs, logged = np.array([-0.1, -0.2, -0.3]), []
    mask = np.array([True, True, False])
    arrays = {"recorded": logprobs, "trainer_logprobs": logprobs, "response_mask": mask}
    return {**arrays, "log": lambda *values: logged.append(values), "logged": logged}


async def is_on_policy(names: Names, site: Site) -> None:
    assert names["logged"][0][:2] == (0.0, 1.0)


async def scored(site: Site) -> Names:
    task = replace(TASKS[0], limits=Limits(max_turns=1, max_tokens_per_turn=32))
    rows = group_rows([record async for record in await site.client.submit([task], num_samples=2)])
    prompts = [[5, 6, 7], [5, 6, 8]]

    async def teacher(rows: Any, client: RolloutClient, model: str) -> Any:
        return await teacher_logprobs(rows, client)  # one model is enough for this call

    batch = [[*prompt, 9, 10] for prompt in prompts]
    return {
        "client": site.client,
        "prompts": prompts,
        "batch_of_ids": batch,
        "rows": rows,
        "teacher_logprobs": teacher,
    }


async def has_scores(names: Names, site: Site) -> None:
    assert [len(one.logprobs) for one in names["scores"]] == [2, 2]
    assert names["rows"]
    assert [len(one) for one in names["teacher"]] == [len(row.logprobs) for row in names["rows"]]


async def adapters(site: Site) -> Names:
    folder = site.folder / "weights"
    folder.mkdir()
    write_checkpoint(folder)
    names = await with_client(site)
    return {
        **names,
        "folder": str(folder),
        "key": None,
        "train": lambda records: str(folder),
        "token_ids": [5, 6],
        "RolloutClient": RolloutClient,
    }


async def has_scored_a_record(names: Names, site: Site) -> None:
    [record, *_] = await site.records(1)
    score = names["reward"](TASKS[0], record.path.messages, record)
    assert isinstance(score, Score)
    assert score.main.tokens is not None
    assert len(score.main.tokens) == len(record.path.response_ids)


async def openenv(site: Site) -> Names:
    """Prepare a stand-in for the package `openenv`: an environment of one step."""

    class GenericEnvClient:
        def __init__(self, base_url: str) -> None:
            self.base_url = base_url

        async def __aenter__(self) -> GenericEnvClient:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def reset(self) -> Any:
            return types.SimpleNamespace(done=False, observation={"task": "say hello"}, reward=None)

        async def step(self, action: dict[str, str]) -> Any:
            assert set(action) == {"text"}
            return types.SimpleNamespace(done=True, observation={}, reward=1.5)

    session = await site.client.session().__aenter__()
    environment = {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "AGENTLOOP_SESSION_URL": f"{site.url}/sessions/{session.session_id}",
        "AGENTLOOP_SESSION_KEY": session.control_key,
    }
    module = types.ModuleType("openenv")
    module.GenericEnvClient = GenericEnvClient  # type: ignore[attr-defined]
    return {"session": session, "environment": environment, "modules": {"openenv": module}}


async def reward_was_posted(names: Names, site: Site) -> None:
    await names["session"].finish()
    assert (await names["session"].trajectory()).reward == 1.5


async def repair_is_scored(names: Names, site: Site) -> None:
    if (why := refusal()) is not None:
        pytest.skip(f"needs isolated commands: {why}")
    task = RolloutTask("add", (Message("user", "Repair add.py."),))
    fix = call("run", command="printf 'def add(a, b): return a + b' > add.py")
    assert (await play(names["Repair"], task, policy=[fix, "done"])).reward == 1.0


async def a_quiz(site: Site) -> Names:
    questions = {"geography": [RolloutTask("g", (Message("user", "Where is Rome?"),))], "history": []}
    tool = {"ToolSpec": ToolSpec, "schema_of": lambda task: {"type": "object", "properties": {}}}
    return {"Environment": Environment, "load": questions.__getitem__, **tool}


async def quiz_has_tasks_of_its_variant(names: Names, site: Site) -> None:
    quiz = type("Geography", (names["Quiz"],), {"variant": "geography"})
    [task] = quiz.tasks()
    assert [spec.name for spec in quiz.task_tools(task)] == ["look_up"]


async def graded(names: Names, site: Site) -> None:
    class Shell:
        async def grade(self, command: str, files: Mapping[str, str]) -> Any:
            assert "AGENTLOOP_VERDICT" in files["test.py"]
            return types.SimpleNamespace(has_passed=True)

    assert await names["reward"](None, [], {"shell": Shell()}) == 1.0


async def batched(site: Site) -> Names:
    return {**await with_client(site), "aclosing": contextlib.aclosing}


async def restarted(names: Names, site: Site) -> None:
    """The first process fails in its third step, after a checkpoint; the second one completes the run."""
    file, trained, limits = (
        str(site.folder / "checkpoint.pt"),
        list[str](),
        Limits(max_turns=1, max_tokens_per_turn=8),
    )
    optimizer = torch.optim.SGD((model := shipped_policy()).parameters(), lr=0.1)
    tasks = [replace(task, task_id=f"t{number}", limits=limits) for number, task in enumerate(TASKS[:32])]

    def take(model: Any, optimizer: Any, groups: Any) -> None:
        trained.extend(group[0].task_id for group in groups)

    def fail(model: Any, optimizer: Any, groups: Any) -> None:
        take(model, optimizer, groups)
        if len(trained) == 12:
            raise KeyError("killed")

    with pytest.raises(KeyError):
        await names["train"](site.url, "run-a", model, optimizer, tasks, fail, 5, file)
    lost = trained[8:]
    del trained[8:]
    await names["train"](site.url, "run-a", model, optimizer, tasks, take, 5, file)
    assert len(trained) == len(set(trained)) == 20
    assert set(lost) <= set(trained)
    records = [record.task_id for record in (await site.client.list_records(FactsQuery(limit=200))).records]
    assert {count for name, count in Counter(records).items() if name in trained} == {8}


async def annotated(site: Site) -> Names:
    records = await site.records()
    per_token = np.zeros(len(records[0].path.response_ids))
    few = {"record": records[0], "per_token": per_token, "advantages": [0.5] * len(records)}
    return {"client": site.client, "records": records, **few}


PROGRAMS: dict[tuple[str, int], Program] = {
    ("README.md", 0): Program(),
    ("README.md", 1): Program(lambda site: _merged(with_client(site), my_agent=agent), check=session_is_recorded),
    ("README.md", 2): Program(with_client),
    ("docs/get-started/first-agent.md", 0): Program(prints="["),
    ("docs/get-started/first-trainer.md", 0): Program(prints="1 "),
    ("docs/guides/environments.md", 0): Program(check=shop_is_faultless),
    ("docs/guides/evaluation.md", 0): Program(prints="0."),
    ("docs/guides/interchange.md", 0): Program(annotated),
    ("docs/guides/learning.md", 0): Program(learning, check=has_trained),
    ("docs/guides/lineage.md", 0): Program(),
    ("docs/guides/logprobs.md", 0): Program(monitored, check=is_on_policy),
    ("docs/guides/logprobs.md", 1): Program(scored, check=has_scores),
    ("docs/guides/logprobs.md", 2): Program(with_client),
    ("docs/guides/models.md", 0): Program(
        adapters,
        {'"/weights/math/0"': "folder", "range(1, 100)": "range(1, 3)"},
        config={"engine": {"lora_rank": 8, "max_loras": 2}},
    ),
    ("docs/guides/other-environments.md", 0): Program(openenv, check=reward_was_posted),
    ("docs/guides/published-tasks.md", 0): Program(a_quiz, check=quiz_has_tasks_of_its_variant),
    ("docs/guides/published-versions.md", 0): Program(with_client, {"s3://bucket/policies": "STORE"}),
    ("docs/guides/restart-your-trainer.md", 0): Program(check=restarted),
    ("docs/guides/rewards.md", 0): Program(check=has_scored_a_record),
    ("docs/guides/sandboxes.md", 1): Program(check=repair_is_scored),
    ("docs/guides/sandboxes.md", 0): Program(),
    ("docs/guides/tools.md", 0): Program(),
    ("docs/guides/tools.md", 1): Program(check=graded),
    ("docs/guides/tools.md", 2): Program(),
    ("docs/guides/trainers.md", 1): Program(batched, {"num_groups=64": "num_groups=2"}),
    ("docs/guides/viewer.md", 0): Program(annotated),
}


async def _merged(names: Awaitable[Names], **more: Any) -> Names:
    return {**await names, **more}


def blocks() -> dict[tuple[str, int], tuple[str, str]]:
    """Return the excerpt's file ("" for none) and the text of each Python block, by page and position."""
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    return {
        (str(page.relative_to(ROOT)), number): match.groups("")
        for page in pages
        for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
    }


EXCERPTS = {key: block for key, block in blocks().items() if block[0]}


def test_every_block_is_run_or_is_an_excerpt() -> None:
    assert set(blocks()) == {*PROGRAMS, *TESTED_ELSEWHERE, *EXCERPTS}
    assert all(page in (ROOT / test).read_text() for (page, _), test in TESTED_ELSEWHERE.items())


@pytest.mark.parametrize("key", EXCERPTS, ids=lambda key: f"{key[0]}-{key[1]}")
def test_the_lines_of_an_excerpt_are_in_its_file(key: tuple[str, int]) -> None:
    name, text = EXCERPTS[key]
    lines = {line.strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()}
    assert [line for line in text.splitlines() if line.strip() and line.strip() not in lines] == []


@pytest.mark.slow
@pytest.mark.parametrize("key", PROGRAMS, ids=lambda key: f"{key[0]}-{key[1]}")
async def test_the_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, int]) -> None:
    program, (_, text) = PROGRAMS[key], blocks()[key]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache of a publisher
    monkeypatch.setattr(agentloop.client, "load_tasks", lambda path: TASKS[:16])
    for old, new in {**program.edits, "STORE": str(tmp_path / "store"), URL: "THE_URL"}.items():
        assert old not in program.edits or old in text, old
        text = text.replace(old, new)
    async with service(tmp_path, program.config) as site:
        names = {} if program.names is None else await program.names(site)
        for name, value in names.pop("environment", {}).items():
            monkeypatch.setenv(name, value)
        for name, module in names.pop("modules", {}).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys, "argv", ["program", site.url])
        printed: list[str] = []
        names["print"] = lambda *values: printed.append(" ".join(map(str, values)))
        await asyncio.wait_for(run(text.replace("THE_URL", site.url), key[0], names), 120)
        if program.prints:
            assert program.prints in printed[-1]
        if program.check is not None:
            await program.check(names, site)


@asynccontextmanager
async def service(folder: Path, changed: Mapping[str, Any]) -> AsyncIterator[Site]:
    """Run a service whose weight roots contain the test's folder."""
    config = simulated_config(mode="standalone", weight_roots=[str(folder), str(ROOT)], **changed)
    (folder / "run").mkdir()
    async with whole_service(config, folder / "run") as url, RolloutClient(url) as client:
        yield Site(url, client, folder)


async def run(text: str, page: str, names: Names) -> None:
    """Execute a block. A complete program, which starts its own event loop, runs in a thread."""
    code = compile(text, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if "asyncio.run(" in text:
        await asyncio.to_thread(exec, code, names)
    elif (awaitable := eval(code, names)) is not None:
        await awaitable
