"""Train the shipped policy from scratch and write its two checkpoints, `v0` (early) and `v1` (last).

With no arguments: tokenizer, data, training, held-out tasks, and a check by sampling. `--make-data FILE` stops
after the data, `--data FILE` starts from it: the training half imports nothing of agentloop. Expected success
is the mean probability of a whole good held-out dialogue: what sampling at temperature 1 reaches at least.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from folder import CONFIG, TURN_END, TURN_START

Array: TypeAlias = npt.NDArray[Any]

HERE = Path(__file__).parent
SEED = 0
NUM_DIALOGUES = 400_000
V0_EXPECTED_SUCCESS = 0.3
WIDTHS = (192, 256, 320, 384)  # a dialogue is padded to the next of these
CHECK_EVERY = 25


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to train."""

    num_steps: int
    tokens_per_step: int
    peak_learning_rate: float
    warmup_steps: int = 200
    weight_decay: float = 0.05

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        if step < self.warmup_steps:
            return self.peak_learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.peak_learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def rows_by_width(ids: Array, lengths: Array) -> list[tuple[Array, Array]]:
    """For each width: which dialogues have it, and their ids padded at the right with id 0."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    groups = []
    lower = 0
    for width in WIDTHS:
        chosen = np.flatnonzero((lengths > lower) & (lengths <= width))
        positions = np.arange(width)
        inside = positions < lengths[chosen, None]
        rows = np.where(inside, ids[np.minimum(starts[chosen, None] + positions, len(ids) - 1)], 0)
        groups.append((chosen, rows.astype(np.int16)))
        lower = width
    if int(lengths.max()) > lower:
        raise ValueError(f"a dialogue has {lengths.max()} tokens, more than {lower}")
    return groups


def sampled_mask(rows: Array, turn_start: int, turn_end: int, assistant: int) -> Array:
    """True where the policy samples: an assistant turn after its header line, with its end token."""
    headers = np.zeros_like(rows)
    headers[:, 3:] = (rows[:, :-3] == turn_start) & (rows[:, 1:-2] == assistant)
    ends = np.zeros_like(rows)
    ends[:, 1:] = rows[:, :-1] == turn_end
    opened = np.cumsum(headers, axis=1)
    last_header = np.maximum.accumulate(np.where(headers > 0, np.arange(rows.shape[1]), -1), axis=1)
    last_end = np.maximum.accumulate(np.where(ends > 0, np.arange(rows.shape[1]), -1), axis=1)
    return (opened > 0) & (last_header >= last_end)


class Trainer:
    """One training run: the model, its data on the device, and the files it saves."""

    def __init__(self, data_file: Path, tokenizer_file: Path, device: str) -> None:
        import torch
        from tokenizers import Tokenizer
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(SEED)
        torch.set_float32_matmul_precision("high")
        self.device = device
        self.rng = np.random.default_rng(SEED)
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.delimiters = [tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)]
        self.delimiters += tokenizer.encode("assistant").ids
        data = np.load(data_file)
        self.train = [self._to_device(rows) for _, rows in rows_by_width(data["ids"], data["lengths"])]
        held_out = rows_by_width(data["val_ids"], data["val_lengths"])
        self.val = [self._to_device(rows) for _, rows in held_out]
        self.val_family = np.concatenate([data["val_family"][chosen] for chosen, _ in held_out])
        self.families = [str(name) for name in data["families"]]
        settings = {name: value for name, value in CONFIG.items() if name not in ("dtype", "architectures")}
        self.model = Qwen3ForCausalLM(Qwen3Config(**settings)).to(device)
        self.compiled = torch.compile(self.model.model, dynamic=False) if device == "cuda" else self.model.model

    def _to_device(self, rows: Array) -> tuple[Any, Any]:
        import torch

        mask = sampled_mask(rows, *self.delimiters)
        return torch.from_numpy(rows).to(self.device), torch.from_numpy(mask).to(self.device)

    def log_probs(self, backbone: Any, rows: Any, mask: Any) -> tuple[Any, Any]:
        """The log-probability of each sampled token, flat, and the row it belongs to."""
        import torch
        import torch.nn.functional as F

        rows = rows.long()
        mask = mask[:, 1:]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            hidden = backbone(input_ids=rows, use_cache=False).last_hidden_state[:, :-1]
            logits = self.model.lm_head(hidden[mask])
        loss = F.cross_entropy(logits.float(), rows[:, 1:][mask], reduction="none")
        return -loss, mask.nonzero()[:, 0]

    def expected_success(self) -> Array:
        """The probability of each held-out dialogue."""
        import torch

        found = []
        with torch.no_grad():
            for rows, mask in self.val:
                log_probs, row = self.log_probs(self.model.model, rows, mask)
                total = torch.zeros(len(rows), device=self.device).index_add_(0, row, log_probs)
                found.append(total.exp().cpu().numpy())
        return np.concatenate(found)

    def fit(self, schedule: Schedule, early: Path, last: Path) -> None:
        """Train to the end; save `early` when expected success first reaches V0_EXPECTED_SUCCESS, and `last`."""
        import torch

        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [
            {"params": decayed, "weight_decay": schedule.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=self.device == "cuda")
        has_early = False
        started = time.monotonic()
        for step in range(schedule.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate(step)
            loss = -self.log_probs(self.compiled, *self._batch(schedule.tokens_per_step))[0].mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % (500 if has_early else CHECK_EVERY) == 0 or step + 1 == schedule.num_steps:
                success = self.expected_success()
                self._report(step + 1, loss.item(), success, time.monotonic() - started)
                if not has_early and success.mean() >= V0_EXPECTED_SUCCESS:
                    has_early = True
                    self._save(early)
        self._save(last)

    def _batch(self, num_tokens: int) -> tuple[Any, Any]:
        """Random rows of one random width."""
        import torch

        sizes = np.array([rows.numel() for rows, _ in self.train])
        rows, mask = self.train[self.rng.choice(len(sizes), p=sizes / sizes.sum())]
        chosen = torch.from_numpy(self.rng.integers(len(rows), size=num_tokens // rows.shape[1])).to(self.device)
        return rows[chosen], mask[chosen]

    def _report(self, step: int, loss: float, success: Array, elapsed_s: float) -> None:
        by_family = " ".join(
            f"{name} {success[self.val_family == index].mean():.3f}" for index, name in enumerate(self.families)
        )
        print(
            f"step {step} {elapsed_s:.0f} s loss {loss:.5f} success {success.mean():.4f}: {by_family}", flush=True
        )

    def _save(self, file: Path) -> None:
        import torch
        from safetensors.torch import save_file

        weights = {name: value.to(torch.bfloat16).cpu() for name, value in self.model.state_dict().items()}
        del weights["lm_head.weight"]  # tied to the embedding
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in weights.items()}, file, metadata={"format": "pt"})
        print(f"saved {file.parent.name}/{file.name}", flush=True)


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make-data", type=Path, metavar="FILE", help="write tokenizer, tasks and data; stop")
    parser.add_argument("--data", type=Path, metavar="FILE", help="train from this file; measure nothing")
    parser.add_argument("--out", type=Path, default=HERE, help="with --data: where v0/ and v1/ get their weights")
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--tokens-per-step", type=int, default=131_072)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dialogues", type=int, default=NUM_DIALOGUES)
    return parser.parse_args()


def make_inputs(data_file: Path, num_dialogues: int) -> None:
    """Write the tokenizer and template of both folders, the held-out tasks, and the training data."""
    from data import make_data, make_tokenizer
    from tasks import write_held_out_tasks

    make_tokenizer(HERE / "v0", SEED)
    shutil.copytree(HERE / "v0", HERE / "v1", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    write_held_out_tasks(HERE.parent / "data" / "tasks.jsonl")
    make_data(data_file, HERE / "v0" / "tokenizer.json", num_dialogues, SEED)


def main() -> None:
    """Run the halves that the command line asks for."""
    import torch

    arguments = parsed_arguments()
    data_file = arguments.make_data or arguments.data or HERE.parents[1] / "runs" / "tiny_policy.npz"
    if not arguments.data:
        make_inputs(data_file, arguments.dialogues)
    if arguments.make_data:
        return
    schedule = Schedule(arguments.steps, arguments.tokens_per_step, arguments.learning_rate)
    trainer = Trainer(data_file, HERE / "v0" / "tokenizer.json", "cuda" if torch.cuda.is_available() else "cpu")
    v0, v1 = (arguments.out / version / "model.safetensors" for version in ("v0", "v1"))
    trainer.fit(schedule, v0, v1)
    if arguments.data is None:
        from measure import print_success

        for version in ("v0", "v1"):
            print_success(HERE / version)


if __name__ == "__main__":
    main()
