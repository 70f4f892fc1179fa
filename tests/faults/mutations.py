"""Planted faults, one after another, and what kills each: the fast tests of its files, or the first schedules.

python -m tests.faults.mutations                    # all; at most an hour on two cores
python -m tests.faults.mutations --only cancel --schedules 0

Each is planted in a copy of the tree. Exits with 1 if one survives, or if its text is not in its file any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_S = 3600.0
STEP_S = 600.0  # one that hangs a test or a schedule is killed by that
FAST = "not engine and not ray and not clients and not trainers and not long and not slow"
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
_STORE, _RETENTION, _SQLITE = (f"agentloop/storage/{one}.py" for one in ("trajectory_store", "retention", "sqlite"))
_QUEUE, _TRIALS = (f"agentloop/scheduling/{one}.py" for one in ("rollout_queue", "suspect_trials"))
_ROLLOUTS = "servers/agentloop_servers/coordinator/rollouts.py"
_ACCEPT = "await self._store.accept(rollout_id, groups, terms, encoded)"
_ADD = "self.queue.add(rollout_id, self._clock.now())"
_WORKER = "agentloop/rollout/worker.py"
_STORE_TESTS = ("tests/storage",)
_QUEUE_TESTS = ("tests/scheduling",)
_COORDINATOR_TESTS = ("tests/servers/coordinator",)
_WORKER_TESTS = ("tests/rollout/test_worker.py",)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault: in `file` the only `old` becomes `new`. `tests` are those of what it concerns."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation("synchronous_off", _STORE, 'synchronous="FULL"', 'synchronous="OFF"', _STORE_TESTS),
    Mutation(
        "epoch_not_checked_in_writes",
        _STORE,
        "self._new_facts = []\n        self._check_owner(db)",
        "self._new_facts = []",
        _COORDINATOR_TESTS,
    ),
    Mutation("cancel_not_durable", _STORE, "is_cancelled=True)", "is_cancelled=False)", _COORDINATOR_TESTS),
    Mutation(
        "later_record_wins",
        _STORE,
        'sample_index, value, crc, digest) VALUES (?, ?, ?, ?, ?, ?)"\n    " ON CONFLICT DO NOTHING"',
        'sample_index, value, crc, digest) VALUES (?, ?, ?, ?, ?, ?)"\n'
        '    f" ON CONFLICT (rollout_id, group_id, sample_index) {_REPLACES}"',
        _STORE_TESTS,
    ),
    Mutation("settled_counts_kept", _STORE, "self._settled.pop(rollout_id, None)", "pass", _COORDINATOR_TESTS),
    Mutation(
        "damage_not_told", _STORE, "                damaged.add(seq)", "                pass", _COORDINATOR_TESTS
    ),
    Mutation("acknowledge_not_clamped", _RETENTION, "(rollout_id, last),", "(rollout_id, cursor),", _STORE_TESTS),
    Mutation("acknowledge_goes_back", _RETENTION, " WHERE excluded.seq > acknowledged.seq", "", _STORE_TESTS),
    Mutation(
        "deletes_live_rollouts",
        _RETENTION,
        "{rollout_id for _, rollout_id in rows} - set(unfinished.live)",
        "{rollout_id for _, rollout_id in rows}",
        _STORE_TESTS,
    ),
    Mutation("checksum_not_compared", _SQLITE, "if zlib.crc32(data) == crc:", "if True:", _STORE_TESTS),
    Mutation("failed_batch_not_rolled_back", _SQLITE, "db.rollback()", "db.commit()", _STORE_TESTS),
    Mutation(
        "batch_fails_together",
        _SQLITE,
        "[problem] if len(works) == 1 else",
        "[problem] * len(works) if works else",
        _STORE_TESTS,
    ),
    Mutation(
        "digest_not_compared",
        _ROLLOUTS,
        "accepted == groups_digest(encoded) if accepted else",
        "",
        _COORDINATOR_TESTS,
    ),
    Mutation(
        "epoch_not_checked_at_hand_out",
        _ROLLOUTS,
        "await self._store.check_owner()",
        "await asyncio.sleep(0)",
        _COORDINATOR_TESTS,
    ),
    Mutation("cancel_not_restored", _ROLLOUTS, "if terms.is_cancelled:", "if False:", _COORDINATOR_TESTS),
    Mutation("no_grace_after_restart", _ROLLOUTS, "or self._grace_until is not None or", "or", _COORDINATOR_TESTS),
    Mutation(
        "queued_before_durable",
        _ROLLOUTS,
        f"            {_ACCEPT}\n            {_ADD}",
        f"            {_ADD}\n            {_ACCEPT}",
        _COORDINATOR_TESTS,
    ),
    Mutation(
        "recorded_before_durable",
        _ROLLOUTS,
        "            is_new = await self._store.add_records([record]) > 0",
        "            self._recorded(assignment_id, record)\n"
        "            is_new = await self._store.add_records([record]) > 0",
        _COORDINATOR_TESTS,
    ),
    Mutation("record_lost", _ROLLOUTS, "await self._store.add_records([record]) > 0", "True", _COORDINATOR_TESTS),
    Mutation(
        "failed_update_not_rolled_back",
        "agentloop/fleet/replica_sync.py",
        "await self._record(self._desired.weights.rolled_back())",
        "pass",
        _COORDINATOR_TESTS,
    ),
    Mutation(
        "keep_place_held_after_failure",
        _ROLLOUTS,
        "                    self.queue.give_back_keep_place(assignment_id)\n",
        "                    pass\n",
        _COORDINATOR_TESTS,
    ),
    Mutation(
        "foreign_failure_is_an_end",
        _ROLLOUTS,
        "if not self.queue.is_running_at(worker_id, assignment_id):\n                return False",
        "if False:\n                return False",
        _COORDINATOR_TESTS,
    ),
    Mutation(
        "surplus_is_kept",
        _ROLLOUTS,
        "if record.is_complete and not is_wanted:",
        "if False:",
        _COORDINATOR_TESTS,
    ),
    Mutation(
        "place_not_given_back",
        _ROLLOUTS,
        "self._replicas.end_lease(assignment_id, num_tokens)",
        "pass",
        _COORDINATOR_TESTS,
    ),
    Mutation(
        "unknown_sample_accepted",
        _ROLLOUTS,
        "if not await self._store.has_record(record):",
        "if False:",
        _COORDINATOR_TESTS,
    ),
    Mutation(
        "damaged_run_beside_live",
        _ROLLOUTS,
        "if self.queue.status(rollout_id) is not None:\n                raise Conflict",
        "if False:\n                raise Conflict",
        _COORDINATOR_TESTS,
    ),
    Mutation("lost_attempt_not_counted", _QUEUE, "        sample.last_attempt += 1\n", "", _QUEUE_TESTS),
    Mutation(
        "cancelled_is_run_again", _QUEUE, "if sample.is_cancelled or is_given_up:", "if is_given_up:", _QUEUE_TESTS
    ),
    Mutation(
        "group_keeps_one_too_many",
        _QUEUE,
        "+ len(group.keep_places) >= group.keep:",
        "+ len(group.keep_places) > group.keep:",
        _QUEUE_TESTS,
    ),
    Mutation("missing_is_never_lost", _QUEUE, ">= self._missing_after_s:", "< 0:", _QUEUE_TESTS),
    Mutation(
        "deaths_count_for_the_cohort",
        _TRIALS,
        "sample.is_only_suspect = len(again) + len(first) == 1",
        "sample.is_only_suspect = True",
        _QUEUE_TESTS,
    ),
    Mutation("cohort_not_cleared", _TRIALS, "        return cleared", "        return []", _QUEUE_TESTS),
    Mutation(
        "hand_in_gives_up_on_a_full_disk",
        _WORKER,
        "return is_late(state) and not isinstance(error, StorageFull)",
        "return is_late(state)",
        _WORKER_TESTS,
    ),
)


def main() -> None:
    """Plant each, say what killed it or that it survived, and exit with 1 if one did or was not tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose names hold this")
    parser.add_argument("--schedules", type=int, default=300)
    options = parser.parse_args()
    chosen = [one for one in MUTATIONS if options.only in one.name]
    ends_at, num_left = time.monotonic() + MOST_S, 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
        for one in chosen:
            started = time.monotonic()
            killer = _killer(tree, one, options.schedules, ends_at) if started < ends_at else None
            num_left += killer is None
            told = "not tried" if started >= ends_at else "SURVIVED" if killer is None else f"killed by {killer}"
            print(f"{one.name}: {told}, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{len(chosen)} planted faults, {num_left} not killed")
    sys.exit(1 if num_left else 0)


