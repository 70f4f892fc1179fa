"""`play`: runs one episode of an environment in this process, from its task to its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from agentloop.api.coordinator import WorkerPort
from agentloop.engine.interface import TokenEngine
from agentloop.errors import InvalidRequest
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.generation.leases import LeaseReporter
from agentloop.generation.turn_reader import TurnReader
from agentloop.parsers.by_name import get_parser
from agentloop.plugins import LoadedOnce
from agentloop.rollout.environment import Environment, LoadedEnvironment, ScriptedTurn, load_environment
from agentloop.rollout.models import ModelsPort, NoModels
from agentloop.rollout.tool import Tool
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import RunParts, TrajectoryRun, WorkerConfig
from agentloop.testing.stand_in import PARSER, Policy, PolicyEngine, ScriptedTurns, byte_renderer
from agentloop.types import Assignment, Lease, Limits, Message, RolloutTask, TokenPath, Trajectory

_BYTES_A_TOKEN = 4
_MAX_CONTEXT_BYTES = 1 << 22


def loaded_of(environment: type[Environment] | str | LoadedEnvironment) -> LoadedEnvironment:
    """Return the LoadedEnvironment of a class or an import path."""
    if isinstance(environment, str):
        return load_environment(environment)
    if isinstance(environment, LoadedEnvironment):
        return environment
    return LoadedEnvironment(environment, f"{environment.__module__}:{environment.__qualname__}")


async def play(
    environment: type[Environment] | str | LoadedEnvironment,
    task: RolloutTask | None = None,
    policy: Policy | Sequence[ScriptedTurn] | None = None,
    *,
    tools: Sequence[Tool] = (),
    models: ModelsPort | None = None,
    on_message: Callable[[Message], None] = lambda message: None,
) -> Trajectory:
    """Run one episode and return its record. The default is the first task, played by its gold solution.

    `tools` are the service's tools that the task uses. `on_message` receives each message. Limits on tokens allow
    four bytes per token. The record of a policy without token ids is returned `without_ids`. Raises InvalidRequest
    if the default policy is needed and the task has no gold solution.
    """
    loaded = loaded_of(environment)
    task = next(iter(loaded.kind.tasks())) if task is None else task
    task = replace(task, environment=loaded.path, limits=_in_bytes(task.limits))
    if policy is None and (policy := loaded.kind.gold(task)) is None:
        raise InvalidRequest(
            f"task {task.task_id!r} has no gold solution: pass a policy, or implement gold()", param="policy"
        )
    chosen = ScriptedTurns(policy) if isinstance(policy, Sequence) else policy
    engine, toolbox, renderer = PolicyEngine(chosen, on_message), Toolbox(tools), byte_renderer()
    parts = RunParts(
        coordinator=cast(WorkerPort, None),  # not used, because the lease never moves
        connect=lambda url: cast(TokenEngine, engine),
        renderer=renderer,
        reader=TurnReader(renderer, get_parser(PARSER), PARSER),
        toolbox=toolbox,
        config=WorkerConfig(),
        max_context_tokens=_MAX_CONTEXT_BYTES,
        vocab_size=renderer.vocab_size,
        placer=ImagePlacer(takes_images=False),
        reporter=LeaseReporter("", None),
        models=NoModels() if models is None else models,
        environments=LoadedOnce(lambda path: loaded, param="environment"),
    )
    lease = Lease("", chosen.name, "")
    assignment = Assignment(f"try/{task.task_id}/0", task.task_id, 0, task, lease, rollout_id="try")
    engine.run = TrajectoryRun(parts, assignment)
    try:
        record = (await engine.run.to_record()).decoded()
        engine.tell(record.messages)
    finally:
        await toolbox.close()
    return record if chosen.has_ids else without_ids(record)


def without_ids(record: Trajectory) -> Trajectory:
    """Return the record without token ids, so that it is not trainable.

    Its turns have the policy as their engine.
    """
    return replace(record, paths=tuple(map(_path_without_ids, record.paths)))


def _path_without_ids(path: TokenPath) -> TokenPath:
    return replace(
        path,
        prompt_ids=np.empty(0, np.int32),
        response_ids=np.empty(0, np.int32),
        response_mask=np.empty(0, np.bool_),
        logprobs=np.empty(0, np.float32),
        weight_versions=(),
        num_shared=0,
        token_rewards=None,
        is_trainable=False,
        turns=tuple(replace(turn, prompt_len=0, start=0, end=0, sampling=None) for turn in path.turns),
    )


def _in_bytes(limits: Limits) -> Limits:
    context = limits.max_context_tokens
    return replace(
        limits,
        max_tokens_per_turn=limits.max_tokens_per_turn * _BYTES_A_TOKEN,
        max_sampled_tokens=limits.max_sampled_tokens * _BYTES_A_TOKEN,
        max_context_tokens=None if context is None else context * _BYTES_A_TOKEN,
    )
