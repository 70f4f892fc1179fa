"""The trainer of `examples/train`: its loss by hand, its batches from a service's records, a step that improves."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from itertools import islice
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer

from agentloop.client.client import RolloutClient
from agentloop.storage.trajectory_store import STORE_NAME
from agentloop.types import Limits, Message, RolloutTask
from agentloop_trainers.batches import TrainingRow, group_rows
from agentloop_verify.check_logprobs import check_logprobs, plain_references, versions_in
from examples.train import grpo
from examples.train.grpo import (
    Recipe,
    batches,
    evaluate,
    logprobs_of,
    paired,
    token_losses,
    train,
    train_step,
)
from examples.train.tasks import held_out_tasks, training_tasks
from tests.support.service.whole_service import simulated_config, whole_service
from tests.support.transfer.adapters import POLICY, shipped_policy

SMALL = Recipe(num_steps=3, num_groups=2, group_size=4, max_staleness=0, num_warmup_steps=1)
CONFIG = simulated_config(mode="standalone", engine={"max_context_tokens": 512})


def of_training(name: str) -> ModuleType:
    """Import a module of the trainer in these tests' process only: models and plots take seconds to import."""
    return importlib.import_module(f"examples.train.{name}")


pytestmark = pytest.mark.usefixtures("one_thread")


def evenness(task: RolloutTask, messages: list[Message]) -> float:
    """Return 1 for an answer of odd length, else 0, so that pseudo-random samples differ."""
    return float(len(messages[-1].content) % 2)


def short_tasks(num_tasks: int) -> list[RolloutTask]:
    limits = Limits(max_turns=2, max_tokens_per_turn=12)
    return [
        replace(task, reward="tests.parts.examples.test_train:evenness", limits=limits)
        for task, _ in zip(training_tasks(seed=3), range(num_tasks), strict=False)
    ]


@pytest.fixture(scope="module")
async def service(tmp_path_factory):
    async with whole_service(CONFIG, tmp_path_factory.mktemp("service")) as url:
        yield url


@pytest.fixture(scope="module")
async def groups(service):
    """Two groups of four recorded trajectories."""
    async with RolloutClient(service) as client:
        [batch] = [batch async for batch in batches(client, short_tasks(2), SMALL)]
    return batch.groups


async def test_steps_that_are_offered_more_are_as_many_and_as_large(service):
    recipe = replace(SMALL, num_steps=2, over_provision=1.5)
    async with RolloutClient(service) as client:
        sizes = [[len(group) for group in batch.groups] async for batch in batches(client, short_tasks(9), recipe)]
    assert sizes == [[4, 4], [4, 4]]


async def test_the_step_that_ends_after_the_time_limit_is_the_last(service):
    recipe = replace(SMALL, over_provision=1.0, max_s=1e-9)
    async with RolloutClient(service) as client:
        steps = await train(client, shipped_policy(), short_tasks(9), recipe)
        assert len(steps) == 1
        assert not [rollout for rollout in (await client.status()).rollouts if rollout.num_running]


def cut(row: TrainingRow, num_tokens: int) -> TrainingRow:
    """Return the row without its last tokens."""
    end = len(row.input_ids) - num_tokens
    arrays = {name: getattr(row, name)[:end] for name in ("input_ids", "mask", "logprobs", "versions")}
    return replace(row, **arrays)


@pytest.fixture(scope="module")
def ablations() -> ModuleType:
    return of_training("ablations")


@pytest.fixture
def rows(groups, ablations) -> list[TrainingRow]:
    """Return rows of several lengths sampled by the shipped policy; every other one has a better reward."""
    found = [row for group in groups for row in group_rows(group)]
    found = [replace(cut(row, place), advantage=0.5 if place % 2 else -0.5) for place, row in enumerate(found)]
    under = ablations.recomputed(found, {0: shipped_policy()}, lambda row: np.zeros(int(row.mask.sum()), int))
    return [ablations.with_logprobs(row, values) for row, values in zip(found, under, strict=True)]


