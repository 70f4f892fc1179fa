"""Suspect trials: samples that ran when their worker died are tried apart until they are cleared.

One of them may have killed the worker, and would kill the next one. They are tried in shares of those that shared
the death, `NUM_TRIALS` shares of each, on a worker that has nothing else, the ones that had run for the shortest
time first. What dies again is suspect among fewer, until one is left; the others of that death are cleared. The
last one is given up after its attempts; a death that others shared gives nothing up. A suspect that runs longer
than it had when its worker died has outlived that death. A trial ends after `TRIAL_S` at the latest. A suspect that
found no worker for itself for `TRIAL_WAIT_S` is tried beside other work. Both are four times as long after each
further death.

A death lies between the last sign of its worker's life and the moment it was noticed: a sample had outlived an
earlier death if it was seen alive for longer, and has to live for as long as it may have lived.

Ownership: the queued samples that are suspect. Synchronous; time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from agentloop.scheduling.samples import Sample
from agentloop.types import Lease

NUM_TRIALS = 16
MIN_FIRST_TRIAL = 4  # of what shared one death only: most deaths are no sample's doing
TRIAL_S = 300.0
TRIAL_WAIT_S = 60.0


class SuspectTrials:
    """The queued suspects, and the rule by which a worker may try them."""

    def __init__(self) -> None:
        self._by_size: dict[int, OrderedDict[str, Sample]] = {}  # those that wait for a trial, by its size
        self._since: dict[str, float] = {}  # when they came
        self._num_deaths = 0

    def __iter__(self) -> Iterator[Sample]:
        for waiting in self._by_size.values():
            yield from waiting.values()

    def add(self, sample: Sample, now: float) -> None:
        self._by_size.setdefault(sample.trial_size, OrderedDict())[sample.assignment_id] = sample
        self._since[sample.assignment_id] = now

    def discard(self, sample: Sample) -> None:
        """Take a sample out, if it is queued here."""
        waiting = self._by_size.get(sample.trial_size, OrderedDict())
        if waiting.pop(sample.assignment_id, None) is not None:
            del self._since[sample.assignment_id]
            if not waiting:
                del self._by_size[sample.trial_size]

    def take(
        self, running: Collection[Sample], num_free: int, now: float, place: Callable[[Sample], Lease | None]
    ) -> list[tuple[Sample, Lease]]:
        """Take out the suspects that a worker may try beside `running` and that `place` grants a lease. Small
        trials come first."""
        if not self._since or num_free <= 0:
            return []
        tried = [sample for sample in running if is_tried(sample, now)]
        is_apart = all(sample.num_deaths for sample in running)
        bound = min((sample.trial_size for sample in tried), default=max(self._by_size))
        taken: list[tuple[Sample, Lease]] = []
        for size in sorted(self._by_size):
            bound = min(bound, size) if not taken else bound
            for sample in sorted(self._by_size[size].values(), key=lambda one: one.outlived_s):
                if len(taken) == num_free or len(tried) + len(taken) >= bound:
                    break
                waited_s = now - self._since[sample.assignment_id]
                is_its_time = is_apart or waited_s >= TRIAL_WAIT_S * _trial_factor(sample)
                if is_its_time and (lease := place(sample)) is not None:
                    taken.append((sample, lease))
        for sample, _ in taken:
            self.discard(sample)
        return taken

    def note_death(self, running: Collection[Sample], now: float, alive_at: float) -> list[Sample]:
        """Note a worker's death in the samples that ran there. Returns queued samples that are suspect no more.
        Suspects of an earlier death are tried again among themselves, samples that were never suspect likewise. A
        sample that had outlived its last death is suspect only if there are none of these. If a suspect of an
        earlier death dies again, the others of that death were not its cause."""
        again = [sample for sample in running if has_not_outlived(sample, alive_at)]
        first = [sample for sample in running if sample.num_deaths == 0]
        outlived = [sample for sample in running if sample.num_deaths and not has_not_outlived(sample, alive_at)]
        for sample in outlived:
            sample.num_deaths = 0
        if not again and not first:
            first = outlived
        self._num_deaths += 1
        for accused, least in ((again, 1), (first, MIN_FIRST_TRIAL)):
            for sample in accused:
                sample.num_deaths += 1
                sample.outlived_s = now - sample.begun_at
                sample.trial_size = max(least, len(accused) // NUM_TRIALS)
                sample.is_only_suspect = len(again) + len(first) == 1
        settled = {sample.suspect_since for sample in again}
        cleared = [one for one in self if one.num_deaths == 1 and one.suspect_since in settled]
        for sample in cleared:
            self.discard(sample)
            sample.num_deaths = 0
        for sample in first:
            sample.suspect_since = self._num_deaths
        return cleared


def is_trial(running: Collection[Sample], now: float) -> bool:
    """Tell if a worker that runs these is in a trial. It gets no other work then."""
    return all(sample.num_deaths for sample in running) and any(is_tried(sample, now) for sample in running)


def is_tried(sample: Sample, now: float) -> bool:
    """Tell if a running suspect is still on trial."""
    return has_not_outlived(sample, now) and now - sample.begun_at <= TRIAL_S * _trial_factor(sample)


def _trial_factor(sample: Sample) -> float:
    return 4.0 ** (sample.num_deaths - 1)


def has_not_outlived(sample: Sample, at: float) -> bool:
    """Tell if a suspect has not run longer by now than it had when its last worker died."""
    return sample.num_deaths > 0 and at - sample.begun_at <= sample.outlived_s
