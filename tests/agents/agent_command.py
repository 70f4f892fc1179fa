"""An agent that runs as a separate program. Its arguments select its behavior; `ask` is the success case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


def post(url: str, body: dict[str, object], key: str = "OPENAI_API_KEY") -> None:
    headers = {"authorization": f"Bearer {os.environ[key]}", "content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()


def main(order: str, *rest: str) -> None:
    if order in ("ask", "reward", "leave"):
        post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", {"model": "default", "messages": QUESTION})
    if order == "reward":
        post(f"{os.environ['AGENTLOOP_SESSION_URL']}/reward", {"reward": 0.125}, "AGENTLOOP_SESSION_KEY")
    if order == "leave":  # a background process keeps running
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", rest[0]])
    if order == "fail":
        print("first line\nno such luck", file=sys.stderr)
        sys.exit(3)
    if order == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", rest[0]])
        time.sleep(60)
    if order == "show":
        document = {"environment": dict(os.environ), "arguments": rest}
        with open(rest[0], "w") as file:
            json.dump(document, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
