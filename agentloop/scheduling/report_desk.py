"""The desk for reports of leases: which of them are news, and which processes have to tell everything.

Ownership: the coordinator's side of `LeaseReport.sequence`; synchronous, time is passed in. A process sends one
report at a time, and the same until it is answered, so each counts exactly once: a number that was seen is a repeat
or a late copy, and one that does not follow means that this coordinator has missed some. Then, and of a process
that it does not know, nothing counts before a report of all leases.

Invariant: a process that was silent for `ttl_s` is not known, as its leases have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentloop.api.coordinator import LeaseReport


@dataclass(slots=True)
class _Process:
    seen_at: float
    sequence: int = 0  # of the last report that counted
    needs_full_report: bool = True


class ReportDesk:
    """The processes that report leases, by id, with the number of their last report."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._processes: dict[str, _Process] = {}

    def is_news(self, report: LeaseReport, now: float) -> bool:
        """Tell if a report is new; each counts once."""
        process = self._processes.setdefault(report.process_id, _Process(now))
        process.seen_at = now
        if report.sequence <= process.sequence:
            return False
        if report.leases is None and (process.needs_full_report or report.sequence != process.sequence + 1):
            process.needs_full_report = True
            return False
        process.sequence, process.needs_full_report = report.sequence, False
        return True

    def needs_full_report(self, process_id: str) -> bool:
        """Tell if the next report of a process has to name all its leases."""
        return process_id in self._processes and self._processes[process_id].needs_full_report

    def expire(self, now: float) -> None:
        """Forget the processes that fell silent."""
        silent = [name for name, process in self._processes.items() if now - process.seen_at >= self._ttl_s]
        for name in silent:
            del self._processes[name]
