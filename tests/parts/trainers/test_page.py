"""The GRPO loop of docs/guides/trainers.md, verbatim, against the whole service with simulated replicas.

The table of docs/guides/contracts.md, which a run of the contract suite writes, is checked too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from agentloop.client.client import RolloutClient
from agentloop.client.rollout import load_tasks
from tests.parts.trainers.contract_clients import BEGIN, END, PAGE, ROOT, table
from tests.support.service.whole_service import simulated_config, whole_service

VOCABULARY = 1024


class Bigrams(torch.nn.Module):
    """Logits of the next token that depend on the last token only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))

    def forward(self, ids: torch.Tensor) -> Any:
        return type("Output", (), {"logits": self.table[ids]})


@pytest.mark.slow
async def test_the_pages_loop_trains_and_pushes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "trainers.md").read_text(encoding="utf-8")
    [loop] = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(loop, "docs/guides/trainers.md", "exec"), found)
    tasks, model = load_tasks(ROOT / "examples" / "data" / "tasks.jsonl")[:2], Bigrams()
    async with whole_service(simulated_config(mode="standalone"), tmp_path) as url:
        async with RolloutClient(url) as client:
            before = (await client.status()).weight_version or 0
        rewards = await found["train"](url, model, tasks, num_steps=2, num_samples=4, learning_rate=0.1)
        async with RolloutClient(url) as client:
            assert (await client.status()).weight_version == before + 2
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)


def test_the_table_of_what_was_run_has_the_suites_clients_in_their_versions() -> None:
    written = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert written == table(lambda *_: "yes"), "run `make test-contracts`"
