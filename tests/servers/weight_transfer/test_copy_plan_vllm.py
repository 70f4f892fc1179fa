"""Plans of vLLM's own models, one process and two tensor-parallel ones, against vLLM's own loading; no engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

MODELS = ("moe", "spread_moe", "tied", "untied", "llama")


def start_rank(rank: int, num_ranks: int, port: int, folder: Path) -> subprocess.Popen[str]:
    arguments = [str(argument) for argument in (rank, num_ranks, port, folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.servers.weight_transfer.plan_rank", *arguments],
        cwd=Path(__file__).parents[3],
        # The identifier that ranks share, which vLLM's own worker sets where its CPU kernels can use it.
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """Run `plan_rank.py`. Results by rank: "1/0" for one process, "2/0" and "2/1" for two tensor-parallel ones."""
    processes: dict[str, tuple[Path, subprocess.Popen[str]]] = {}
    try:
        for num_ranks in (1, 2):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            for rank in range(num_ranks):
                folder = tmp_path_factory.mktemp("rank")
                processes[f"{num_ranks}/{rank}"] = folder, start_rank(rank, num_ranks, port, folder)
        found = {}
        for key, (folder, process) in processes.items():
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output[-4000:]
            found[key] = json.loads((folder / "found.json").read_text())
        yield found
    finally:
        for _, process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", ["1/0", "2/0", "2/1"])
def test_a_plan_does_exactly_what_vllms_loader_does(ranks: dict[str, Any], rank: str, model: str) -> None:
    found = ranks[rank][model]
    assert found["num_parameters"] > 15
    assert found["differing"] == []
    assert found["is_unchanged"]
    others_experts = found["unused"]
    assert bool(others_experts) is (model == "spread_moe" and rank != "1/0")
    assert all(".mlp.experts." in name for name in others_experts)
    assert found["num_checked"] == found["num_copies"]
    assert found["unnoticed"] == found["unused"]
    has_padding = rank != "2/0"  # 250 ids in 256 rows: padding on the last rank
    assert (found["num_fills"] > 0) is has_padding
    assert (found["num_copied"] < found["num_elements"]) is has_padding


def test_two_ranks_share_the_checkpoint(ranks: dict[str, Any]) -> None:
    whole, *halves = (ranks[rank]["llama"]["num_copied"] for rank in ("1/0", "2/0", "2/1"))
    assert all(half < 0.6 * whole for half in halves)
    assert sum(halves) > whole  # the norms are on both ranks


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_of_another_model_is_refused(ranks: dict[str, Any], model: str) -> None:
    for rank in ranks.values():
        assert "layers.1.self_attn.qkv_proj.weight has" in rank[model]["missing"]
        assert "layers.1.nose" in rank[model]["unknown"]
        assert len(rank[model]["unknown"]) < 200


@pytest.mark.parametrize("model", MODELS)
def test_layers_that_compute_with_packed_weights_are_refused(ranks: dict[str, Any], model: str) -> None:
    for rank in ranks.values():
        assert "computes with a packed copy" in rank[model]["after_processing"]


def test_experts_in_another_layout_are_refused(ranks: dict[str, Any]) -> None:
    for rank in ranks.values():
        experts = rank["moe"]["experts"]
        assert f"{experts['name']}.w13_weight does not hold" in experts["swapped"]
        assert f"{experts['name']} stores its experts in the layout of CPU" in experts["packed"]


def test_quantised_layers_are_staged_as_vllm_quantises_them(ranks: dict[str, Any]) -> None:
    found = ranks["1/0"]["quantised"]
    assert len(found["layers"]) == 8
    assert found["is_unchanged"]
    assert found["is_untouched"]
    assert "qkv_proj.weight does not hold what its quantised" in found["of_another_version"]
    assert found["num_checked"] > 20
    assert found["num_parameters"] > 20
    assert found["differing"] == []


def test_a_load_of_quantised_layers_is_compared_through_their_scales(ranks: dict[str, Any]) -> None:
    found = ranks["1/0"]["quantised"]
    assert found["num_compared"] == [15, 0]
    assert "layer model.layers.1.mlp.down_proj does not hold" in found["one_old"]


def test_scales_that_ranks_agree_on_are_outside_of_plans(ranks: dict[str, Any]) -> None:
    for rank in ("2/0", "2/1"):
        assert ranks[rank]["quantised"]["layers"] == []
        assert "quantised or re-laid out (Fp8PtpcOnlineLinearMethod)" in ranks[rank]["quantised"]["refused"]
