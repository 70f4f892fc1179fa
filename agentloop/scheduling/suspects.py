"""Suspects: samples that ran when their worker died, until they have proved that it was not their doing.

One of them may have killed it, and would kill the next worker that runs it. So they are tried in shares of those
that shared the death, `NUM_TRIALS` shares of each, on a worker that has nothing else; what dies again is suspect
among fewer, until one is left. That one is given up after its attempts, and nothing is given up for the deaths of
others. A suspect that runs longer than it had when its worker died has outlived that death. A trial may end sooner,
after `TRIAL_S`, four times as much with each further death: hours of work wait for no proof. A suspect that found
no worker for itself for `TRIAL_WAIT_S` is tried beside other work.

Ownership: those of the queue's samples that are queued here. Synchronous; time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from agentloop.scheduling.samples import Sample

NUM_TRIALS = 16
MIN_FIRST_TRIAL = 4  # of what shared one death only: most deaths are no sample's doing
TRIAL_S = 300.0
TRIAL_WAIT_S = 60.0


class Suspects:
    """The queued suspects, and the rule by which a worker may try them."""

    def __init__(self) -> None:
        self._by_size: dict[int, OrderedDict[str, Sample]] = {}  # size of a trial -> who waits for one
        self._since: dict[str, float] = {}  # when they came

    def __iter__(self) -> Iterator[Sample]:
        for waiting in self._by_size.values():
            yield from waiting.values()

    def add(self, sample: Sample, now: float) -> None:
        """Queue a suspect."""
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
        self, running: Collection[Sample], num_free: int, now: float, begin: Callable[[Sample], bool]
    ) -> list[Sample]:
        """Take out what a worker that runs `running` may try: small trials first, and what `begin` lets begin."""
        if not self._since or num_free <= 0:
            return []
        tried = [sample for sample in running if is_tried(sample, now)]
        since = now if all(sample.num_deaths for sample in running) else now - TRIAL_WAIT_S
        bound = min((sample.trial_size for sample in tried), default=max(self._by_size))
        taken: list[Sample] = []
        for size in sorted(self._by_size):
            bound = min(bound, size) if not taken else bound
            for name, sample in self._by_size[size].items():
                if len(taken) == num_free or len(tried) + len(taken) >= bound or self._since[name] > since:
                    break
                if begin(sample):
                    taken.append(sample)
        for sample in taken:
            self.discard(sample)
        return taken


def is_trial(running: Collection[Sample], now: float) -> bool:
    """Tell if a worker that runs these tries suspects apart from other work, and has to be left alone with them."""
    return all(sample.num_deaths for sample in running) and any(is_tried(sample, now) for sample in running)


def is_tried(sample: Sample, now: float) -> bool:
    """Tell if a running suspect is on trial yet."""
    longest_s = TRIAL_S * 4.0 ** (sample.num_deaths - 1)
    return has_not_outlived(sample, now) and now - sample.begun_at <= longest_s


def has_not_outlived(sample: Sample, now: float) -> bool:
    """Tell if a sample has run for no longer, since it was begun, than it had when its last worker died."""
    return sample.num_deaths > 0 and now - sample.begun_at <= sample.outlived_s


def accuse(running: Collection[Sample], now: float) -> None:
    """Note a worker's death in those that ran there.

    Suspects of an earlier death, and what was never suspect, each are accused among their like. What had outlived
    its last death is not accused beside them.
    """
    again = [sample for sample in running if has_not_outlived(sample, now)]
    first = [sample for sample in running if sample.num_deaths == 0]
    outlived = [sample for sample in running if sample.num_deaths and not has_not_outlived(sample, now)]
    for sample in outlived:
        sample.num_deaths = 0
    if not again and not first:
        first = outlived
    for accused, least in ((again, 1), (first, MIN_FIRST_TRIAL)):
        for sample in accused:
            sample.num_deaths += 1
            sample.outlived_s = now - sample.begun_at
            sample.trial_size = max(least, -(-len(accused) // NUM_TRIALS))
            sample.is_only_suspect = len(again) + len(first) == 1