def _killer(tree: Path, one: Mutation, num_schedules: int, ends_at: float) -> str | None:
    path = tree / one.file
    text = path.read_text()
    if text.count(one.old) != 1:
        raise SystemExit(f"{one.name}: {text.count(one.old)} times in {one.file}: {one.old!r}")
    path.write_text(text.replace(one.old, one.new))
    try:
        tests = ("pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider", "-m", FAST, *one.tests)
        if (told := _failure(tree, tests, ends_at)) is not None:
            return told
        schedules = ("tests.faults.run", "--count", str(num_schedules), "--stop")
        return _failure(tree, schedules, ends_at) if num_schedules else None
    finally:
        path.write_text(text)


def _failure(tree: Path, arguments: tuple[str, ...], ends_at: float) -> str | None:
    """Run a module there. Returns the line that tells of its first failure; None: it had none."""
    paths = os.pathsep.join(str(tree / one) for one in ("", "servers", "tools"))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    timeout_s = max(1.0, min(STEP_S, ends_at - time.monotonic()))
    try:
        ended = subprocess.run(
            (sys.executable, "-m", *arguments),
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"{arguments[0]}: no end in {timeout_s:.0f} s" if time.monotonic() < ends_at else None
    if ended.returncode == 0:
        return None
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "seed "))]
    return lines[0][:160] if lines else f"{arguments[0]}: {(ended.stdout + ended.stderr)[-200:]}"


if __name__ == "__main__":
    main()
