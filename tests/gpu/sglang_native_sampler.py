"""SGLang's own sampler compared with `SamplingParams`: its sampled tokens and logprobs, on the shipped policy.

    python -m tests.gpu.sglang_native_sampler [--out FOLDER/native.json]

`agentloop_sglang/sampler.py` is needed as long as a row of the table is wrong. A stock `sglang.Engine` runs with
each parameter, and every sampled token is looked up in the distribution that `tests/contract/reference.py` computes
from transformers' logits. The table counts tokens that this distribution excludes; the difference is the mean
absolute one of the other tokens' logprobs, in nats (about 0.01 is bfloat16's).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang import Engine
from transformers import AutoModelForCausalLM

from agentloop.values.sampling import TurnSampling
from tests.benchmarks.report import finish, table
from tests.contract.reference import sampled_logprobs

MODEL = Path(__file__).parents[2] / "examples" / "tiny_policy" / "v0"
PROMPT = list(range(300, 380))
NUM_REQUESTS, NUM_TOKENS = 32, 48
SLACK = 0.05  # nats by which the two sides' cuts may differ
MAX_DIFFERENCE = 0.05  # mean absolute, in nats
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "top_p 0.6": {"top_p": 0.6},
    "top_k 4": {"top_k": 4},
    "min_p 0.2": {"min_p": 0.2},
    "frequency_penalty 1": {"frequency_penalty": 1.0},
    "presence_penalty 1": {"presence_penalty": 1.0},
    "repetition_penalty 1.4": {"repetition_penalty": 1.4},
}


def judged(model: Any, sampling: TurnSampling, answers: list[dict[str, Any]]) -> tuple[int, float]:
    """Return the number of excluded sampled tokens, and the mean difference of the others' logprobs."""
    excluded, differences = 0, []
    for answer in answers:
        given = answer["meta_info"]["output_token_logprobs"]
        reply = [int(token_id) for _, token_id, *_ in given]
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + reply], device=model.device)).logits[0].double().cpu().numpy()
        for place, (logprob, token_id, *_) in enumerate(given):
            row = logits[len(PROMPT) + place - 1]
            every = np.ones(len(row), dtype=bool)
            exact = sampled_logprobs(row, sampling, PROMPT, reply[:place], every)[token_id]
            if np.isfinite(exact):
                differences.append(abs(exact - logprob))
            else:
                generous = sampled_logprobs(row, sampling, PROMPT, reply[:place], every, slack=SLACK)[token_id]
                excluded += not np.isfinite(generous)
    return excluded, float(np.mean(differences))


def main() -> None:
    """Sample, compare and print. The exit status is 1 if SGLang's own sampler is exact, and ours can be removed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engine = Engine(
        model_path=str(MODEL),
        skip_tokenizer_init=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        mem_fraction_static=0.3,
        log_level="error",
    )
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to("cuda").eval()
    rows, wrong = [], []
    for name, asked in SETTINGS.items():
        answers = engine.generate(
            input_ids=[PROMPT] * NUM_REQUESTS,
            sampling_params={"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, **asked},
            return_logprob=True,
        )
        excluded, difference = judged(model, TurnSampling(**asked), answers)
        if excluded or difference > MAX_DIFFERENCE:
            wrong.append(name)
        rows.append((name, f"{excluded} of {NUM_REQUESTS * NUM_TOKENS}", f"{difference:.4f}"))
    engine.shutdown()
    shown = {"": table(("asked", "excluded", "difference"), rows)}
    finish("SGLang's own sampler", shown, {"rows": rows, "wrong": wrong}, options.out)
    sys.exit(0 if wrong else 1)


if __name__ == "__main__":
    main()
