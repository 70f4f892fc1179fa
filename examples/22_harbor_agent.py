"""A Harbor agent with one tool, `bash`: its calls are structured, and the service records them token for token.

Harbor imports it by its path, from its own environment (Python 3.12 or later), with the example that runs a
Harbor task as a rollout:

    agentloop rollout --tasks tasks.jsonl --agent-command \
        "harbor/bin/python examples/19_harbor.py TASKS 22_harbor_agent:BashAgent"

The URL and the key are in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import os

import httpx
from harbor.agents.base import BaseAgent

MAX_TURNS, MAX_CHARS, TIMEOUT_S = 20, 8_000, 60
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"name": "bash", "description": "Run a command in the task's container.", "parameters": COMMAND}


class BashAgent(BaseAgent):
    """Calls the model until it answers without a tool call."""

    @staticmethod
    def name() -> str:
        return "agentloop-bash"

    def version(self) -> str:
        return "1"

    async def setup(self, environment) -> None:
        pass

    async def run(self, instruction, environment, context) -> None:
        messages = [{"role": "user", "content": instruction}]
        asked = {"model": "default", "tools": [{"type": "function", "function": BASH}]}
        url, headers = os.environ["OPENAI_BASE_URL"], {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        async with httpx.AsyncClient(headers=headers, timeout=None) as client:
            for _ in range(MAX_TURNS):
                answer = await client.post(f"{url}/chat/completions", json={**asked, "messages": messages})
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    text = await self._ran(environment, call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                if not message.get("tool_calls"):
                    return

    @staticmethod
    async def _ran(environment, arguments: str) -> str:
        """Run a call. What the policy did wrong is its observation, not an error of the trial."""
        try:
            ran = await environment.exec(json.loads(arguments)["command"], timeout_sec=TIMEOUT_S)
        except (ValueError, KeyError, TypeError, TimeoutError) as error:
            return f"error: {error!r}"
        return f"{(ran.stdout or '')[-MAX_CHARS:]}{(ran.stderr or '')[-MAX_CHARS:]}[exit status {ran.return_code}]"
