"""Repair a repository: the policy clones it in a sandbox, runs its tests and patches it; the answers are hidden.

    workers:
      tools: {shell: shell}

python examples/15_repair.py http://127.0.0.1:8000
"""

import asyncio
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from agentloop.client import RolloutClient
from agentloop.score import Score
from agentloop.types import Message, RolloutTask
from agentloop_tools.shell import ShellSession

FILES = {
    "src/slug.py": '''import re


def slug(title):
    """Make a title a part of a URL: lower case, words joined by single dashes."""
    return re.sub("[^a-z0-9]", "-", title.lower())
''',
    "src/test_slug.py": """from unittest import TestCase

from slug import slug


class SlugTest(TestCase):
    def test_words(self):
        self.assertEqual(slug("Two words"), "two-words")

    def test_a_run_of_signs_is_one_dash(self):
        self.assertEqual(slug("One --- two"), "one-two")
""",
}
SETUP = """
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q src && git -C src add . && git -C src commit -qm Slugs && git clone -q --bare src slug.git && rm -rf src
"""
TASK = RolloutTask(
    task_id="repair",
    messages=(
        Message("user", "Clone /task/slug.git to /task/slug, see why its tests fail, and repair slug.py there."),
    ),
    tools=("shell",),
    tool_setup={"shell": {"files": FILES, "command": SETUP}},
    reward="examples.15_repair:patch_works",
)
HIDDEN = {"a b": "a-b", "A -- b!": "a-b", "  a,b ": "a-b", "a-1": "a-1"}
ASK = """import sys
sys.path.append("/task/slug")
from slug import slug
for title in sys.argv[1:]:
    print(slug(title))
"""
TEST = """import sys, unittest
sys.path.append("/task/slug")
{tests}
is_right = unittest.main(argv=["test"], exit=False).result.wasSuccessful()
print("AGENTLOOP_VERDICT" if is_right else "")
"""


async def patch_works(task: RolloutTask, messages: Sequence[Message], tools: Mapping[str, ShellSession]) -> Score:
    """Score the patched file alone: by the repository's own tests, and by titles whose slugs stay in this process.

    Both run in a copy of the sandbox. Tests of the policy's own making do not count.
    """
    shell, titles = tools["shell"], shlex.join(HIDDEN)
    answers = await shell.grade(f"python3 ask.py {titles}", {"ask.py": ASK})
    tests = await shell.grade("python3 test.py", {"test.py": TEST.format(tests=FILES["src/test_slug.py"])})
    is_right = answers.output.decode(errors="replace").splitlines() == list(HIDDEN.values())
    parts = {"hidden_titles": float(is_right), "own_tests": float(tests.has_passed)}
    return Score(min(parts.values()), components=parts)


async def main(url: str) -> None:
    async with RolloutClient(url) as client:
        rollout = await client.submit([TASK], num_samples=8)
        print(Counter([trajectory.reward async for trajectory in rollout]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
