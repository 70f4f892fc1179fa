"""All arms but ours: each at its defaults, and the declared grid from which each may choose its best.

Arms of one name are one competitor; `parameters` tell its variants apart. A policy that takes a session key gets
the trajectory's number.
"""

from __future__ import annotations

from tests.benchmarks.balancer.arms.oracles import KnownPrograms, LongestFirst, StickyGroups
from tests.benchmarks.balancer.arms.prefix_tree import PrefixTree
from tests.benchmarks.balancer.arms.programs import Programs
from tests.benchmarks.balancer.arms.scored import WeightedScores
from tests.benchmarks.balancer.arms.spread import LeastInFlight, Random, RoundRobin
from tests.benchmarks.balancer.arms.sticky import ConsistentHash, StickyInFlight, StickySessions
from tests.benchmarks.balancer.policy import Arm


def default_arms() -> list[Arm]:
    """Return every arm at its defaults, oracles last."""
    return [
        Arm("random", lambda shape, work, seed: Random(shape, seed)),
        Arm("round-robin", lambda shape, work, seed: RoundRobin(shape, seed)),
        Arm("least in flight", lambda shape, work, seed: LeastInFlight(shape, seed)),
        Arm("consistent hash", lambda shape, work, seed: ConsistentHash(shape, seed)),
        Arm("sticky, in flight (verl)", lambda shape, work, seed: StickyInFlight(shape, seed)),
        Arm("sticky, sessions (vllm-router)", lambda shape, work, seed: StickySessions(shape, seed)),
        prefix_tree(),
        weighted_scores(),
        programs(),
        infinite_cache(slack=1),
        longest_first(fill=None, is_together=True),
        known_programs(fill=1.0, hold_s=10.0),
    ]


def grid_arms() -> list[Arm]:
    """Return the declared variants, without the defaults."""
    arms = [
        prefix_tree(threshold=threshold, absolute=absolute, relative=relative, misses_to_least=True)
        for threshold in (0.3, 0.5, 0.8)
        for absolute, relative in ((64, 1.5), (16, 1.2), (4, 1.1))
    ]
    arms += [weighted_scores(kv=0.0), weighted_scores(prefix=12.0), weighted_scores(prefix=12.0, kv=0.0)]
    arms += [
        programs(fill, ttl_s) for fill, ttl_s in ((0.8, 10.0), (1.2, 10.0), (0.8, 2.0), (1.0, 2.0), (1.2, 2.0))
    ]
    arms += [infinite_cache(slack) for slack in (4, 16)]
    arms += [
        longest_first(fill, is_together)
        for fill in (None, 0.8, 1.0, 1.5)
        for is_together in (True, False)
        if fill is not None or not is_together
    ]
    arms += [known_programs(fill, hold_s) for fill in (0.8, 1.0) for hold_s in (2.0, 5.0)]
    return arms


def prefix_tree(
    threshold: float = 0.3, absolute: int = 64, relative: float = 1.5, misses_to_least: bool = False
) -> Arm:
    return Arm(
        "prefix tree (SGLang)",
        lambda shape, work, seed: PrefixTree(shape, seed, threshold, absolute, relative, misses_to_least),
        {
            "threshold": threshold,
            "absolute": absolute,
            "relative": relative,
            "miss": "least in flight" if misses_to_least else "smallest tree",
        },
    )


def weighted_scores(prefix: float = 3.0, kv: float = 2.0, queue: float = 2.0) -> Arm:
    return Arm(
        "weighted scores (llm-d)",
        lambda shape, work, seed: WeightedScores(shape, seed, prefix, kv, queue),
        {"prefix": prefix, "kv": kv, "queue": queue},
    )


def programs(fill: float = 1.0, ttl_s: float = 10.0) -> Arm:
    return Arm(
        "programs (vllm-router)",
        lambda shape, work, seed: Programs(shape, seed, fill, ttl_s),
        {"fill": fill, "ttl": ttl_s},
    )


def infinite_cache(slack: int) -> Arm:
    return Arm(
        "infinite cache",
        lambda shape, work, seed: StickyGroups(shape, seed, slack),
        {"slack": slack},
        is_oracle=True,
        has_infinite_kv=True,
    )


def longest_first(fill: float | None, is_together: bool) -> Arm:
    return Arm(
        "longest first, known lengths",
        lambda shape, work, seed: LongestFirst(shape, work, seed, fill, is_together),
        {"fill": "any" if fill is None else fill, "groups": "together" if is_together else "anywhere"},
        is_oracle=True,
    )


def known_programs(fill: float, hold_s: float) -> Arm:
    return Arm(
        "longest first, known lengths and tools",
        lambda shape, work, seed: KnownPrograms(shape, work, seed, fill, hold_s),
        {"fill": fill, "hold": hold_s},
        is_oracle=True,
    )
