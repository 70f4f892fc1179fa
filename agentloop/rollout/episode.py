"""The record of a loop with several agents: their paths and scores in one trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentloop.rollout.context import LoopContext
from agentloop.score import Score
from agentloop.types import TokenPath, paths_of_agents


def episode_paths(contexts: Mapping[str, LoopContext]) -> tuple[TokenPath, ...]:
    """Return the token paths of all agents by name, the main agent's first. Untrained agents' are not trainable."""
    return paths_of_agents(
        {
            name: [replace(path, is_trainable=path.is_trainable and ctx.is_trained) for path in ctx.path.paths()]
            for name, ctx in contexts.items()
        }
    )


def episode_score(contexts: Mapping[str, LoopContext]) -> Score:
    """Return the scores of all agents as one. An agent's components and metrics have its name as a prefix."""
    episode = Score()
    for name, ctx in contexts.items():
        score = ctx.score
        if name:
            score = replace(
                score,
                reward=None,
                agents={} if score.reward is None else {name: score.reward},
                components={f"{name}.{key}": value for key, value in score.components.items()},
                metrics={f"{name}.{key}": value for key, value in score.metrics.items()},
            )
        episode = episode.updated(score)
    return episode
