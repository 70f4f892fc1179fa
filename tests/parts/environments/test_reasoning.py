"""reasoning-gym's generators as environments: their verifiers, and answers that they would evaluate as Python."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace

import pytest

from agentloop.errors import InvalidRequest
from agentloop.rollout import tasks_of
from agentloop.rollout.environment import load_environment
from agentloop.testing import play
from agentloop.types import StopReason
from agentloop_environments import reasoning

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: docs/guides/published-tasks.md")


WITHOUT_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
GENERATORS = sorted(reasoning.ReasoningGym.variants())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the package leaves its data files open
@pytest.mark.parametrize("group", range(4))
async def test_the_answer_of_each_generator_earns_the_reward_and_nothing_earns_none(group):
    for name in GENERATORS[group::4]:
        environment = f"reasoning_gym:{name}"
        task = tasks_of(environment, seed=5, count=1)[0]
        gold = load_environment(environment).kind.gold(task)
        if name in WITHOUT_GOLD or (gold is None and name == "intermediate_integration"):
            assert gold is None
        else:
            assert (await play(environment, task, gold)).reward == pytest.approx(1.0), name
        assert (await play(environment, task, ["I do not know."])).reward == 0.0, name


def test_the_seed_and_the_count_choose_the_tasks():
    environment = "reasoning_gym:chain_sum"
    first = tasks_of(environment, seed=1, count=3)
    assert first == tasks_of(environment, seed=1, count=3)
    assert [one.task_id for one in first] == ["chain_sum/1/0", "chain_sum/1/1", "chain_sum/1/2"]
    assert not {one.messages for one in first} & {one.messages for one in tasks_of(environment, seed=2, count=3)}
    assert len(tasks_of(environment)) == 100


def test_the_verifiers_that_evaluate_answers_are_listed():
    def source(name: str) -> str:
        return inspect.getsource(reasoning_gym.factory.DATASETS[name][0].score_answer)

    evaluate = {name for name in GENERATORS if re.search(r"\beval\(answer", source(name))}
    assert evaluate == reasoning.EVALUATES
    assert {name for name in GENERATORS if "parse_expr(answer" in source(name)} == reasoning.PARSES


@pytest.mark.parametrize("generator", ["n_queens", "countdown"])
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('touch FILE')",
        "open('FILE', 'w')",
        "[open][0]('FILE', 'w')",
        "(lambda: open('FILE', 'w'))()",
        "[x for x in [open('FILE', 'w')]]",
        "f\"{open('FILE', 'w')}\"",
        "().__class__",
        "9**9**9",
        "2**(9**9)",
        "(9**99)**99",
        "9**(99*99*99)",
        "[0]*1000000000",
        "'a'*1000000000",
        "sin(open('FILE', 'w'))",
    ],
)
async def test_an_answer_that_is_no_plain_expression_is_not_evaluated(generator, answer, tmp_path):
    environment = f"reasoning_gym:{generator}"
    text = answer.replace("FILE", str(tmp_path / "touched"))
    assert not reasoning.is_safe(generator, text)
    record = await play(environment, tasks_of(environment, count=1)[0], [f"<answer>{text}</answer>"])
    assert (record.reward, record.reward_error, list(tmp_path.iterdir())) == (0.0, None, [])


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("countdown", "(75 + 25) * 3 - 4/2"),
        ("simple_integration", "x**3/3 - 2*sin(3*x) + exp(x)/2 + sqrt(x**2 + 1) + C"),
        ("polynomial_multiplication", "-6*x**3*y**2 + 4*x - 1"),
        ("n_queens", "_ Q _ _\n_ _ _ Q"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("spiral_matrix", "[1, 2, 3]"),
        ("chain_sum", "open('anything')"),
    ],
)
def test_an_answer_that_is_one_is(generator, answer):
    assert reasoning.is_safe(generator, answer)


def test_text_that_only_sympy_parses_is_not_given_to_it():
    assert not reasoning.is_safe("countdown", "99999999!")
    assert not reasoning.is_safe("countdown", "1+" * 9000 + "1")


async def test_a_verifier_that_raises_is_an_error_and_not_a_zero(monkeypatch):
    environment = "reasoning_gym:chain_sum"

    def fails(self: object, answer: str, entry: object) -> float:
        raise ZeroDivisionError("the verifier")

    monkeypatch.setattr(reasoning_gym.factory.DATASETS["chain_sum"][0], "score_answer", fails)
    record = await play(environment, tasks_of(environment, count=1)[0])
    assert record.reward is None
    assert "ZeroDivisionError" in (record.reward_error or "")


@pytest.mark.parametrize("reference", [None, {"entry": "open('x')"}, {"entry": 7}, {}])
async def test_a_reference_that_is_no_entry_is_an_invalid_task(reference):
    task = replace(tasks_of("reasoning_gym:chain_sum", count=1)[0], reference=reference)
    record = await play("reasoning_gym:chain_sum", task, ["<answer>1</answer>"])
    assert record.stop_reason is StopReason.INVALID_TASK
    assert "reference.entry of task 'chain_sum/0/0' is not an entry of reasoning-gym" in (record.error or "")


def test_an_unknown_generator_and_a_missing_package_are_one_line(monkeypatch):
    with pytest.raises(InvalidRequest, match=r"has no variant 'chain_sums'; did you mean chain_sum or"):
        tasks_of("reasoning_gym:chain_sums")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    missing = r"^no module named 'reasoning_gym': in a checkout of agentloop: pip install -e '.\[environments\]'$"
    with pytest.raises(InvalidRequest, match=missing):
        tasks_of("reasoning_gym:gcd")
