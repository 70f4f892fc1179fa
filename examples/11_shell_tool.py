"""A shell in a sandbox, with files from the task and a reward that runs hidden tests on them.

    workers:
      tools: {shell: shell}

python examples/11_shell_tool.py http://127.0.0.1:8000
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence

from agentloop.client import RolloutClient
from agentloop.types import Message, RolloutTask
from agentloop_tools.shell import ShellSession

FILES = {"add.py": "def add(a, b):\n    return a - b\n"}
HIDDEN_TEST = "from add import add\nassert add(2, 3) == 5\nprint('AGENTLOOP_VERDICT')\n"
TASK = RolloutTask(
    task_id="repair",
    messages=(Message("user", "add.py does not add. Repair it."),),
    tools=("shell",),
    tool_setup={"shell": {"files": FILES}},
    reward="examples.11_shell_tool:test_passes",
)


async def test_passes(task: RolloutTask, messages: Sequence[Message], tools: Mapping[str, ShellSession]) -> float:
    """Run the test in a copy of the sandbox. It has passed if its last statement printed its token."""
    ran = await tools["shell"].grade("python3 test_add.py", {"test_add.py": HIDDEN_TEST})
    return float(ran.has_passed)


async def main(url: str) -> None:
    async with RolloutClient(url) as client:
        rollout = await client.submit([TASK], num_samples=4)
        async for trajectory in rollout:
            print(trajectory.stop_reason, trajectory.reward, trajectory.messages[-1].content[:80])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
