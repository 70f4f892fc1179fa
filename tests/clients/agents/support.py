"""Helpers for all client scripts. They use only the standard library: scripts run in the client's environment.

A script gets the service's URL, opens a session for each conversation, talks to it as users of that client do, and
prints one JSON line per session: its name, its id, and the splits that its trajectory must have.
"""

import json
import sys
import urllib.request
from collections.abc import Sequence
from typing import Literal

QUESTION = "A ticket costs 49 dollars. What do 655 tickets cost with a fee of 249 dollars?"
Expression = Literal["655 * 49", "655 * 49 + 249"]
"""The tool's argument. The shipped policy has never seen these frameworks' prompts: if a call is forced, the
schema keeps its argument short, so that a complete tool loop follows."""


class Session:
    """A session of the service."""

    def __init__(self, url: str, label: str, splits: Sequence[str] = ()) -> None:
        request = urllib.request.Request(
            f"{url}/sessions", data=b"{}", headers={"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            made = json.load(answer)
        self.label = label
        self.splits = list(splits)
        self.session_id = made["session_id"]
        self.base_url = made["base_url"]  # ends in /v1
        self.api_key = made["api_key"]
        self.control_key = made["control_key"]
        self.num_calls = 0

    def report(self, num_turns: int, **facts: object) -> None:
        """Print the conversation: at least `num_turns` model calls, and the results of the script's own checks."""
        line = {"label": self.label, "session_id": self.session_id, "num_turns": num_turns, "splits": self.splits}
        print(json.dumps({**line, "control_key": self.control_key, **facts}), flush=True)


def service_url() -> str:
    """Return the command line's only argument."""
    return sys.argv[1]


def calculate(expression: str) -> str:
    """Return the tool's answer: sums and products of whole numbers, so that a policy cannot misuse it."""
    try:
        if len(expression) > 100 or not set(expression) <= set("0123456789+-*/(). "):
            raise ValueError(expression)
        return str(eval(expression, {"__builtins__": {}}))
    except Exception as error:
        return f"Error: {type(error).__name__}"
