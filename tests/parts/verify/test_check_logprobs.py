"""`agentloop check-logprobs` on stores whose logprobs the tests computed with the shipped policies."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from agentloop.errors import InvalidRequest
from agentloop.storage.trajectory_store import STORE_NAME
from agentloop.types import FinishReason, TokenPath, Turn, WeightVersionSpan
from agentloop.values.sampling import ConstraintKind, LogprobsMode, TurnSampling
from agentloop_servers.cli.commands import app
from agentloop_verify.check_logprobs import (
    LogprobCheck,
    References,
    check_logprobs,
    parse_versions,
    plain_references,
)
from agentloop_verify.transformers_reference import ReferenceModel
from tests.contract.reference import log_softmax
from tests.support.records.samples import fill_store, make_group, make_trajectory
from tests.support.transfer.adapters import POLICY

torch.set_num_threads(1)  # waiting threads on busy cores slow this down up to 25 times

V0, V1 = POLICY, POLICY.parent / "v1"
NUM = 12  # sampled tokens per turn
PLAIN = TurnSampling()

TEXT = "Let me add 17 and 25 with the calculator, and then say the word unpet to be sure."


def ids_of(text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(V0 / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def path(
    sampling: TurnSampling = PLAIN, versions: tuple[int, int] = (0, 0), ids: list[int] | None = None
) -> TokenPath:
    """Return a path with a turn of two versions, one per half, and two observed tokens."""
    all_ids = ids or ids_of(TEXT)
    prompt, response = all_ids[:4], all_ids[4 : 4 + NUM + 2]
    model = importlib.import_module("tests.contract.policy_model")  # transformers' models, in this process only
    logits = [model.logits_of(str(folder), prompt + response)[3:] for folder in (V0, V1)]
    logprobs, raw = np.zeros(NUM + 2, np.float32), np.zeros(NUM + 2, np.float32)
    temperature = 1.0 if sampling.logprobs_mode is LogprobsMode.RAW else sampling.temperature or 1.0
    for at in range(NUM):
        row = logits[min(versions[2 * at // NUM], 1)][at]
        logprobs[at] = log_softmax(row / temperature)[response[at]]
        raw[at] = log_softmax(row)[response[at]]
    half = NUM // 2
    return TokenPath(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        response_mask=np.arange(NUM + 2) < NUM,
        logprobs=logprobs,
        raw_logprobs=raw if sampling.logprobs_mode is LogprobsMode.BOTH else None,
        weight_versions=(WeightVersionSpan(versions[0], 0, half), WeightVersionSpan(versions[1], half, NUM)),
        turns=(Turn(len(prompt), 0, NUM, FinishReason.STOP, "replica-0", 0, "0", sampling=sampling),),
    )


def store_of(folder: Path, *paths: TokenPath) -> Path:
    records = [make_trajectory("a", number, paths=(one,)) for number, one in enumerate(paths)]
    fill_store(folder / STORE_NAME, {"r": [make_group("a", len(records))]}, records)
    return folder / STORE_NAME


def check(store: Path, limit: int = 100, **by_version: Path) -> LogprobCheck:
    versions = {int(name[1:]): folder for name, folder in by_version.items()}
    return check_logprobs(store, V0, versions, plain_references("cpu", "float32"), max_trajectories=limit)


def test_each_token_is_that_of_its_span_and_of_no_other_version(tmp_path: Path) -> None:
    store = store_of(tmp_path, path(), path(versions=(1, 1)), path(versions=(0, 1)), path(versions=(0, 1)))
    found = check(store, v1=V1)
    by_name = {row.under: row.distance for row in found.rows}
    assert [row.distance.num_tokens for row in found.rows] == [4 * NUM, 2 * NUM, 2 * NUM, 2 * NUM]
    assert found.k3_by_span is not None
    assert found.k3_by_span < 1e-9
    assert by_name["span, mixed"].max_abs_diff < 1e-3
    assert by_name["first, mixed"].k3_kl > 0.01
    assert by_name["last, mixed"].k3_kl > 0.01
    assert found.left_out == {}
    assert (found.num_trajectories, found.num_stored) == (4, 4)


@pytest.mark.parametrize(
    "sampling",
    [
        TurnSampling(temperature=0.5),
        TurnSampling(temperature=0.0, top_p=0.3),
        TurnSampling(temperature=0.7, top_p=0.5, logprobs_mode=LogprobsMode.RAW),
        TurnSampling(temperature=0.7, top_p=0.5, logprobs_mode=LogprobsMode.BOTH),
    ],
)
def test_a_turn_is_compared_under_its_own_distribution(tmp_path: Path, sampling: TurnSampling) -> None:
    found = check(store_of(tmp_path, path(sampling)))
    assert found.k3_by_span is not None
    assert found.k3_by_span < 1e-9
    assert found.rows[0].distance.num_tokens == NUM


@pytest.mark.parametrize(
    ("sampling", "num_left_out", "reason"),
    [
        (TurnSampling(top_p=0.9), NUM, "truncated (top_p, top_k, min_p)"),
        (TurnSampling(top_k=5), NUM, "truncated (top_p, top_k, min_p)"),
        (TurnSampling(presence_penalty=0.5), NUM, "penalties"),
        (TurnSampling(constraint_kind=ConstraintKind.REGEX), NUM, "constrained"),
        (TurnSampling(min_tokens=5, stop_token_ids=(2,)), 5, "constrained"),
    ],
)
def test_what_no_softmax_gives_again_is_left_out_and_counted(
    tmp_path: Path, sampling: TurnSampling, num_left_out: int, reason: str
) -> None:
    found = check(store_of(tmp_path, path(), path(sampling)))
    assert found.left_out == {reason: num_left_out}
    assert found.rows[0].distance.num_tokens == 2 * NUM - num_left_out


def test_trajectories_without_their_checkpoints_are_left_out(tmp_path: Path) -> None:
    found = check(store_of(tmp_path, path(), path(versions=(0, 7))))
    assert found.left_out == {"no checkpoint of a version": NUM}
    assert [row.distance.num_tokens for row in found.rows] == [NUM]


def test_a_shared_beginning_is_compared_once(tmp_path: Path) -> None:
    first = path()
    second = replace(first, parent=0, num_shared=4 + NUM, response_mask=np.zeros_like(first.response_mask))
    records = [make_trajectory("a", 0, paths=(first, second))]
    fill_store(tmp_path / STORE_NAME, {"r": [make_group("a", 1)]}, records)
    assert check(tmp_path / STORE_NAME).rows[0].distance.num_tokens == NUM


def test_a_limit_chooses_the_same_trajectories_each_time(tmp_path: Path) -> None:
    store = store_of(tmp_path, *(path(versions=(number % 2, number % 2)) for number in range(8)))
    found = check(store, 3, v1=V1)
    assert (found.num_trajectories, found.num_stored) == (3, 8)
    assert found.rows == check(store, 3, v1=V1).rows


def test_ids_that_a_tokenizer_would_write_otherwise_are_counted(tmp_path: Path) -> None:
    letters = [token_id for letter in "calculator" for token_id in ids_of(letter)]
    assert letters != ids_of("calculator")
    spelled = path(ids=[*ids_of(TEXT)[:4], *letters, *ids_of(TEXT)])
    found = check(store_of(tmp_path, path(), spelled, path(versions=(1, 1))), v1=V1)
    counts = {row.version: (row.num_changed, row.num_trajectories) for row in found.retokenized}
    assert counts == {"0": (1, 2), "1": (0, 1), "all": (1, 3)}


def test_an_engine_gives_temperature_1_alone_and_is_quantised_as_the_run_was(tmp_path: Path) -> None:
    made: list[tuple[Path, str, int]] = []

    def load(folder: Path, quantization: str, num_tokens: int) -> nullcontext[ReferenceModel]:
        made.append((folder, quantization, num_tokens))
        return nullcontext(ReferenceModel(folder, device="cpu"))

    def quantised(one: TokenPath, quantization: str = "fp8") -> TokenPath:
        return replace(one, turns=(replace(one.turns[0], quantization=quantization),))

    engine = References(load, by_engine=True)
    warm = TurnSampling(temperature=0.5)
    store = store_of(tmp_path, quantised(path()), quantised(path(warm)))
    found = check_logprobs(store, V0, {}, engine, max_trajectories=10)
    assert made == [(V0, "fp8", len(path().prompt_ids) + len(path().response_ids))]
    assert found.left_out == {"temperature, by an engine": NUM}
    assert found.rows[0].distance.num_tokens == NUM
    (tmp_path / "two").mkdir()
    store = store_of(tmp_path / "two", quantised(path()), path())
    with pytest.raises(InvalidRequest, match="several quantizations"):
        check_logprobs(store, V0, {}, engine, max_trajectories=10)
    # transformers computes the logprobs for all kinds of engines
    assert check(store).rows[0].distance.num_tokens == 2 * NUM


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check-logprobs", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_prints_the_tables_and_its_exit_code_judges(tmp_path: Path) -> None:
    good, shifted = tmp_path / "good", tmp_path / "shifted"
    for folder in (good, shifted):
        folder.mkdir()
    right = path(versions=(0, 1))
    store_of(good, right)
    store_of(shifted, replace(right, logprobs=np.roll(right.logprobs, 1)))
    named = ("--model", V0, "--model-version", f"1={V1}", "--device", "cpu")
    code, out = run(good, *named)
    assert code == 0, out
    assert "span, all" in out
    assert "0.000000" in out, "nothing is cut at 80 columns"
    assert "decode and encode" in out
    code, out = run(shifted, *named, "--json")
    assert code == 1
    assert orjson.loads(out[out.index("{") :])["rows"][0]["distance"]["k3_kl"] > 0.01


def test_another_precision_shows_and_is_small(tmp_path: Path) -> None:
    store = store_of(tmp_path, path(), path(versions=(1, 1)))
    found = check_logprobs(store, V0, {1: V1}, plain_references("cpu", "bfloat16"), max_trajectories=10)
    assert 1e-4 < found.rows[0].distance.mean_abs_diff < 0.1


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    store, adapter = store_of(tmp_path, path()), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for model, words in (
        (tmp_path / "none", "is not a folder"),
        (adapter, "merge it"),
        (tmp_path, "not a checkpoint"),
    ):
        code, out = run(store, "--model", model)
        assert code == 1
        assert words in out
    with pytest.raises(InvalidRequest, match="N=DIR"):
        parse_versions(["v1"])
    code, out = run(store, "--model", V0, "--versions", adapter)
    assert code == 1
    assert "no subfolder whose name is a version number" in out
