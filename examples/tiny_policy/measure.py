"""Success of a checkpoint on the held-out tasks: the real renderer, parser and tools, and sampling by transformers.

`python examples/tiny_policy/measure.py FOLDER [--samples 2] [--temperature 1.0]` prints it by family.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentloop.client import load_tasks
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.port import TurnEnd
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.rollout import Toolbox, exact_match
from agentloop.types import Message, RolloutTask
from agentloop_tools.calculator import calculator
from agentloop_tools.python import PythonTool

MAX_TURNS = 6
MAX_TOKENS_PER_TURN = 64
MAX_RESPONSE_BYTES = 512
BATCH = 256
TASKS_FILE = Path(__file__).parents[1] / "data" / "tasks.jsonl"


@dataclass(slots=True)
class Sample:
    """One conversation as it grows; `ids` is the next prompt."""

    task: RolloutTask
    ids: list[int]
    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0
    num_sampled: int = 0
    outcome: str = "running"


def generate(model: Any, prompts: list[list[int]], stop: int, temperature: float) -> list[list[int]]:
    """Sample one turn for each prompt; the stop token is the last id unless the turn was cut. 0 is greedy."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.no_grad():
        out = model.generate(ids, attention_mask=attention, max_new_tokens=MAX_TOKENS_PER_TURN, **sampling)
    turns = out[:, width:].tolist()
    return [turn[: turn.index(stop) + 1] if stop in turn else turn for turn in turns]


async def roll_out(folder: Path, tasks: list[RolloutTask], temperature: float) -> list[Sample]:
    """Run every task to an answer or a limit."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    renderer, parser, toolbox = (
        TemplateRenderer.from_directory(folder),
        get_parser("hermes"),
        Toolbox([calculator, PythonTool()]),
    )
    stop = renderer.stop_token_ids[0]

    async def extend(sample: Sample, turn: list[int]) -> None:
        sample.num_turns += 1
        sample.num_sampled += len(turn)
        is_closed = turn[-1] == stop
        definitions = toolbox.definitions(sample.task.tools)
        parsed = parser.parse(renderer.decode_with_offsets(turn[:-1] if is_closed else turn), definitions, 0)
        sample.messages.append(Message("assistant", parsed.content, parsed.calls))
        if not is_closed or not parsed.calls or sample.num_turns == MAX_TURNS:
            sample.outcome = "cut" if not is_closed else "max_turns" if parsed.calls else "answered"
            return
        scope = toolbox.open(sample.task.tools, sample.task.task_id, seed=0)
        results = await scope.run(parsed.calls, MAX_RESPONSE_BYTES)
        await scope.close()
        answers = [Message("tool", result.content, tool_call_id=result.call_id) for result in results]
        sample.messages += answers
        sample.ids += turn + renderer.bridge(answers, definitions, TurnEnd(stop))

    samples = [Sample(task, renderer.render(task.messages, toolbox.definitions(task.tools))) for task in tasks]
    try:
        while running := [sample for sample in samples if sample.outcome == "running"]:
            running.sort(key=lambda sample: len(sample.ids))
            for first in range(0, len(running), BATCH):
                batch = running[first : first + BATCH]
                turns = generate(model, [sample.ids for sample in batch], stop, temperature)
                for sample, turn in zip(batch, turns, strict=True):
                    await extend(sample, turn)
    finally:
        await toolbox.close()
    return samples


def print_success(folder: Path, samples_per_task: int = 2, temperature: float = 1.0) -> None:
    """Roll out the held-out tasks and print what came of them."""
    tasks = [task for task in load_tasks(TASKS_FILE) for _ in range(samples_per_task)]
    samples = asyncio.run(roll_out(folder, tasks, temperature))
    solved: dict[str, list[float]] = {}
    for sample in samples:
        reward = exact_match(sample.task, sample.messages) if sample.outcome == "answered" else 0.0
        solved.setdefault(sample.task.task_id.rsplit("-", 1)[0], []).append(reward)
    rewards = [reward for family in solved.values() for reward in family]
    by_family = " ".join(f"{name} {sum(found) / len(found):.3f}" for name, found in sorted(solved.items()))
    outcomes = dict(Counter(sample.outcome for sample in samples))
    turns = sum(sample.num_turns for sample in samples) / len(samples)
    tokens = sum(sample.num_sampled for sample in samples) / len(samples)
    print(f"{folder.name}: success {sum(rewards) / len(rewards):.3f} at temperature {temperature:g}: {by_family}")
    print(f"  outcomes {outcomes}; {turns:.2f} turns and {tokens:.0f} sampled tokens a trajectory")


def main() -> None:
    """The command line."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    print_success(arguments.folder, arguments.samples, arguments.temperature)


if __name__ == "__main__":
    main()
