"""The mismatch between recorded logprobs and a trainer's, by the age of the weights that sampled the tokens.

The trainer annotates records with its logprobs. A token's age is the trainer's version minus the token's version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentloop.api.annotations import AnnotatedRecord, AnnotationScope, RecordAnnotation
from agentloop.types import TokenPath, Trajectory, Turn
from agentloop.values import codec
from agentloop.values.mismatch import Mismatch, mismatch

TRAINER_LOGPROBS = "trainer_logprobs"
"""The name of the annotation with a trainer's logprobs: an array per path, with a value per response token."""

TRAINER_VERSION = "trainer_version"
"""The name of the annotation with the weight version that computed them. Default: the version that the service
served when it received the record."""

Column = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class AgeRow:
    """The mismatch of the trained tokens of one age; None: the age is unknown."""

    age: int | None
    distance: Mismatch


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The sampled tokens of a turn that its path does not share with its parent."""

    path_index: int
    path: TokenPath
    turn: Turn
    places: npt.NDArray[np.int64]  # in the response
    versions: npt.NDArray[np.int64]
    trainer_logprobs: npt.NDArray[np.float32] | None


def turn_tokens(record: Trajectory, annotations: Mapping[str, RecordAnnotation]) -> Iterator[TurnTokens]:
    """Yield the sampled tokens of a record, each once."""
    of_trainer = annotations.get(TRAINER_LOGPROBS)
    for index, path in enumerate(record.paths):
        first_own = max(path.num_shared - len(path.prompt_ids), 0) if path.parent is not None else 0
        by_token = np.zeros(len(path.response_ids), np.int64)
        for span in path.weight_versions:
            by_token[span.start : span.end] = span.version
        logprobs = None
        if of_trainer is not None and of_trainer.scope is AnnotationScope.TOKEN and len(of_trainer.values[index]):
            logprobs = of_trainer.values[index]
        for turn in path.own_turns:
            places = np.arange(max(turn.start, first_own), turn.end)
            found = None if logprobs is None else logprobs[places]
            yield TurnTokens(index, path, turn, places, by_token[places], found)


def trainer_version(record: Trajectory, annotations: Mapping[str, RecordAnnotation]) -> int | None:
    """Return the version from which the ages of a record's tokens count; None if it is unknown."""
    named = annotations.get(TRAINER_VERSION)
    if named is not None and named.scope is AnnotationScope.RECORD:
        return int(named.values[0][0])
    oldest = record.oldest_trained_version
    return None if record.staleness is None or oldest is None else oldest + record.staleness


def mismatch_by_age(records: Iterable[AnnotatedRecord]) -> list[AgeRow]:
    """Return the table of records with `TRAINER_LOGPROBS`, by ascending age."""
    found: dict[int | None, list[tuple[Column, Column]]] = defaultdict(list)
    for annotated in records:
        record = codec.decode(annotated.data, Trajectory)
        newest = trainer_version(record, annotated.annotations)
        for tokens in turn_tokens(record, annotated.annotations):
            if tokens.trainer_logprobs is None:
                continue
            is_trained = tokens.path.response_mask[tokens.places]
            for version in np.unique(tokens.versions[is_trained]).tolist():
                chosen = is_trained & (tokens.versions == version)
                pair = tokens.path.logprobs[tokens.places][chosen], tokens.trainer_logprobs[chosen]
                found[None if newest is None else newest - version].append(pair)
    rows = []
    for age in sorted(found, key=lambda age: (age is None, age or 0)):
        recorded, trainer = (np.concatenate(column) for column in zip(*found[age], strict=True))
        rows.append(AgeRow(age, mismatch(recorded, trainer)))
    return rows
