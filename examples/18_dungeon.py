"""A text game: rooms, locked doors and their keys, another map for each task, and a reward for progress.

agentloop try examples.18_dungeon:Dungeon --task 3
agentloop rollout --environment examples.18_dungeon:Dungeon --samples 8
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from random import Random

from agentloop.errors import ToolError
from agentloop.rollout import EndEpisode, Environment, ScriptedTurn, call, tool
from agentloop.score import Score
from agentloop.types import Limits, Message, RolloutTask

GOAL = 'You are in a dungeon. Find its treasure. Actions: "look", "go north", "take red key", "unlock east".'
NAMES = ("hall", "cellar", "crypt", "library", "kitchen", "armoury", "chapel", "gallery", "stable", "well")
STEPS = {"north": -1j, "south": 1j, "east": 1, "west": -1}
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
STAGES = ("red key", "red door", "blue key", "blue door", "treasure")


class Dungeon(Environment):
    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        opening, limits = (Message("user", GOAL),), Limits(max_turns=40)
        for number in range(100):
            yield RolloutTask(f"dungeon-{number}", opening, reference=number, limits=limits)

    def open(self, task: RolloutTask) -> None:
        rng = Random(task.reference)
        rooms = rng.sample(NAMES, 8)
        self.doors: dict[str, dict[str, str]] = {room: {} for room in rooms}
        cells, paths = {0j: rooms[0]}, {rooms[0]: [rooms[0]]}  # the path from the first room to each
        for room in rooms[1:]:
            cell, way = rng.choice(
                [(cell, way) for cell in cells for way in STEPS if cell + STEPS[way] not in cells]
            )
            cells[cell + STEPS[way]], near = room, cells[cell]
            self.doors[near][way], self.doors[room][BACK[way]] = room, near
            paths[room] = [*paths[near], room]
        _, first, *_, last = max(paths.values(), key=len)  # three at least, since a room has four doors
        before = [room for room in rooms if first not in paths[room]]
        between = [room for room in rooms if first in paths[room] and last not in paths[room]]
        self.items = {"red key": rng.choice(before), "blue key": rng.choice(between), "treasure": last}
        self.locks = {first: "red", last: "blue"}  # of the doors that lead there
        self.room, self.done = rooms[0], list[str]()

    @tool
    def do(self, action: str) -> str:
        """Do one action, such as "go north", and see what comes of it."""
        verb, _, noun = action.strip().lower().partition(" ")
        near = self.doors[self.room].get(noun, "")
        lock = self._lock(near)
        if verb == "go" and near and not lock:
            self.room = near
        elif verb == "unlock" and lock and f"{lock} key" in self.done:
            self.done = [*self.done, f"{lock} door"]
        elif verb == "take" and noun in self._items():
            self.done = [*self.done, noun]
            if noun == "treasure":
                raise EndEpisode(reason="the treasure is found")
        elif verb != "look":
            raise ToolError(f"that does not work. {self._view()}")
        return self._view()

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> Score:
        parts = {stage: float(stage in self.done) for stage in STAGES}
        return Score(sum(parts.values()) / len(parts), parts)

    def _view(self) -> str:
        locks = {way: self._lock(room) for way, room in self.doors[self.room].items()}
        ways = [f"{way} ({lock} lock)" if lock else way for way, lock in locks.items()]
        return f"You are in the {self.room}. Doors: {', '.join(ways)}. Here: {', '.join(self._items()) or 'dust'}."

    def _items(self) -> list[str]:
        return [item for item, room in self.items.items() if room == self.room and item not in self.done]

    def _lock(self, room: str) -> str:
        lock = self.locks.get(room, "")
        return "" if f"{lock} door" in self.done else lock

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn]:
        """The shortest way, found by a search over the game itself."""
        game, seen = cls(), set[str]()
        game.open(task)
        queue = [(game, list[ScriptedTurn]())]
        for game, turns in queue:
            actions = [f"{verb} {way}" for verb in ("go", "unlock") for way in game.doors[game.room]]
            for action in (*actions, *(f"take {item}" for item in game._items())):
                after, way = copy(game), [*turns, call("do", action=action)]
                if action == "take treasure":
                    return way
                with suppress(ToolError):
                    if (state := f"{after.do(action)} {after.done}") not in seen:
                        seen.add(state)
                        queue.append((after, way))
        raise ValueError("this dungeon has no way to its treasure")
