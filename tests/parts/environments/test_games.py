"""TextArena's single-player games as environments: moves, rewards and concurrent games."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest

from agentloop.errors import InvalidRequest
from agentloop.rollout import tasks_of
from agentloop.rollout.environment import load_environment
from agentloop.testing import play
from agentloop.types import StopReason
from agentloop_environments import games

pytest.importorskip("textarena", reason="needs textarena: docs/guides/published-tasks.md")

GUESS = "textarena:GuessTheNumber-v0"
WALK = ["[Up]", "[Left]", "[Down]", "[Right]"] * 5


async def test_moves_reach_the_game_and_its_reward_is_the_trajectorys():
    task = tasks_of(GUESS, seed=2, count=1)[0]
    number = games.Game("GuessTheNumber-v0", task.reference["seed"]).game.game_number
    other = number % 20 + 1
    record = await play(GUESS, task, [f"I guess [{other}]", f"[{number}]"])
    hint = "lower" if other > number else "higher"
    assert [one.content for one in record.messages if one.role == "user"][1] == f"The target number is {hint}."
    assert (record.reward, record.stop_reason) == (1.0, StopReason.COMPLETED)


@pytest.mark.parametrize("game", ["PegJump-v0", "Cryptarithm-v0", "2048-v0", "Slitherlink-v0", "ThreeCardMonte-v0"])
async def test_a_policy_that_makes_no_move_has_no_reward(game):
    environment = f"textarena:{game}"
    record = await play(environment, tasks_of(environment, count=1)[0], ["I do nothing."] * 3)
    assert (record.reward, record.error, record.metrics["invalid_move"]) == (0.0, None, 1.0)


def walked(game: games.Game, moves: list[str]) -> list[str]:
    seen = [game.observation()]
    for text in moves:
        game.move(text)
        seen.append(game.observation())
    return seen


def test_games_at_the_same_time_draw_their_own_random_numbers():
    alone = [walked(games.Game("2048-v0", seed), WALK) for seed in (1, 2)]
    random.seed(7)
    expected = random.random()
    random.seed(7)
    both = [games.Game("2048-v0", seed) for seed in (1, 2)]
    seen = [[game.observation()] for game in both]
    for text in WALK:
        for game, texts in zip(both, seen, strict=True):
            game.move(text)
            texts.append(game.observation())
    assert seen == alone
    assert alone[0] != alone[1]
    assert random.random() == expected


def test_a_restored_game_continues_as_the_first_one():
    environment = "textarena:2048-v0"
    task = tasks_of(environment, count=1)[0]
    first, second = (load_environment(environment).kind() for _ in range(2))
    for one in (first, second):
        one.task = task
        one.open(task)
    replies = [first.react([replace(task.messages[0], content=text)]) for text in WALK]
    assert None not in replies
    second.restore(first.snapshot())
    last = [replace(task.messages[0], content="[Up]")]
    assert second.react(last) == first.react(last)


@pytest.mark.parametrize(
    ("game", "problem"),
    [
        ("Wordle-v0", "needs NLTK's word lists, which it would download: python -m nltk.downloader words"),
        ("GuessWho-v0", "is not supported: a model of OpenRouter answers the player"),
        ("Sudoku", "has no variant 'Sudoku'; did you mean Sudoku-v0"),
    ],
)
def test_a_game_that_cannot_run_is_refused_by_name(game, problem, monkeypatch):
    monkeypatch.setattr(games, "_has_words", lambda: False)
    with pytest.raises(InvalidRequest, match=problem):
        tasks_of(f"textarena:{game}")
    assert "textarena.envs.Wordle.env" not in sys.modules  # its import downloads files


@pytest.mark.parametrize(
    ("changed", "problem"),
    [({"reference": {}}, "reference.seed must be"), ({"reference": {"seed": 1}}, "with seed 1 begins differently")],
)
async def test_a_task_of_another_game_is_invalid(changed, problem):
    record = await play(GUESS, replace(tasks_of("textarena:Bandit-v0", count=1)[0], **changed), ["[1]"])
    assert record.stop_reason is StopReason.INVALID_TASK
    assert problem in (record.error or "")
