"""Annotations: numbers that a trainer attaches to a stored record, such as advantages.

Several annotations of one record may have the same name; readers receive the newest. Values are finite 32-bit
floats.
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
"""A number, one number per path, or one array per path: empty, or one value per token of the path's response."""


class AnnotationScope(StrEnum):
    """The part of a record that each value of an annotation describes."""

    RECORD = "record"
    PATH = "path"
    TOKEN = "token"  # one token of a path's response


@dataclass(frozen=True, slots=True)
class RecordAnnotation:
    """One annotation of a record: a single array of values or, with scope TOKEN, one array per path."""

    scope: AnnotationScope
    values: tuple[FloatArray, ...]

    def objection(self, response_lens: Sequence[int]) -> str | None:
        """Return the reason that the values do not fit a record with these response lengths; None if they fit."""
        lens = [len(array) for array in self.values]
        if self.scope is AnnotationScope.TOKEN:
            fits = len(lens) == len(response_lens) and all(
                length in (0, wanted) for length, wanted in zip(lens, response_lens, strict=True)
            )
        else:
            fits = lens == [1 if self.scope is AnnotationScope.RECORD else len(response_lens)]
        return (
            None
            if fits
            else f"{lens} values with scope {self.scope} do not fit responses of {list(response_lens)} tokens"
        )


@dataclass(frozen=True, slots=True)
class AnnotatedRecord:
    """A stored record with the newest annotation of each name."""

    data: bytes  # the encoded `Trajectory`
    annotations: dict[str, RecordAnnotation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleAnnotation:
    """A named annotation of the record of one sample of a rollout."""

    group_id: str
    sample_index: int
    name: str
    annotation: RecordAnnotation


def annotation_in(scope: AnnotationScope, values: Iterable[Sequence[float] | FloatArray]) -> RecordAnnotation:
    """Create an annotation. Raises InvalidRequest if a value is not finite as a 32-bit float."""
    with np.errstate(over="ignore"):  # an overflow becomes inf, which is refused below
        arrays = tuple(np.asarray(array, np.float32) for array in values)
    if not all(np.isfinite(array).all() for array in arrays):
        raise InvalidRequest("the values must be finite 32-bit floats, but one is NaN or infinite", param="values")
    return RecordAnnotation(scope, arrays)


def annotation_of(values: AnnotationValues) -> RecordAnnotation:
    """Create an annotation and derive its scope from the shape of the values. Raises InvalidRequest."""
    untyped: Any = values
    if isinstance(untyped, Real) or getattr(untyped, "ndim", 1) == 0:
        return annotation_in(AnnotationScope.RECORD, [[float(untyped)]])
    parts = [np.asarray(part) for part in untyped]
    dims = {part.ndim for part in parts}
    if dims not in ({0}, {1}):
        raise InvalidRequest(
            "the values must be one number, a list with one number per path, or a list with one flat array per "
            f"path, but the list has elements of {sorted(dims)} dimensions",
            param="values",
        )
    if dims == {0}:
        return annotation_in(AnnotationScope.PATH, [np.array(parts)])
    return annotation_in(AnnotationScope.TOKEN, parts)
