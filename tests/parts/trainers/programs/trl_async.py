"""Trains the shipped policy with TRL's AsyncGRPOTrainer on a service; prints its observations as one JSON line.

python trl_async.py URL NUM_STEPS; run with the folder `examples` on the path, which has the stand-in for CPU.
"""

from __future__ import annotations

import json
import queue
import sys
import tempfile
import threading
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_on_cpu import use_cpu

from agentloop.client.rollout import load_tasks
from agentloop_trainers.batches import TrainingRow
from agentloop_trainers.trl import AsyncRollouts, BufferedRow

ROOT = Path(__file__).parents[4]
POLICY = ROOT / "examples" / "tiny_policy" / "v0"
NUM_RECOMPUTED = 48  # rows


class Taken(queue.Queue):
    """A buffer that also stores the rows that the trainer took, with the trainer's version at that time."""

    def __init__(self) -> None:
        super().__init__(1024)
        self.samples: list[tuple[object, int]] = []
        self.trainer: AsyncGRPOTrainer | None = None

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        sample = super().get(block, timeout)
        if self.trainer is not None:
            self.samples.append((sample, self.trainer.model_version))
        return sample


class Watched(AsyncRollouts):
    """Rollouts that store a copy of all pushed weights, by the service's version."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.rollout_buffer = Taken()
        self.pushed: dict[int, dict[str, torch.Tensor]] = {}

    def send_weights(self, iterator: object) -> None:
        tensors = [(name, tensor.clone()) for name, tensor in iterator]
        super().send_weights(tensors)
        assert self.version is not None
        self.pushed[self.version] = dict(tensors)


def recomputed(model: torch.nn.Module, weights: dict[str, torch.Tensor], row: TrainingRow) -> np.ndarray:
    """Return transformers' own logprob of every token of a row except the first, under these weights."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    with torch.no_grad():
        logits = model(torch.tensor(row.input_ids[None]).long()).logits[0, :-1].float()
    ids = torch.tensor(row.input_ids[1:]).long()
    return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].numpy()


def k3(log_ratio: np.ndarray) -> float:
    return float(np.mean(np.exp(log_ratio) - 1 - log_ratio))


def compare(rollouts: Watched, rows: list[TrainingRow]) -> dict[str, float]:
    """Compare recorded and recomputed logprobs: under the version of each token, and under a neighboring one."""
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    own, other = [], []
    for row in rows:
        for version in np.unique(row.versions[row.mask]):
            at = np.flatnonzero(row.mask & (row.versions == version))
            own.append(recomputed(model, rollouts.pushed[version], row)[at - 1] - row.logprobs[at])
            wrong = max(rollouts.pushed) if version == min(rollouts.pushed) else min(rollouts.pushed)
            other.append(recomputed(model, rollouts.pushed[wrong], row)[at - 1] - row.logprobs[at])
    differences = np.concatenate(own)
    return {
        "num_tokens": len(differences),
        "max_difference": float(np.abs(differences).max()),
        "k3": k3(differences),
        "k3_of_another_version": k3(np.concatenate(other)),
    }


def main(url: str, num_steps: int) -> None:
    use_cpu()
    assert [one.name for one in fields(BufferedRow)] == [one.name for one in fields(RolloutSample)]
    torch.set_num_threads(1)
    kept: list[TrainingRow] = []
    groups: list[int] = []

    def keep(group: object, rows: list[TrainingRow]) -> None:
        kept.extend(rows)
        groups.append(len(group))

    tasks = load_tasks(ROOT / "examples" / "data" / "tasks.jsonl")[:32]
    rollouts = Watched(
        url, tasks, num_generations=4, groups_in_flight=8, max_staleness=3, run_id="trl", on_group=keep
    )
    config = AsyncGRPOConfig(
        tempfile.mkdtemp(),
        max_steps=num_steps,
        max_staleness=3,
        learning_rate=1e-4,
        token_budget=4096,
        logging_steps=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        heartbeat_stale_after_s=60,
    )
    trainer = AsyncGRPOTrainer(
        str(POLICY),
        args=config,
        train_dataset=rollouts.dataset(),
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )
    rollouts.rollout_buffer.trainer = trainer
    before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}
    trainer.train()
    taken = rollouts.rollout_buffer.samples
    offset = rollouts.version - trainer.model_version
    by_ids = {(row.input_ids.astype("int64").tobytes(), row.logprobs.tobytes()): row for row in kept}
    rows = [by_ids[sample.input_ids.tobytes(), sample.old_log_probs.tobytes()] for sample, _ in taken]
    wrong_versions = sum(
        sample.model_version != row.oldest_version - offset for (sample, _), row in zip(taken, rows, strict=True)
    )
    staleness = [version - sample.model_version for sample, version in taken]
    recomputed_rows = [row for row in rows if len(set(row.versions[row.mask])) > 1][: NUM_RECOMPUTED // 2]
    recomputed_rows += [row for row in rows if len(set(row.versions[row.mask])) == 1][-NUM_RECOMPUTED // 2 :]
    rollouts.start()  # restarted under the same run id
    again = rollouts.rollout_buffer.get(timeout=60)
    rollouts.destroy()
    print(
        json.dumps(
            {
                "history": trainer.state.log_history,
                "versions": sorted(rollouts.pushed),
                "num_taken": len(taken),
                "num_mixed": sum(len(set(row.versions[row.mask])) > 1 for row in rows),
                "wrong_versions": wrong_versions,
                "staleness": [min(staleness), max(staleness)],
                "group_sizes": sorted(set(groups)),
                "moved": max(
                    float((tensor.detach() - before[name]).abs().max())
                    for name, tensor in trainer.model.named_parameters()
                ),
                "recomputed": compare(rollouts, recomputed_rows),
                "again": int(again.model_version),
                "is_empty": rollouts.rollout_buffer.empty(),
                "threads": [thread.name for thread in threading.enumerate() if "agentloop" in thread.name],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
