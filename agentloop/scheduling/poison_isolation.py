"""Poison-pill isolation: finds the sample that kills its workers, by bisection.

After a worker's death all its samples are suspects. They run apart from other work, in trials of 1/`NUM_TRIALS` of
the samples that shared a death. If a trial's worker dies, only its samples remain suspects and the others of that
death are cleared, until one suspect is left; it fails after its attempts. A suspect is cleared of a death once it
has run longer than it had run at that death.

Owns the queued suspects. Synchronous; callers pass the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from agentloop.scheduling.samples import Sample
from agentloop.types import Lease

NUM_TRIALS = 16
MIN_FIRST_TRIAL = 4  # for the first death of its samples: most deaths have another cause
TRIAL_S = 300.0
TRIAL_WAIT_S = 60.0


class PoisonIsolation:
    """The queued suspects, and the rule by which a worker may run them."""

    def __init__(self) -> None:
        self._by_size: dict[int, OrderedDict[str, Sample]] = {}  # trial size -> the suspects that wait for a trial
        self._since: dict[str, float] = {}  # when each was queued
        self._num_deaths = 0

    def __iter__(self) -> Iterator[Sample]:
        for waiting in self._by_size.values():
            yield from waiting.values()

    def add(self, sample: Sample, now: float) -> None:
        self._by_size.setdefault(sample.trial_size, OrderedDict())[sample.assignment_id] = sample
        self._since[sample.assignment_id] = now

    def discard(self, sample: Sample) -> None:
        """Remove a sample if it is queued here."""
        waiting = self._by_size.get(sample.trial_size, OrderedDict())
        if waiting.pop(sample.assignment_id, None) is not None:
            del self._since[sample.assignment_id]
            if not waiting:
                del self._by_size[sample.trial_size]

    def take(
        self, running: Collection[Sample], num_free: int, now: float, place: Callable[[Sample], Lease | None]
    ) -> list[tuple[Sample, Lease]]:
        """Remove and return the suspects that a worker may run in addition to `running`.

        `place` grants each a lease. Small trials start first.
        """
        if not self._since or num_free <= 0:
            return []
        # A worker runs at most one trial, of the smallest size among its samples. Samples that ran shortest start
        # first, because a poison pill most likely kills early.
        tried = [sample for sample in running if is_tried(sample, now)]
        is_apart = all(sample.num_deaths for sample in running)
        bound = min((sample.trial_size for sample in tried), default=max(self._by_size))
        taken: list[tuple[Sample, Lease]] = []
        for size in sorted(self._by_size):
            bound = min(bound, size) if not taken else bound
            for sample in sorted(self._by_size[size].values(), key=lambda one: one.outlived_s):
                if len(taken) == num_free or len(tried) + len(taken) >= bound:
                    break
                # A suspect that found no empty worker for a while runs next to other work, so that it cannot wait
                # forever.
                waited_s = now - self._since[sample.assignment_id]
                is_its_time = is_apart or waited_s >= TRIAL_WAIT_S * _trial_factor(sample)
                if is_its_time and (lease := place(sample)) is not None:
                    taken.append((sample, lease))
        for sample, _ in taken:
            self.discard(sample)
        return taken

    def note_death(self, running: Collection[Sample], now: float, alive_at: float) -> list[Sample]:
        """Record a worker's death in the samples that ran there. Returns queued samples that are no longer
        suspect.

        `alive_at` is the last report from the worker. Suspects of an earlier death and new samples are bisected
        separately.
        """
        # The death lies between `alive_at` and `now`. A sample is cleared only if it was seen alive for longer
        # than its earlier death took at most.
        again = [sample for sample in running if has_not_outlived(sample, alive_at)]
        first = [sample for sample in running if sample.num_deaths == 0]
        outlived = [sample for sample in running if sample.num_deaths and not has_not_outlived(sample, alive_at)]
        for sample in outlived:
            sample.num_deaths = 0
        # If nothing else ran there, one of the samples that had been cleared is the cause.
        if not again and not first:
            first = outlived
        self._num_deaths += 1
        for accused, least in ((again, 1), (first, MIN_FIRST_TRIAL)):
            for sample in accused:
                sample.num_deaths += 1
                sample.outlived_s = now - sample.begun_at
                sample.trial_size = max(least, len(accused) // NUM_TRIALS)
                sample.is_only_suspect = len(again) + len(first) == 1
        # A suspect of an earlier death has died again, so the other samples of that death were not the cause.
        settled = {sample.suspect_since for sample in again}
        cleared = [one for one in self if one.num_deaths == 1 and one.suspect_since in settled]
        for sample in cleared:
            self.discard(sample)
            sample.num_deaths = 0
        for sample in first:
            sample.suspect_since = self._num_deaths
        return cleared


def is_trial(running: Collection[Sample], now: float) -> bool:
    """Return True if the worker runs a trial. It then gets no other work."""
    return all(sample.num_deaths for sample in running) and any(is_tried(sample, now) for sample in running)


def is_tried(sample: Sample, now: float) -> bool:
    """Return True if a running suspect's trial has not ended: at the latest after `TRIAL_S`, four times that per
    further death."""
    return has_not_outlived(sample, now) and now - sample.begun_at <= TRIAL_S * _trial_factor(sample)


def _trial_factor(sample: Sample) -> float:
    return 4.0 ** (sample.num_deaths - 1)


def has_not_outlived(sample: Sample, at: float) -> bool:
    """Return True if a suspect has not yet run longer than it had at its last worker's death."""
    return sample.num_deaths > 0 and at - sample.begun_at <= sample.outlived_s