def losses(loss: str, ratio: float, advantage: float) -> tuple[float, float]:
    """Return the loss of one token whose probability changed by `ratio`, and its gradient by the logprob."""
    recorded = torch.tensor([-1.0])
    logprobs = (recorded + math.log(ratio)).requires_grad_()
    found = token_losses(logprobs, recorded, torch.tensor([advantage]), Recipe(loss=loss))
    found.sum().backward()
    return float(found.detach()), float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 1.0, -1.2, -1.2),  # within the range: d(ratio)/d(logprob) is the ratio
        (1.5, 1.0, -1.28, 0.0),  # clipped
        (1.5, -1.0, 1.5, 1.5),  # the lower of -1.5 and -1.28, so not clipped
        (0.5, 1.0, -0.5, -0.5),  # not clipped
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_ppo_clips_the_ratio_where_that_is_worse_for_the_policy(ratio, advantage, loss, gradient):
    assert losses("ppo", ratio, advantage) == pytest.approx((loss, gradient), abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"), [(1.0, 2.0, -2.0), (0.5, 1.0, -0.5), (1.5, 1.0, -1.28), (1.5, -1.0, 1.28)]
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio, advantage, gradient):
    loss, found = losses("cispo", ratio, advantage)
    assert found == pytest.approx(gradient, abs=1e-6)
    assert loss == pytest.approx(gradient * (math.log(ratio) - 1.0), abs=1e-6)


def test_a_batch_is_whole_groups_and_its_advantages_sum_to_zero(groups):
    assert [len(group) for group in groups] == [4, 4]
    for group in groups:
        assert len({one.group_id for one in group}) == 1
        found = group_rows(group)
        assert sum(row.advantage for row in found) == pytest.approx(0.0)
        mean = sum(one.reward for one in group) / 4
        assert sorted(row.advantage for row in found) == pytest.approx(sorted(one.reward - mean for one in group))


def test_logprobs_over_a_shared_prompt_are_those_of_the_whole_sequences(rows):
    model, group = shipped_policy(), rows[:4]
    assert len({len(row.input_ids) for row in group}) > 1, "rows of one length would not show wrong padding"
    with torch.inference_mode():
        found = logprobs_of(model, group)
        expected = []
        for row in group:
            ids = torch.from_numpy(row.input_ids).long()
            under = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            expected.append(under[torch.from_numpy(row.mask[1:])])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=0)


def test_responses_of_one_token_have_logprobs_too(rows):
    model = shipped_policy()
    first = [cut(row, len(row.input_ids) - row.num_prompt - 1) for row in rows[:4]]
    with torch.inference_mode():
        found = logprobs_of(model, first)
        prompt = torch.from_numpy(first[0].input_ids[: first[0].num_prompt]).long()
        ids = torch.tensor([int(row.input_ids[-1]) for row in first])
        expected = model(prompt[None]).logits[0, -1].log_softmax(-1)[ids]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_gradient_that_is_not_finite_changes_no_weight(rows, monkeypatch):
    model = shipped_policy()
    before = [weight.detach().clone() for weight in model.parameters()]
    lost = torch.tensor(float("nan"))
    monkeypatch.setattr(grpo, "token_losses", lambda logprobs, *_: logprobs * lost)
    found = train_step(model, grpo.optimizer_of(model, SMALL), rows, SMALL)
    assert math.isnan(found["grad_norm"])
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_a_step_makes_good_samples_likelier_and_bad_ones_less_so(rows, ablations, loss):
    model = shipped_policy()
    # plain gradient descent with clipping; Adam may overshoot
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = train_step(model, optimizer, rows, Recipe(loss=loss))
    assert first["mismatch"].k3_kl == pytest.approx(0.0, abs=1e-6)
    assert first["mismatch"].num_tokens == sum(int(row.mask.sum()) for row in rows)
    assert first["grad_norm"] > 0
    now = ablations.recomputed(rows, {0: model}, lambda row: np.zeros(int(row.mask.sum()), int))
    moved = [row.advantage * (after - row.logprobs[row.mask]).sum() for row, after in zip(rows, now, strict=True)]
    assert sum(moved) > 0
    again = train_step(model, optimizer, rows, Recipe(loss=loss))
    assert again["mismatch"].k3_kl > 1e-6
    if loss == "ppo":  # CISPO's value depends on weights that change with it
        assert again["loss"] < first["loss"]


