"""`textarena:GAME`: the single-player games of the package `textarena`, such as `textarena:Sudoku-v0-easy`.

Each reply of the policy is a move, and the game's messages are the user's turns. The trajectory's state is the list
of its moves: a restored game plays them again. All games draw from Python's global `random`, so every step of a
game runs alone, with the game's own state of that generator.
"""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from numbers import Real
from threading import Lock
from typing import Any

import numpy as np
import orjson

from agentloop.errors import InvalidRequest
from agentloop.rollout import Environment
from agentloop.score import Score
from agentloop.types import Limits, Message, RolloutTask
from agentloop_environments.packages import import_package

NUM_TASKS = 100
"""The number of tasks, unless `count` says otherwise."""

MAX_GAME_SEED = 2**31
GAME_LIMITS = Limits(max_turns=128, max_sampled_tokens=32_768)

GAMES = frozenset(
    {
        "Bandit",
        "Blackjack",
        "Countdown",
        "Crosswords",
        "Cryptarithm",
        "FifteenPuzzle",
        "FrozenLake",
        "Game2048",
        "GuessTheNumber",
        "Klondike",
        "LightsOut",
        "LogicPuzzle",
        "Mastermind",
        "Minesweeper",
        "PegJump",
        "RushHour",
        "Secretary",
        "Set",
        "Slitherlink",
        "Sokoban",
        "Sudoku",
        "ThreeCardMonte",
        "TowerOfHanoi",
        "UltimateTexasHoldem",
    }
)
"""The packages of the single-player games that need nothing else. Some need Python 3.12."""

WORD_GAMES = frozenset({"Hangman", "WordLadder", "WordSearch", "Wordle"})
"""The games that download NLTK's word lists when they are imported."""

JUDGED_GAMES = frozenset({"GuessWho", "TwentyQuestions"})
"""The games in which a model of OpenRouter answers the player: they are not supported."""

_one_step = Lock()


class Game:
    """A running game."""

    def __init__(self, name: str, seed: int) -> None:
        self._random: Any = None
        with self._alone():
            random.seed(seed)
            np.random.seed(seed)
            raw = _package().make(f"{name}-raw")
            self.game = import_package("textarena.wrappers").ActionFormattingWrapper(raw)
            self.game.reset(num_players=1, seed=seed)
        self.is_done = False

    def observation(self) -> str:
        """Return the game's new messages, without the policy's own moves."""
        action = _package().ObservationType.PLAYER_ACTION
        with self._alone():
            _, messages = self.game.get_observation()
        # Some games exchange arguments for the move, so that its text is the number of the player.
        return "\n\n".join(text for _, text, kind in messages if kind is not action and isinstance(text, str))

    def move(self, text: str) -> None:
        """Make a move. An invalid one is answered by the game, or ends it."""
        with self._alone():
            self.is_done, _ = self.game.step(text)

    def score(self) -> Score:
        """Return the game's reward. A game that is not over, or that an invalid move ended, has no positive one."""
        rewards, infos = self.game.close() if self.is_done else ({}, {})
        is_invalid = bool(infos.get(0, {}).get("invalid_move"))
        reward = (rewards or {}).get(0, 0.0)
        # For an invalid move some games give their partial reward, others their reason in its place.
        if is_invalid:
            reward = min(reward, 0.0) if isinstance(reward, Real) else 0.0
        return Score(float(reward), metrics={"invalid_move": float(is_invalid)})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _one_step, redirect_stdout(io.StringIO()):  # some games print
            outside = random.getstate(), np.random.get_state()
            if self._random is not None:
                random.setstate(self._random[0])
                np.random.set_state(self._random[1])
            try:
                yield
            finally:
                self._random = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])


class TextArena(Environment):
    """A game. The reward is the game's."""

    moves: list[str]

    @classmethod
    def variants(cls) -> Collection[str]:
        return sorted(name for name in _packages_of_games() if not name.endswith(("-raw", "-train")))

    @classmethod
    def tasks(cls) -> Iterable[RolloutTask]:
        return cls.choose_tasks(None, None)

    @classmethod
    def choose_tasks(cls, seed: int | None, count: int | None) -> Iterable[RolloutTask]:
        _check(cls.variant)
        seeds = random.Random(seed or 0)
        for index in range(NUM_TASKS if count is None else count):
            game_seed = seeds.randrange(MAX_GAME_SEED)
            yield RolloutTask(
                f"{cls.variant}/{seed or 0}/{index}",
                (Message("user", Game(cls.variant, game_seed).observation()),),
                reference={"seed": game_seed},
                limits=GAME_LIMITS,
            )

    def open(self, task: RolloutTask) -> None:
        _check(self.variant)
        game_seed = task.reference.get("seed") if isinstance(task.reference, dict) else None
        if not isinstance(game_seed, int):
            raise InvalidRequest("reference.seed must be the game's seed, a number", param="reference")
        self._begin_game(game_seed)
        if self.first != task.messages[-1].content:
            raise InvalidRequest(
                f"{self.variant} with seed {game_seed} begins differently here: make the tasks with the same "
                "versions of textarena and Python",
                param="messages",
            )

    def _begin_game(self, game_seed: int) -> None:
        self.game, self.moves = Game(self.variant, game_seed), []
        self.first = self.game.observation()

    def react(self, messages: Sequence[Message]) -> str | None:
        self.moves.append(messages[-1].content)
        self.game.move(self.moves[-1])
        return None if self.game.is_done else self.game.observation()

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> Score:
        return self.game.score()

    def snapshot(self) -> bytes:
        return orjson.dumps(self.moves)

    def restore(self, state: bytes) -> None:
        self._begin_game(self.task.reference["seed"])
        for text in orjson.loads(state):
            self.moves.append(text)
            self.game.move(text)
            self.game.observation()


def _check(name: str) -> None:
    """Raise InvalidRequest for a game that would download word lists, or that cannot run here."""
    package = _packages_of_games()[name]
    if package in JUDGED_GAMES:
        raise InvalidRequest(
            f"textarena:{name} is not supported: a model of OpenRouter answers the player", param="environment"
        )
    if package in WORD_GAMES and not _has_words():
        raise InvalidRequest(
            f"textarena:{name} needs NLTK's word lists, which it would download: python -m nltk.downloader words "
            "averaged_perceptron_tagger_eng",
            param="environment",
        )


def _has_words() -> bool:
    nltk = import_package("nltk")
    try:
        return bool(nltk.data.find("corpora/words")) and bool(
            nltk.data.find("taggers/averaged_perceptron_tagger_eng")
        )
    except LookupError:
        return False


def _packages_of_games() -> dict[str, str]:
    """Return the package of each single-player game by the game's name."""
    registry = import_package("textarena.envs.registration").ENV_REGISTRY
    packages = {name: str(spec.entry_point).split(".")[2] for name, spec in registry.items()}
    known = GAMES | WORD_GAMES | JUDGED_GAMES
    return {name: package for name, package in packages.items() if package in known}


def _package() -> Any:
    return import_package("textarena")
