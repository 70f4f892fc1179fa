"""A task of a NeMo Gym resources server as a rollout: this program is the agent, and a session of ours its model.

NeMo Gym lives in an environment of its own (0.4.0 asks for Python 3.12), and says the server's URL at its start:

    gym env start --resources-server workplace_assistant --model-type openai_model --model default \
        --model-url http://127.0.0.1:9/v1 --model-api-key none
    agentloop rollout --tasks tasks.jsonl --agent-command "python examples/16_nemo_gym.py URL example.jsonl"

A task's id ends with a row of the file, `workplace/3`. Its tools are the server's, its reward is what `/verify`
says; the steps are those of NeMo Gym's own `simple_agent`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

MAX_STEPS = 6


def run(row: dict[str, Any], server: httpx.Client) -> float:
    """Let the policy work on one row, and return the reward that the server gives it."""
    server.post("/seed_session", json=row).raise_for_status()  # its cookie is this episode's state
    model, asked, said = OpenAI(), row["responses_create_params"], []  # its URL and key are the session's
    shown = [{"role": "user", "content": asked["input"]}] if isinstance(asked["input"], str) else asked["input"]
    fields = {name: value for name, value in asked.items() if value is not None and name not in ("input", "model")}
    for _ in range(MAX_STEPS):
        answer = model.responses.create(**fields, model="default", input=[*shown, *said])
        said += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        for call in calls:
            try:
                result = server.post(f"/{call.name}", json=json.loads(call.arguments)).text
            except json.JSONDecodeError as error:
                result = json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
            said.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not calls or answer.incomplete_details:
            break
    verified = server.post("/verify", json={**row, "response": {**answer.model_dump(), "output": said}})
    return float(verified.raise_for_status().json()["reward"])


def main() -> None:
    """Run the task that `agentloop rollout` put into the environment, and post its reward to its session."""
    url, rows = sys.argv[1:]
    number = int(json.loads(os.environ["AGENTLOOP_TASK"])["task_id"].rpartition("/")[2])
    with httpx.Client(base_url=url, timeout=60.0) as server:
        reward = run(json.loads(Path(rows).read_text().splitlines()[number]), server)
    headers = {"authorization": f"Bearer {os.environ['AGENTLOOP_SESSION_KEY']}"}
    posted = httpx.post(f"{os.environ['AGENTLOOP_SESSION_URL']}/reward", json={"reward": reward}, headers=headers)
    posted.raise_for_status()


if __name__ == "__main__":
    main()