def test_a_step_of_distillation_leads_to_the_teacher_whatever_the_rewards(rows, ablations):
    model, folder = shipped_policy(), POLICY.with_name("v1")
    teacher = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def under(one):
        return ablations.recomputed(rows, {0: one}, lambda row: np.zeros(int(row.mask.sum()), int))

    own = under(teacher)
    taught = {row: logprobs - row.logprobs[row.mask] for row, logprobs in zip(rows, own, strict=True)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    unrewarded = [replace(row, advantage=0.0) for row in rows]
    of_them = dict(zip(unrewarded, taught.values(), strict=True))
    found = train_step(model, optimizer, unrewarded, Recipe(loss="distill"), of_them)
    assert found["mismatch"].num_tokens == sum(int(row.mask.sum()) for row in rows)
    moved = [taught[row] @ (after - row.logprobs[row.mask]) for row, after in zip(rows, under(model), strict=True)]
    assert sum(moved) > 0


def test_a_batch_without_advantages_changes_nothing(rows):
    model = shipped_policy()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = train_step(model, optimizer, [replace(row, advantage=0.0) for row in rows], SMALL)
    assert (found["loss"], found["mismatch"].num_tokens) == (0.0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


async def test_synchronous_training_takes_every_trajectory_at_its_own_version(service):
    model, steps = shipped_policy(), []
    async with RolloutClient(service) as client:
        tasks = short_tasks(SMALL.num_steps * SMALL.num_groups)
        found = await train(client, model, tasks, SMALL, steps.append)
        status = await client.status()
        success = await evaluate(client, short_tasks(3), num_samples=2)
    assert found == steps
    assert len(steps) == SMALL.num_steps
    assert [step.version for step in steps] == list(range(status.weight_version - 2, status.weight_version + 1))
    assert all(step.num_trajectories == SMALL.batch_size for step in steps)
    assert all(step.staleness_max == 0 for step in steps)
    assert set(success) == {task.task_id for task in short_tasks(3)}
    assert all(0.0 <= value <= 1.0 for value in success.values())


async def test_asynchronous_training_is_never_further_behind_than_it_says(service):
    recipe, steps = replace(SMALL, num_steps=5, max_staleness=2), []
    async with RolloutClient(service) as client:
        await train(client, shipped_policy(), short_tasks(10), recipe, steps.append)
    assert max(step.staleness_max for step in steps) in (1, 2)


async def test_a_run_that_saved_its_versions_is_checked_against_them(tmp_path):
    recipe, folder, run_dir = replace(SMALL, num_steps=2, max_staleness=2), tmp_path / "versions", tmp_path / "run"
    run_dir.mkdir()
    async with whole_service(CONFIG, run_dir) as url, RolloutClient(url) as client:
        first = (await client.status()).weight_version + 1
        await train(
            client, shipped_policy(), short_tasks(4), recipe, prepare=of_training("learn").saving(folder, POLICY)
        )
    versions = versions_in(folder)
    assert sorted(versions) == [first, first + 1]
    load = plain_references("cpu", "float32")
    found = check_logprobs(run_dir / STORE_NAME, POLICY, versions, load, max_trajectories=100)
    assert found.num_trajectories == 4 * SMALL.group_size
    assert found.rows[0].under == "span, all"
    assert f"{first}" in {row.version for row in found.retokenized}


@pytest.mark.parametrize("family", ["recovery", "examples.train.refusals:Refusals"])
def test_held_out_tasks_are_never_trained_on(family):
    held_out = {task.messages[0].content for task in held_out_tasks(16, family)}
    assert len(held_out) == 16
    trained = {task.messages[0].content for task in islice(training_tasks(0, family, 16), 200)}
    assert not held_out & trained


def test_a_small_environment_is_trained_on_in_epochs():
    shop = "examples.14_shop:Shop"
    [held_out], trained = held_out_tasks(1, shop), list(islice(training_tasks(0, shop, 1), 4))
    assert {task.messages for task in trained[:2]} == {task.messages for task in trained[2:]}
    assert held_out.messages not in [task.messages for task in trained]
    assert len({task.task_id for task in trained}) == 4
    with pytest.raises(ValueError, match="all of the environment's tasks are held out"):
        next(training_tasks(0, shop, 3))


def test_gains_are_paired_by_task():
    gain, error = paired({"a": 0.0, "b": 0.5, "c": 0.25}, {"c": 0.5, "b": 0.5, "a": 0.5})
    assert gain == pytest.approx(0.25)
    assert error == pytest.approx(0.25 / math.sqrt(3))


def test_versions_of_recomputed_logprobs(rows, ablations):
    """A row with two versions: each setting takes the logprobs of the models that it names."""
    row = rows[0]
    half = int(row.mask.sum()) // 2
    versions = row.versions.copy()
    versions[row.mask] = [0] * half + [1] * (int(row.mask.sum()) - half)
    mixed = replace(row, versions=versions)
    models = {
        0: shipped_policy(),
        1: transformers.AutoModelForCausalLM.from_pretrained(POLICY.parent / "v1", dtype=torch.float32),
    }
    with torch.inference_mode():
        zero, one = (logprobs_of(models[version], [mixed]).numpy() for version in (0, 1))
    choices = (ablations.by_first, ablations.by_last, lambda row: row.versions[row.mask])
    [by_first], [by_last], [by_span] = (ablations.recomputed([mixed], models, choice) for choice in choices)
    np.testing.assert_allclose(by_span, np.concatenate([zero[:half], one[half:]]), atol=1e-5)
    np.testing.assert_allclose(by_first, zero, atol=1e-5)
    np.testing.assert_allclose(by_last, one, atol=1e-5)


def test_ids_encoded_anew_keep_their_places(rows, ablations):
    tokenizer = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
    text = "drum unpet"
    exact = tokenizer.encode(text, add_special_tokens=False).ids
    split = [piece for character in text for piece in tokenizer.encode(character, add_special_tokens=False).ids]
    assert len(split) > len(exact)
    row = rows[0]
    prompt = row.input_ids[: row.num_prompt]
    ids = np.concatenate([prompt, np.array(split, np.int32)])
    mask = np.arange(len(ids)) >= row.num_prompt
    logprobs = np.where(mask, -np.arange(len(ids), dtype=np.float32), 0.0).astype(np.float32)
    sampled = replace(row, input_ids=ids, mask=mask, logprobs=logprobs, versions=np.where(mask, 7, -1))
    [changed] = ablations.RetokenisedIds(tokenizer)([sampled], shipped_policy(), 7)
    assert changed.input_ids[row.num_prompt :].tolist() == exact
    assert changed.logprobs[changed.mask].tolist() == logprobs[mask][: len(exact)].tolist()


@pytest.mark.long
async def test_arms_go_on_where_they_stopped(service, ablations, tmp_path):
    console = Console()
    setting = of_training("run").Setting(family="recovery", num_held_out=3, num_samples=2)
    recipe = replace(SMALL, num_steps=2)
    async with RolloutClient(service) as client:
        await ablations.train_arms(client, ["sync"], [0], setting, recipe, tmp_path, console)
        written = (tmp_path / "sync-seed0.json").stat().st_mtime_ns
        names = ["sync", "stale8-as-on-policy", "stale8-first-version"]
        await ablations.train_arms(client, names, [0], setting, recipe, tmp_path, console)
    assert (tmp_path / "sync-seed0.json").stat().st_mtime_ns == written
    for name in names:
        found = json.loads((tmp_path / f"{name}-seed0.json").read_text())
        assert len(found["steps"]) == 2
        assert len(found["held_out"]["before"]) == 3
    assert (tmp_path / "arms.md").read_text().count("\n| ") == 3
    of_training("curves").main(str(tmp_path))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
