"""The replay of routed experts in transformers, by which `tests.gpu.routes` measures the mismatch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentloop.types import TokenPath
from agentloop.values.aux_rows import AuxKind, AuxRows
from agentloop_verify.transformers_reference import ReferenceModel
from tests.benchmarks.shapes import SHAPES, make_tensors
from tests.gpu.policy import write_policy
from tests.gpu.routes import Replay, replayed_logprobs

pytestmark = pytest.mark.engine  # imports transformers


def test_a_models_own_experts_change_nothing_and_others_do(tmp_path: Path) -> None:
    tensors = make_tensors(SHAPES["tiny-moe"], torch.device("cpu"), torch.float32, version=0)
    model = write_policy(SHAPES["tiny-moe"], tensors, tmp_path, max_context_tokens=512, dtype="float32")
    reference = ReferenceModel(model, device="cpu")
    replay, chosen = Replay(reference.model), list[torch.Tensor]()
    routers = [one for name, one in reference.model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [one.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for one in routers]
    ids = np.random.default_rng(0).integers(16, 1000, 60).astype(np.int32)
    own = reference.logprobs(ids, range(10, 60))
    for hook in hooks:
        hook.remove()
    rows = torch.stack(chosen, 1).numpy().astype(np.uint8)
    assert rows.shape == (59, replay.num_layers, 2)
    aux = {AuxKind.ROUTED_EXPERTS: (AuxRows(0, rows.ravel(), rows.shape[1:]).packed(),)}
    path = TokenPath(ids[:10], ids[10:], np.ones(50, np.bool_), own, (), (), aux=aux)
    by_own, by_recorded, by_others = (replayed_logprobs(reference, replay, path, shift) for shift in (None, 0, 1))
    assert np.array_equal(by_own, own)
    assert np.array_equal(by_recorded, own)
    assert np.abs(by_others - own).max() > 0.1
