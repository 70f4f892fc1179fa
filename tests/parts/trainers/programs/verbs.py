"""A contract client as a process that reads one verb per line and answers each with a line of JSON.

python PROGRAM URL PROMPTS
    PROMPTS (JSON): token ids, a list for each call; their text contains the client's name
    stdin: `VERB` or `VERB ARGUMENT`
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

NEVER = 1_000_000
"""A version that is never served."""


def serve(make: Callable[[str, list[list[int]]], Any]) -> None:
    """Make a client from the command line with `make`, and run the verbs from stdin as methods of the client."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # a package's output must not mix with the answers
        client = make(sys.argv[1], json.loads(sys.argv[2]))
        for line in sys.stdin:
            verb, *arguments = line.split()
            try:
                said = getattr(client, verb)(*arguments)
            except Exception:
                said = {"error": traceback.format_exc()}
            print(json.dumps(said), file=answers, flush=True)


def frozen(call: Callable[[], Any], resume: Callable[[], Any]) -> Any:
    """Make a call that a pause delays until `resume`. Returns its answer."""
    answers: list[Any] = []
    calling = threading.Thread(target=lambda: answers.append(call()))
    calling.start()
    time.sleep(0.5)
    assert not answers, "the pause held no call"
    resume()
    calling.join()
    return answers[0]


def error_of(call: Callable[[], Any]) -> dict[str, str]:
    """Make a call that must fail. Returns its error as text."""
    try:
        call()
    except Exception as error:
        return {"refused": repr(error)}
    raise AssertionError("a call was answered under weights that it does not accept")
