"""A wiki search game: questions whose answer is two or three articles away, over a corpus that no model knows.

agentloop try examples.17_wiki:Wiki --task 1
agentloop rollout --environment examples.17_wiki:Wiki --samples 8
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from agentloop.errors import ToolError
from agentloop.rollout import EndEpisode, Environment, ScriptedTurn, call, tool
from agentloop.score import Score
from agentloop.types import Limits, Message, RolloutTask

WIKI = json.loads((Path(__file__).parent / "data" / "wiki.json").read_text(encoding="utf-8"))
ARTICLES: dict[str, str] = WIKI["articles"]
RULES = "Find the answer in the wiki, which is about a country that you have never heard of. Then call `answer`."


class Wiki(Environment):
    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        for number, asked in enumerate(WIKI["questions"]):
            opening = (Message("system", RULES), Message("user", asked["question"]))
            yield RolloutTask(f"wiki-{number}", opening, reference=asked["answer"], limits=Limits(max_turns=12))

    def open(self, task: RolloutTask) -> None:
        self.read_titles = list[str]()

    @tool
    def search(self, query: str) -> list[str]:
        """Return the titles of up to five articles that have words of the query, the best first."""
        if not (words := re.findall(r"\w+", query)[:20]):
            raise ToolError("the query has no word")
        match = " OR ".join(f'"{word}"' for word in words)
        found = index().execute("SELECT title FROM wiki WHERE wiki MATCH ? ORDER BY rank LIMIT 5", (match,))
        return [title for (title,) in found.fetchall()]

    @tool
    def read(self, title: str) -> str:
        """Return the text of an article."""
        if title not in ARTICLES:
            raise ToolError("there is no article of this title: search for one")
        self.read_titles.append(title)
        return ARTICLES[title]

    @tool
    def answer(self, text: str) -> None:
        """Give the answer, in a few words, which ends the game."""
        is_right = float(normalised(text) == normalised(self.task.reference))
        raise EndEpisode(Score(is_right, metrics={"articles": len(self.read_titles)}), "answered")

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        return 0.0  # it ended without an answer

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn]:
        titles = WIKI["questions"][int(task.task_id.removeprefix("wiki-"))]["articles"]
        steps = [(call("search", query=title), call("read", title=title)) for title in titles]
        return [*(turn for step in steps for turn in step), call("answer", text=f"The {task.reference}.")]


@cache
def index() -> sqlite3.Connection:
    """The articles by their words, once a process; SQLite itself lets one thread in at a time."""
    made = sqlite3.connect(":memory:", check_same_thread=False)
    made.execute("CREATE VIRTUAL TABLE wiki USING fts5(title, text, tokenize = porter)")
    made.executemany("INSERT INTO wiki VALUES (?, ?)", ARTICLES.items())
    return made


def normalised(text: str) -> str:
    """The words of an answer in lower case, without an article before them."""
    return " ".join(re.findall(r"\w+", re.sub(r"^\W*(the|an?)\b", "", text.lower())))
