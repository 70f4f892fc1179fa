"""Plant faults one after another, and name the test or schedule that kills each: fast tests first, then schedules.

python -m tests.faults.mutations                    # all; at most an hour on two cores
python -m tests.faults.mutations --only cancel --schedules 0

Each fault is planted in a copy of the tree. Exits with 1 if a fault survives or its
text is no longer in its file.
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
STEP_S = 600.0  # a fault that makes tests or schedules hang this long counts as killed
FAST = "not engine and not ray and not clients and not trainers and not long and not slow"
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
_STORE, _RETENTION, _SQLITE = (f"agentloop/storage/{one}.py" for one in ("trajectory_store", "retention", "sqlite"))
_QUEUE, _ISOLATION = (f"agentloop/scheduling/{one}.py" for one in ("rollout_queue", "poison_isolation"))
_ROLLOUTS = "servers/agentloop_servers/coordinator/rollouts.py"
_ACCEPT = "await self._store.accept(rollout_id, groups, terms, encoded)"
_ADD = "self.queue.add(rollout_id, self._clock.now())"
_WORKER = "agentloop/rollout/worker.py"
_BATCHES, _PARTS = "agentloop/client/batches.py", "agentloop/client/rollout.py"
_HELD, _ADAPTERS = "agentloop/engine/adapters.py", "agentloop/fleet/adapter_sync.py"
_SESSION, _SESSION_CALLS = "agentloop/sessions/session.py", "agentloop/sessions/calls.py"
_POSTGRES = "servers/agentloop_postgres/home.py"
_PUBLISHED = "servers/agentloop_store"
_JOURNAL, _HOMES = "agentloop/rollout/turn_journal.py", "agentloop/rollout/journal_homes.py"
_TOOLBOX, _ENVIRONMENT = "agentloop/rollout/toolbox.py", "agentloop/rollout/environment.py"
_AUX_ROWS, _SAMPLED_TOKENS = (f"agentloop/values/{one}.py" for one in ("aux_rows", "sampled_tokens"))
_DIGEST, _LIFECYCLE = "agentloop/engine/weight_digest.py", "agentloop/engine/lifecycle.py"
_SCHEMA, _MCP = "agentloop/parsers/json_schema.py", "tools/agentloop_tools/mcp.py"
_PUT = 'self._store.put(index, sorted(folder.glob("*.safetensors")))'
_ADVANCE = "self._store.advance(version)  # last: readers see the version only after its files are complete"
_SLEEP = "await self._sleep([one for one in others if one != name])"
_WAKE = "if statuses[name].asleep:\n            await self._models[name].wake(ALL_MEMORY)"
_STORE_TESTS = ("tests/storage",)
_QUEUE_TESTS = ("tests/scheduling",)
_COORDINATOR_TESTS = ("tests/servers/coordinator",)
_WORKER_TESTS = ("tests/rollout/test_worker.py",)
_BATCHES_TESTS = ("tests/client/test_batch_parts.py",)
_HELD_TESTS = ("tests/test_held_adapters.py",)
_ADAPTERS_TESTS = ("tests/fleet/test_adapters.py",)
_SESSION_TESTS = ("tests/sessions/test_session.py", "tests/sessions/test_retries.py")
_POSTGRES_TESTS = ("tests/parts/postgres/test_postgres.py",)
_PUBLISHED_TESTS = ("tests/parts/store/test_versions.py",)
_JOURNAL_TESTS = ("tests/rollout/test_turn_journal.py",)
_STORED_JOURNAL_TESTS = ("tests/storage/test_stored_journals.py",)
_ENVIRONMENT_TESTS = ("tests/rollout/test_environment.py",)
_DIGEST_TESTS = ("tests/fleet/test_weight_digest.py",)
_AUX_TESTS = ("tests/test_aux_rows.py", "tests/parts/contracts/test_aux_wires.py")
_CANARY_TESTS = ("tests/servers/engines/common/test_canary.py", "tests/test_canary.py")
_SCHEMA_TESTS = ("tests/parsers/test_json_schema.py",)
_MCP_TESTS = ("tests/parts/tools/test_mcp.py",)
_TURNS_TESTS = ("tests/servers/coordinator/test_model_turns.py",)
_GRADE_TESTS = ("tests/parts/tools/test_shell.py",)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault: the only occurrence of `old` in `file` becomes `new`. `tests` cover the changed behavior."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "experts_of_the_last_known_token_not_asked",
        _AUX_ROWS,
        "return max(num_known - 1, 0)",
        "return num_known",
        _AUX_TESTS,
    ),
    Mutation(
        "masks_not_compared_with_ids",
        _AUX_ROWS,
        "return not np.logical_or.reduceat(is_sampled, rows.ends - sizes).all()",
        "return False",
        _AUX_TESTS,
    ),
    Mutation(
        "rows_of_dropped_tokens_kept",
        _SAMPLED_TOKENS,
        "if self._aux is not None and num_tokens < len(self.token_ids):",
        "if False:",
        _AUX_TESTS,
    ),
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
        'sample_index, value, digest) VALUES (?, ?, ?, ?, ?)"\n    " ON CONFLICT DO NOTHING"',
        'sample_index, value, digest) VALUES (?, ?, ?, ?, ?)"\n'
        '    f" ON CONFLICT (rollout_id, group_id, sample_index) {_REPLACES}"',
        _STORE_TESTS,
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
    Mutation("damaged_file_served", _SQLITE, 'if result != "ok":', "if False:", _STORE_TESTS),
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
        "stored.groups_digest == groups_digest(encoded)",
        "known.num_accepted == num_new",
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
    Mutation("lost_attempt_not_counted", _QUEUE, "        sample.last_attempt += 1\n", "", _QUEUE_TESTS),
    Mutation(
        "cancelled_is_run_again", _QUEUE, "if sample.is_cancelled or is_given_up:", "if is_given_up:", _QUEUE_TESTS
    ),
    Mutation(
        "group_keeps_one_too_many",
        _QUEUE,
        "+ len(group.keep_places) >= group.keep:",
        "+ len(group.keep_places) > group.keep:",
        ("tests/servers/coordinator/test_keep.py",),
    ),
    Mutation("missing_is_never_lost", _QUEUE, ">= self._missing_after_s:", "< 0:", _QUEUE_TESTS),
    Mutation(
        "deaths_count_for_the_cohort",
        _ISOLATION,
        "sample.is_only_suspect = len(again) + len(first) == 1",
        "sample.is_only_suspect = True",
        _QUEUE_TESTS,
    ),
    Mutation("cohort_not_cleared", _ISOLATION, "        return cleared", "        return []", _QUEUE_TESTS),
    Mutation(
        "submission_gives_up_on_a_full_disk",
        _WORKER,
        "return is_late(state) and not isinstance(error, StorageFull)",
        "return is_late(state)",
        _WORKER_TESTS,
    ),
    Mutation(
        "carried_groups_not_counted_as_offered",
        _BATCHES,
        "rule.num_offered - num_open",
        "rule.num_offered",
        _BATCHES_TESTS,
    ),
    Mutation(
        "cancelled_groups_make_a_batch",
        _BATCHES,
        "if intended_batch < first_kept:",
        "if False:",
        ("tests/client/test_batches.py",),
    ),
    Mutation("finished_parts_never_forgotten", _BATCHES, "rollout.forget()", "pass", _BATCHES_TESTS),
    Mutation(
        "deletable_before_group_is_complete",
        _PARTS,
        "            group.append((trajectory, page))\n",
        "            page.num_left -= 1\n            group.append((trajectory, _ReadPage(0, 0)))\n",
        _BATCHES_TESTS,
    ),
    Mutation(
        "page_acknowledged_too_early",
        _PARTS,
        "takewhile(lambda page: page.num_left == 0, part.pages)",
        "part.pages",
        _BATCHES_TESTS,
    ),
    Mutation("adapter_in_use_unloaded", _HELD, "if num_calls:", "if False:", _HELD_TESTS),
    Mutation(
        "adapter_replaced_under_calls",
        _HELD,
        "[held for held in self._older if not held.num_calls]",
        "list(self._older)",
        _HELD_TESTS,
    ),
    Mutation("adapter_demand_not_checked", _HELD, "demand.check(held.adapter.version)", "pass", _HELD_TESTS),
    Mutation(
        "adapter_content_not_compared",
        _HELD,
        'if adapter.digest in ("", held.adapter.digest) else None',
        "",
        _HELD_TESTS,
    ),
    Mutation(
        "pinned_adapters_without_bound",
        _HELD,
        "if len(served) + len(older) >= 2 * self._max_loras:",
        "if False:",
        _HELD_TESTS,
    ),
    Mutation(
        "adapter_names_not_stored_first",
        _ADAPTERS,
        "await self.saved.save_first(coming, before, self._steps.config.save_timeout_s)",
        "pass",
        _ADAPTERS_TESTS,
    ),
    Mutation(
        "adapter_of_rollout_evicted", _ADAPTERS, "if one.name not in in_use and await", "if await", _ADAPTERS_TESTS
    ),
    Mutation(
        "evicted_adapter_not_loaded_again",
        _ADAPTERS,
        "await self._load_again(self._takers(), evicted)",
        "pass",
        _ADAPTERS_TESTS,
    ),
    Mutation(
        "adapter_version_goes_back",
        _ADAPTERS,
        "if version < least and not push.is_forced:",
        "if False:",
        _ADAPTERS_TESTS,
    ),
    Mutation(
        "adapter_loaded_without_a_replica_in_service",
        _ADAPTERS,
        "        if not takers:\n",
        "        if not takers:\n            return None\n        if False:\n",
        _ADAPTERS_TESTS,
    ),
    Mutation(
        "adapter_of_other_content_kept",
        _ADAPTERS,
        "and known.version == one.version:",
        "and False:",
        _ADAPTERS_TESTS,
    ),
    Mutation(
        "adapter_kept_by_a_joining_replica",
        _ADAPTERS,
        "while loaded != self.served:",
        "if loaded != self.served:",
        _ADAPTERS_TESTS,
    ),
    Mutation(
        "session_demand_not_given_to_calls",
        _SESSION,
        "if sampling.weight_version is None:",
        "if False:",
        _SESSION_TESTS,
    ),
    Mutation(
        "retry_of_committed_call_sampled_again",
        _SESSION,
        "if earlier is not None:\n            self._table",
        "if False:\n            self._table",
        _SESSION_TESTS,
    ),
    Mutation(
        "retry_does_not_join",
        _SESSION,
        "if isinstance(earlier, LiveCall):",
        "if False:",
        _SESSION_TESTS,
    ),
    Mutation("equal_bodies_are_one_call", _SESSION, "if key.retry_count > 0 else None", "", _SESSION_TESTS),
    Mutation(
        "retry_takes_another_clients_answer",
        _SESSION_CALLS,
        "self._retry_counts.get(call.call_id, 0) < key.retry_count",
        "True",
        ("tests/sessions/test_retries.py",),
    ),
    Mutation(
        "one_of_equal_calls_is_guessed",
        _SESSION_CALLS,
        "len(answerable) == 1 and not self.num_unanswered(key)",
        "True",
        ("tests/sessions/test_retries.py",),
    ),
    Mutation("failures_never_healed", _SESSION_CALLS, "healed.add(record.digest)", "pass", _SESSION_TESTS),
    Mutation(
        "idle_run_lease_not_renewed",
        _STORE,
        "await self._writer.run(lambda db: None)",
        "await asyncio.sleep(0)",
        _POSTGRES_TESTS,
    ),
    Mutation("revoked_shard_lease_remains", _STORE, "lease.revoke(db)", "pass", _POSTGRES_TESTS),
    Mutation(
        "revoked_lease_keeps_its_number", _POSTGRES, "SET number = number + 1, until", "SET until", _POSTGRES_TESTS
    ),
    Mutation(
        "records_committed_asynchronously",
        _POSTGRES,
        'if self._schema.synchronous != "FULL":',
        "if True:",
        _POSTGRES_TESTS,
    ),
    Mutation(
        "held_lease_taken",
        _POSTGRES,
        " WHERE leases.until <= clock_timestamp() OR leases.number = ? RETURNING",
        " WHERE ? IS NOT DISTINCT FROM leases.number OR TRUE RETURNING",
        _POSTGRES_TESTS,
    ),
    Mutation(
        "lease_number_repeats",
        _POSTGRES,
        "GREATEST(leases.number + 1, excluded.number)",
        "GREATEST(leases.number, excluded.number)",
        _POSTGRES_TESTS,
    ),
    Mutation(
        "lost_commit_not_asked_for",
        _POSTGRES,
        "if transaction is None or not self._was_committed(transaction):",
        "if True:",
        _POSTGRES_TESTS,
    ),
    Mutation(
        "another_runs_schema_accepted",
        _POSTGRES,
        'if self.owner is not None and about.get("run", self.owner) != self.owner:',
        "if False:",
        _POSTGRES_TESTS,
    ),
    Mutation(
        "released_lease_is_held_on",
        _POSTGRES,
        '"UPDATE leases SET until = clock_timestamp() WHERE name = ? AND number = ?"',
        '"UPDATE leases SET until = until WHERE name = ? AND number = ?"',
        _POSTGRES_TESTS,
    ),
    Mutation(
        "published_file_under_its_final_name",
        f"{_PUBLISHED}/store.py",
        'Path(f"{path}.part")',
        "Path(path)",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "pointer_goes_back",
        f"{_PUBLISHED}/store.py",
        "if latest is not None and version <= latest:",
        "if False:",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "pointer_before_files",
        f"{_PUBLISHED}/publisher.py",
        f"            num_bytes = {_PUT}\n            {_ADVANCE}\n",
        f"            {_ADVANCE}\n            num_bytes = {_PUT}\n",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "published_base_not_compared",
        f"{_PUBLISHED}/store.py",
        "if named not in (None, digest(index.raw)):",
        "if False:",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "published_checksum_not_compared",
        f"{_PUBLISHED}/format.py",
        "if state.hexdigest() != expected.checksum:",
        "if False:",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "damaged_copy_served",
        f"{_PUBLISHED}/local_versions.py",
        "if xxhash.xxh3_128_hexdigest(data) != sums.get(one.name):",
        "if False:",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "foreign_folder_replaced",
        f"{_PUBLISHED}/local_versions.py",
        "if target.exists() and not _is_ours(target):",
        "if False:",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "published_layout_not_compared",
        f"{_PUBLISHED}/publisher.py",
        "_check_layout(entries, base_tensors, latest)",
        "pass",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "copy_of_another_index_served",
        f"{_PUBLISHED}/local_versions.py",
        "if (folder / MADE_OF).read_bytes() != index.raw:",
        "if False:",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "delta_chain_never_ends",
        f"{_PUBLISHED}/publisher.py",
        "if len(chain) < self._options.full_every:",
        "if True:",
        _PUBLISHED_TESTS,
    ),
    Mutation(
        "end_of_episode_lost_after_resume",
        _TOOLBOX,
        "if keep is not None and self.ended is None:",
        "if keep is not None:",
        _ENVIRONMENT_TESTS,
    ),
    Mutation(
        "journal_of_another_task_continued",
        _JOURNAL,
        "if (header.assignment_id, header.fingerprint) != (name, wanted):",
        "if False:",
        _JOURNAL_TESTS,
    ),
    Mutation(
        "shorter_journal_continued",
        _JOURNAL,
        "(kept.num_sampled, kept.attempt)",
        "(-kept.num_sampled, kept.attempt)",
        _JOURNAL_TESTS,
    ),
    Mutation(
        "torn_journal_read_on", _JOURNAL, "if start != at or kind is None:", "if kind is None:", _JOURNAL_TESTS
    ),
    Mutation(
        "failed_journal_write_dropped",
        _JOURNAL,
        "            if error.retryable:\n                return False\n",
        "",
        _STORED_JOURNAL_TESTS,
    ),
    Mutation(
        "journal_kept_after_its_record",
        _JOURNAL,
        "self._doomed += [(run.assignment_id, name) for name in doomed]",
        "pass",
        _JOURNAL_TESTS,
    ),
    Mutation(
        "answers_of_earlier_turns_used", _JOURNAL, "if answer.turn_id == last_turn for", "for", _JOURNAL_TESTS
    ),
    Mutation("removed_journal_written_again", _HOMES, "is_new = part.number == 0", "is_new = True", _JOURNAL_TESTS),
    Mutation(
        "sweep_removes_unfinished",
        _HOMES,
        "for name in set(chunk) - pending for path",
        "for name in set(chunk) for path",
        _JOURNAL_TESTS,
    ),
    Mutation(
        "large_parts_in_one_call",
        _HOMES,
        "if chunk and num_bytes > MAX_CALL_PARTS_BYTES:",
        "if False:",
        _STORED_JOURNAL_TESTS,
    ),
    Mutation(
        "changed_folder_staged", _DIGEST, "if changed := sorted(before ^ now):", "if changed := []:", _DIGEST_TESTS
    ),
    Mutation(
        "digest_of_reload_not_compared",
        _DIGEST,
        "if are_comparable(expected, found) and expected != found:",
        "if False:",
        _DIGEST_TESTS,
    ),
    Mutation("digest_of_files_order", _DIGEST, "sorted(lines)", "lines", _DIGEST_TESTS),
    Mutation(
        "adapter_configuration_not_in_digest",
        _DIGEST,
        "if (config := Path(directory) / ADAPTER_CONFIG).is_file():",
        "if (config := Path()).is_file():",
        _DIGEST_TESTS,
    ),
    Mutation(
        "rewritten_folder_not_read_again",
        _DIGEST,
        "and cached.stamps == folder_stamps(directory)",
        "",
        _DIGEST_TESTS,
    ),
    Mutation(
        "repeat_with_other_content_reported_as_served",
        "agentloop/fleet/replica_sync.py",
        "is_same = found == served.update.digest",
        "is_same = True",
        _DIGEST_TESTS,
    ),
    Mutation(
        "content_forgotten_with_its_last_replica",
        "agentloop/fleet/replica_sync.py",
        "update = replace(update, digest=known.update.digest)",
        "pass",
        _DIGEST_TESTS,
    ),
    Mutation(
        "canary_check_skipped",
        _LIFECYCLE,
        "self._needs_canary = not is_forced",
        "self._needs_canary = False",
        _CANARY_TESTS,
    ),
    Mutation(
        "tokens_leave_during_canary_check",
        _LIFECYCLE,
        "await asyncio.shield(self._output_release)",
        "pass",
        _CANARY_TESTS,
    ),
    Mutation(
        "refused_weights_have_a_version",
        _LIFECYCLE,
        "        self.version = None\n        self._discard_output(",
        "        self._discard_output(",
        _CANARY_TESTS,
    ),
    Mutation(
        "equal_logits_pass",
        "agentloop/engine/canary.py",
        "if max(logprobs) <= _TOLERANCE - math.log(vocab_size):",
        "if False:",
        _CANARY_TESTS,
    ),
    Mutation(
        "stopped_at_staleness_limit_dropped",
        _ROLLOUTS,
        "record.stop_reason is StopReason.STALE and record.num_response_tokens == 0",
        "record.stop_reason is StopReason.STALE",
        ("tests/servers/coordinator/test_coordinator.py",),
    ),
    Mutation(
        "lost_answer_not_queued",
        _ROLLOUTS,
        "if not is_live and not known.is_done:",
        "if False:",
        ("tests/servers/coordinator/test_keep.py",),
    ),
    Mutation(
        "snapshot_of_another_version_restored",
        _ENVIRONMENT,
        'if saved["version"] != self._version():',
        "if False:",
        _ENVIRONMENT_TESTS,
    ),
    Mutation("attributes_outlive_a_restore", _ENVIRONMENT, "vars(self).clear()", "pass", _ENVIRONMENT_TESTS),
    Mutation(
        "object_held_twice_in_a_snapshot", _ENVIRONMENT, "if id(value) in seen:", "if False:", _ENVIRONMENT_TESTS
    ),
    Mutation(
        "overlapping_one_of_enforced",
        _SCHEMA,
        "if not allowed_types(one, root) & allowed_types(other, root):",
        "if True:",
        _SCHEMA_TESTS,
    ),
    Mutation(
        "all_of_is_any_of",
        _SCHEMA,
        'if key == "allOf" else frozenset.union(*parts)',
        'if key == "" else frozenset.union(*parts)',
        _SCHEMA_TESTS,
    ),
    Mutation(
        "required_undescribed_key_passes",
        _SCHEMA,
        'if missing := [key for key in _list(node, "required") if key not in named]:',
        "if missing := []:",
        _SCHEMA_TESTS,
    ),
    Mutation(
        "call_that_ran_is_repeated",
        _MCP,
        "error.was_refused or (self._tool.can_repeat and attempt == 1)",
        "True",
        _MCP_TESTS,
    ),
    Mutation(
        "proxy_page_is_the_servers_answer",
        _MCP,
        'return {"code": _FAILED_EXCHANGE, "message": message, "data": details}',
        'return {"code": _VERDICT, "message": message}',
        _MCP_TESTS,
    ),
    Mutation(
        "grade_by_exit_status",
        "tools/agentloop_tools/sandbox/grading.py",
        "has_passed = token.encode() in ran.output.split()",
        "has_passed = ran.status == 0",
        _GRADE_TESTS,
    ),
    Mutation(
        "next_model_wakes_before_others_sleep",
        "servers/agentloop_servers/coordinator/model_turns.py",
        f"        {_SLEEP}\n        {_WAKE}\n",
        f"        {_WAKE}\n        {_SLEEP}\n",
        _TURNS_TESTS,
    ),
    Mutation(
        "failed_switch_not_repeated",
        "servers/agentloop_servers/coordinator/model_turns.py",
        "await self._give(awake[0] if awake else self._next)",
        "await self._give(awake[0] if awake else next(iter(self._models)))",
        _TURNS_TESTS,
    ),
    Mutation(
        "ended_engine_blocks_a_sleep",
        "agentloop/simulation/engine.py",
        "        except EngineLost:  # an ended engine holds no memory\n            return\n",
        "        except EngineLost:\n            raise\n",
        ("tests/simulation/test_simulated_engine.py",),
    ),
    Mutation(
        "unusable_engine_does_not_sleep_again",
        _LIFECYCLE,
        "return self.asleep != ALL_MEMORY or",
        "return not self.asleep or",
        ("tests/test_engine_lifecycle.py",),
    ),
)


def main() -> None:
    """Plant each fault and print its result. Exit with 1 if a fault survived or was not tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="plant only faults whose names contain this text")
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
            result = "not tried" if started >= ends_at else "SURVIVED" if killer is None else f"killed by {killer}"
            print(f"{one.name}: {result}, {time.monotonic() - started:.0f} s", flush=True)
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
        if (failure := _failure(tree, tests, ends_at)) is not None:
            return failure
        schedules = ("tests.faults.run", "--count", str(num_schedules), "--stop")
        return _failure(tree, schedules, ends_at) if num_schedules else None
    finally:
        path.write_text(text)


def _failure(tree: Path, arguments: tuple[str, ...], ends_at: float) -> str | None:
    """Run a module in `tree`. Returns the line of its first failure, or None if it passed."""
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
