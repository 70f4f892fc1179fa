"""Annotations: numbers of a trainer beside a record, such as its advantage.

A later annotation of a name is added to the earlier ones, and readers get the newest. Values are 32-bit floats,
all finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from agentloop.errors import InvalidRequest
from agentloop.types import FloatArray

AnnotationValues: TypeAlias = float | FloatArray | Sequence[float] | Sequence[Sequence[float] | FloatArray]
"""A number; one for each path; or for each path an array, empty or with one for each token of its response."""


class AnnotationScope(StrEnum):
    """The part of a record that each value of an annotation is of."""

    RECORD = "record"
    PATH = "path"
    TOKEN = "token"  # of a path's response


@dataclass(frozen=True, slots=True)
class RecordAnnotation:
    """One annotation of a record: one array of values, or for tokens one array for each path."""

    scope: AnnotationScope
    values: tuple[FloatArray, ...]

    def objection(self, response_lens: Sequence[int]) -> str | None:
        """Return why the values do not fit a record with responses of these lengths; None if they fit."""
        lens = [len(one) for one in self.values]
        if self.scope is AnnotationScope.TOKEN:
            fits = len(lens) == len(response_lens) and all(
                given in (0, wanted) for given, wanted in zip(lens, response_lens, strict=True)
            )
        else:
            fits = lens == [1 if self.scope is AnnotationScope.RECORD else len(response_lens)]
        return None if fits else f"{lens} values by {self.scope}, for responses of {list(response_lens)} tokens"


@dataclass(frozen=True, slots=True)
class AnnotatedRecord:
    """One stored record, and the newest annotation of each name."""

    data: bytes  # the encoded `Trajectory`
    annotations: dict[str, RecordAnnotation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleAnnotation:
    """One named annotation, and the sample of a rollout whose record it is of."""

    group_id: str
    sample_index: int
    name: str
    annotation: RecordAnnotation


def annotation_in(scope: AnnotationScope, values: Iterable[Sequence[float] | FloatArray]) -> RecordAnnotation:
    """Make an annotation of lists of numbers. Raises InvalidRequest if a number is not finite as a 32-bit float."""
    with np.errstate(over="ignore"):
        arrays = tuple(np.asarray(one, np.float32) for one in values)
    if not all(np.isfinite(one).all() for one in arrays):
        raise InvalidRequest("a value is not finite", param="values")
    return RecordAnnotation(scope, arrays)


def annotation_of(values: AnnotationValues) -> RecordAnnotation:
    """Make an annotation, with the scope that the values' shape tells. Raises InvalidRequest."""
    given: Any = values
    if isinstance(given, Real) or getattr(given, "ndim", 1) == 0:
        return annotation_in(AnnotationScope.RECORD, [[float(given)]])
    parts = [np.asarray(one) for one in given]
    dims = {part.ndim for part in parts}
    if dims not in ({0}, {1}):
        raise InvalidRequest("neither a number, nor one or an array for each path", param="values")
    if dims == {0}:
        return annotation_in(AnnotationScope.PATH, [np.array(parts)])
    return annotation_in(AnnotationScope.TOKEN, parts)
