"""TrajectoryBuilder: the one place where ids, mask, logprobs, versions and turns grow, always together.

A path is append-only: sampled ids are stored as the engine returned them and never encoded again. When the next
prompt does not extend the path exactly, a new path begins and names the reason; the old one stays, finished.

Invariants, checked as data comes in (InvariantBroken otherwise): one logprob a sampled id; version spans tile the
sampled ids; a turn's prompt is exactly the path so far. The mask is true for sampled ids, until a verb takes some
out; that changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentloop.errors import InvariantBroken
from agentloop.types import (
    Generation,
    TokenPath,
    Turn,
    WeightVersionSpan,
    append_span,
    shifted_spans,
    tiling_problem,
)


class _OpenPath:
    """A path that still grows: the whole context in one list, the parallel arrays over its response part."""

    def __init__(self, prompt_ids: Sequence[int], split_reason: str | None) -> None:
        self.context_ids = list(prompt_ids)
        self.num_prompt = len(self.context_ids)
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.spans: list[WeightVersionSpan] = []
        self.turns: list[Turn] = []
        self.split_reason = split_reason

    def freeze(self) -> TokenPath:
        return TokenPath(
            prompt_ids=np.array(self.context_ids[: self.num_prompt], dtype=np.int32),
            response_ids=np.array(self.context_ids[self.num_prompt :], dtype=np.int32),
            response_mask=np.array(self.mask, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            weight_versions=tuple(self.spans),
            turns=tuple(self.turns),
            split_reason=self.split_reason,
        )


class TrajectoryBuilder:
    """Builds the paths of one trajectory. Not shared between tasks."""

    def __init__(self) -> None:
        self._paths: list[_OpenPath] = []
        self._num_masked_tokens = 0

    @property
    def is_started(self) -> bool:
        return bool(self._paths)

    @property
    def num_masked_tokens(self) -> int:
        """Sampled tokens that were taken out of the mask."""
        return self._num_masked_tokens

    @property
    def num_context_tokens(self) -> int:
        """Length of the present path: the prompt that the next turn extends."""
        return len(self._paths[-1].context_ids) if self._paths else 0

    @property
    def context_ids(self) -> tuple[int, ...]:
        """The present path's ids, a copy."""
        return tuple(self._paths[-1].context_ids) if self._paths else ()

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin the first path. Raises InvariantBroken if there is one."""
        if self._paths:
            raise InvariantBroken("a trajectory starts once; use extend_to")
        self._paths.append(_OpenPath(prompt_ids, None))

    def add_observed(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: template boundaries, tool results, user messages."""
        path = self._current()
        path.context_ids.extend(token_ids)
        path.mask.extend([False] * len(token_ids))
        path.logprobs.extend([0.0] * len(token_ids))

    def extend_to(self, prompt_ids: Sequence[int], reason: str) -> None:
        """Make `prompt_ids` the next prompt: extend the path if it is an exact prefix, else fork for `reason`."""
        path = self._current()
        if list(prompt_ids[: len(path.context_ids)]) == path.context_ids:
            self.add_observed(prompt_ids[len(path.context_ids) :])
        else:
            self._paths.append(_OpenPath(prompt_ids, reason))

    def add_sampled(self, generation: Generation, *, continues_turn: bool = False) -> None:
        """Append one generation. `continues_turn`: it goes on with a turn that an engine-side abort cut."""
        path = self._current()
        num_tokens = len(generation.token_ids)
        if len(generation.logprobs) != num_tokens:
            raise InvariantBroken(f"{len(generation.logprobs)} logprobs for {num_tokens} sampled ids")
        start = len(path.mask)
        if (problem := tiling_problem(generation.weight_versions, num_tokens)) is not None:
            raise InvariantBroken(problem)
        for span in shifted_spans(generation.weight_versions, start):
            append_span(path.spans, span)
        prompt_len, turn_start, cached = len(path.context_ids), start, generation.cached_tokens
        if continues_turn and path.turns and path.turns[-1].end == start:
            cut = path.turns.pop()
            prompt_len, turn_start, cached = cut.prompt_len, cut.start, cut.cached_tokens
        path.context_ids.extend(generation.token_ids)
        path.mask.extend([True] * num_tokens)
        path.logprobs.extend(generation.logprobs)
        path.turns.append(
            Turn(
                prompt_len=prompt_len,
                start=turn_start,
                end=start + num_tokens,
                finish_reason=generation.finish_reason,
                replica_id=generation.replica_id,
                cached_tokens=cached,
            )
        )

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that anything was sampled under."""
        return min((span.version for path in self._paths for span in path.spans), default=None)

    def mask_older_than(self, version: int) -> None:
        """Take tokens of versions before `version` out of the mask; ids, logprobs and spans stay."""
        self._take_out(lambda span: span.version < version)

    def mask_newer_than(self, version: int) -> None:
        """Take tokens of versions after `version` out of the mask; ids, logprobs and spans stay."""
        self._take_out(lambda span: span.version > version)

    def finish(self) -> tuple[TokenPath, ...]:
        """All paths as arrays, in the order they began. The builder stays usable."""
        return tuple(path.freeze() for path in self._paths)

    def _take_out(self, is_out: Callable[[WeightVersionSpan], bool]) -> None:
        for path in self._paths:
            for span in filter(is_out, path.spans):
                self._num_masked_tokens += sum(path.mask[span.start : span.end])
                path.mask[span.start : span.end] = [False] * (span.end - span.start)

    def _current(self) -> _OpenPath:
        if not self._paths:
            raise InvariantBroken("nothing was rendered yet")
        return self._paths[-1]
