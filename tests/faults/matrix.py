"""The table of faults and bad input: the required behavior in each case, and the tests that trigger it.

python -m tests.faults.matrix  # writes docs/reference/faults.md
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "faults.md"
_SCHEDULES = "faults/test_schedules.py::test_schedules"
_SERVICE = "servers/test_service.py::test_"
_DEPLOY = "servers/test_deploy.py::test_a_service_that_is_deployed_again_goes_on_where_it_was"
_BAD_REQUESTS = "servers/endpoint/test_bad_requests.py::test_"
_RETRIES = "sessions/test_retries.py::test_"
_MODELS = "parts/models/"
_BAD_INPUT = "servers/endpoint/test_bad_input.py::test_"
_HOT_LOAD = "parts/contracts/test_hot_load.py::test_"
_KEYS = "servers/http/test_bad_keys.py::test_"
_DISCONNECTS = "servers/endpoint/test_disconnects.py::test_"
_ENDPOINT = "servers/endpoint/test_endpoint_service.py::test_"
_REPLICA = "servers/replica/test_replica.py::test_"
_REPLICAS = "servers/coordinator/test_replicas.py::test_"
_COORDINATOR = "servers/coordinator/test_coordinator.py::test_"
_RESTART = "servers/coordinator/test_restart.py::test_"
_LEASED = "generation/test_leased_engine.py::test_"
_HOLDS = "fleet/test_holds.py::test_"
_UPDATE = "fleet/test_weight_update.py::test_"
_TOOLBOX = "rollout/test_toolbox.py::test_"
_USER_CODE = "rollout/test_user_code.py::test_"
_JOURNAL = "rollout/test_turn_journal.py::test_"
_WORKER = "rollout/test_worker.py::test_"
_PYTHON = "parts/tools/test_python.py::test_"
_HERMES = "parsers/test_hermes.py::test_"


@dataclass(frozen=True, slots=True)
class Row:
    """One case. `tests` are names under `tests/`; without tests, `why_not` gives the reason."""

    case: str
    expected: str
    tests: tuple[str, ...] = ()
    why_not: str = ""


ROWS: tuple[Row, ...] = (
    Row(
        "SIGKILL of a replica while it decodes, not streamed",
        "the turn continues on another replica with the same prompt ids; one committed turn; others are unaffected",
        (
            f"{_WORKER}a_lost_replica_costs_a_retry_elsewhere",
            f"{_SERVICE}a_killed_part_costs_no_accepted_task",
            _SCHEDULES,
        ),
    ),
    Row(
        "the same, streamed, after some tokens",
        "it continues from the ids that were sent; no token is repeated",
        (f"{_LEASED}a_cut_stream_goes_on_without_a_token_more_or_less", _SCHEDULES),
    ),
    Row(
        "SIGKILL of an evaluator that holds replicas, or of a held replica",
        "the hold ends after its lease, its replicas catch up; samples move to other held replicas, or are errors",
        (
            f"{_HOLDS}a_killed_evaluator_holds_nothing_after_its_lease",
            f"{_HOLDS}the_samples_of_a_lost_replica_move_to_the_other_held_one",
            f"{_HOLDS}a_hold_without_a_replica_ends_and_its_samples_are_errors",
            _SCHEDULES,
        ),
    ),
    Row(
        "SIGKILL of a worker",
        "its trajectories resume at their last turn; stored tool results are reused; `attempt` increases",
        (
            f"{_JOURNAL}it_goes_on_after_every_death",
            f"{_JOURNAL}a_trajectory_goes_on_at_its_last_turn_and_runs_no_tool_again",
            _SCHEDULES,
        ),
    ),
    Row(
        "SIGKILL of ingress or coordinator",
        "new requests wait or get 503; sessions and accepted work are intact",
        (
            f"{_ENDPOINT}a_killed_ingress_process_loses_nothing_that_was_answered",
            f"{_COORDINATOR}a_restart_loses_nothing_and_adopts_what_runs",
            f"{_SERVICE}a_killed_part_costs_no_accepted_task",
            _SCHEDULES,
        ),
    ),
    Row(
        "all replicas dead",
        "503 with Retry-After; work stays in bounded queues; the service recovers automatically",
        (
            f"{_COORDINATOR}without_a_replica_work_stays_queued",
            f"{_REPLICAS}a_lost_replicas_trajectories_move",
            _SCHEDULES,
        ),
    ),
    Row(
        "an engine hangs: it returns no tokens, and its port is open",
        "a watchdog stops it; its requests fail as lost and continue on another replica",
        (
            f"{_REPLICA}a_hung_engine_is_ended_by_its_replica_and_its_requests_fail_as_lost",
            f"{_REPLICAS}a_replica_that_accepts_everything_and_answers_nothing_is_taken_out",
            _SCHEDULES,
        ),
    ),
    Row(
        "pause (keep) during many turns, then resume",
        "no errors; no token is lost or repeated; spans contain both versions",
        (
            "fleet/test_weight_update.py::test_with_simulated_engines",
            f"{_SERVICE}an_update_under_load_loses_nothing",
            _SCHEDULES,
        ),
    ),
    Row(
        "pause while a client streams for longer than its read timeout",
        "keep-alive comments are sent; the client does not time out",
        (f"{_DISCONNECTS}08_comments_keep_a_stream_alive_through_a_pause",),
    ),
    Row(
        "a pause without a resume",
        "after `max_pause_s` new calls get 503, the health check fails, and the number of waiting calls is bounded",
        (f"{_REPLICA}a_pause_that_nobody_ends_refuses_new_requests_and_holds_those_it_has",),
    ),
    Row(
        "pause twice, resume twice, resume without a pause",
        "idempotent",
        ("fleet/test_replica_sync.py::test_operator_pause_and_resume_are_idempotent",),
    ),
    Row(
        "a weight update fails on one of several replicas",
        "the replica is quarantined; the reported fleet version is correct",
        (f"{_UPDATE}one_replica_fails_and_the_others_go_on", _SCHEDULES),
    ),
    Row(
        "a crash between pause and resume",
        "a replica accepts traffic only with the fleet's version",
        (
            f"{_REPLICAS}a_coordinator_that_dies_after_the_first_commit_brings_the_others_after_it",
            f"{_UPDATE}an_update_cut_short_leaves_no_replica_in_between",
            _SCHEDULES,
        ),
    ),
    Row(
        "a stale replica answers with an old version",
        "its spans contain the old version; the run's staleness limit applies",
        (
            "fleet/test_registry.py::test_a_suspect_that_missed_an_update_does_not_come_back_with_old_weights",
            f"{_LEASED}a_continuation_never_goes_back_in_weight_versions",
            f"{_WORKER}finish_ends_a_stale_trajectory_with_what_it_has",
        ),
    ),
    Row(
        "a client disconnects, streamed or not",
        "the engine's request ends within a second; no task remains; the session records it",
        (
            f"{_DISCONNECTS}14_a_client_that_leaves_frees_the_engine",
            f"{_ENDPOINT}a_client_that_leaves_ends_the_call_in_the_engine_through_either_process",
        ),
    ),
    Row(
        "an SDK's timeout, then its automatic retry",
        "the retry gets the stored answer or joins the running call; exactly one turn",
        (
            f"{_RETRIES}a_committed_answer_is_given_again",
            f"{_RETRIES}retries_join_the_call_in_flight",
            f"{_DISCONNECTS}14_a_retry_that_waits_too_keeps_the_call",
            _SCHEDULES,
        ),
    ),
    Row(
        "two equal prompts at once, neither a retry",
        "two sibling turns",
        (f"{_RETRIES}identical_bodies_are_two_samples",),
    ),
    Row(
        "200 turns at once in one session",
        "no corruption, no deadlock",
        ("sessions/test_session.py::test_two_hundred_turns_at_once",),
    ),
    Row(
        "a network to the engine that drops, delays and cuts connections",
        "deadlines hold; retries are bounded",
        (
            "servers/endpoint/test_cut_connections.py::test_no_turn_is_doubled_or_lost_when_connections_are_cut",
            f"{_LEASED}attempts_end",
            _SCHEDULES,
        ),
    ),
    Row(
        "a half-open connection to the engine",
        "detected by TCP keep-alive and by missing heartbeats",
        (
            "servers/private_http/test_private_http.py::test_both_ends_of_a_connection_notice_a_vanished_peer",
            f"{_REPLICA}a_replica_that_falls_silent_is_lost",
        ),
    ),
    Row(
        "an engine answers with wrong lengths, impossible logprobs or ids",
        "`malformed_engine_response`; never stored as trainable",
        (
            "test_checks.py::test_a_malformed_generation_is_refused",
            f"{_LEASED}malformed_pieces_are_never_given_out",
            _SCHEDULES,
        ),
    ),
    Row(
        "an engine returns misplaced routed experts, or a sampling mask without the sampled id",
        "the answer is refused as malformed and sampled again; recorded rows always belong to the recorded tokens",
        (
            "test_aux_rows.py::test_rows_that_do_not_belong_to_the_tokens_are_never_stored",
            "test_aux_rows.py::test_misaligned_rows_of_a_turn_are_a_broken_invariant",
            _SCHEDULES,
        ),
    ),
    Row(
        "an engine's text differs from its ids",
        "the ids are used",
        why_not="engines return ids only; the service reads no text from engines.",
    ),
    Row(
        "a tool raises, times out, is killed, prints endlessly, forks",
        "the policy gets a tool message with the error; limits are enforced; the worker stays healthy",
        (
            f"{_USER_CODE}what_a_tool_raises_is_an_answer",
            f"{_USER_CODE}a_huge_answer_is_cut_before_it_is_encoded",
            f"{_TOOLBOX}a_timeout_is_an_error_and_the_next_call_gets_a_new_session",
            f"{_PYTHON}a_worker_that_dies_is_replaced",
            f"{_PYTHON}runaway_code_is_stopped_and_the_next_call_works",
        ),
    ),
    Row(
        "a tool ignores its cancellation",
        "it is abandoned after a grace period, and its slot is released",
        (f"{_TOOLBOX}a_tool_that_ignores_cancellation_is_abandoned_and_frees_its_slot",),
    ),
    Row(
        "a tool's output contains control tokens, fake calls, ANSI, NUL",
        "it is plain text: no control token, no additional role",
        (
            "rendering/test_tokenizer.py::test_content_is_encoded_as_the_text_it_is",
            "rendering/test_tokenizer.py::test_nul_and_escape_codes_pass_exactly",
            f"{_TOOLBOX}odd_text_stays_plain_and_becomes_valid_utf_8",
        ),
    ),
    Row(
        "a tool's output asks the agent to call admin or file URLs",
        "only declared tools can be called",
        (
            f"{_TOOLBOX}an_undeclared_tool_is_as_unknown_as_one_that_does_not_exist",
            f"{_PYTHON}nothing_of_the_host_is_reachable",
        ),
    ),
    Row(
        "an unknown tool, bad arguments, ten thousand calls in a turn",
        "an error message for each call; a limit on calls; no exception",
        (
            f"{_WORKER}an_unknown_tool_and_bad_arguments_are_answered",
            f"{_HERMES}calls_beyond_the_cap_are_reported_as_one",
            "rollout/test_budget.py::test_excess_calls_are_answered_or_stop",
        ),
    ),
    Row(
        "the model repeats the same call",
        "limits of turns, calls and time end the trajectory with their stop reason",
        (
            f"{_WORKER}each_limit_has_its_stop_reason",
            "rollout/test_budget.py::test_the_trajectory_has_a_budget_of_calls",
        ),
    ),
    Row(
        "the disk is full, or read-only",
        "new work gets 507; running work is not lost and continues when space is free",
        (
            "storage/test_full_disk.py::test_what_finds_no_room_is_refused_and_later_written",
            "servers/endpoint/test_sessions_end.py::test_a_full_disk_fails_calls_and_then_all_goes_on",
            _SCHEDULES,
        ),
    ),
    Row(
        "a torn tail, a flipped byte",
        "the service refuses to start and names the damaged store; logs and journals are read up to the damage",
        (
            "storage/test_sqlite.py::test_a_damaged_file_is_refused_and_a_sound_one_that_is_written_is_not",
            "servers/endpoint/test_open_calls_log.py::test_a_damaged_line_and_a_last_one_that_was_cut_off_are_passed_over",
            f"{_JOURNAL}a_torn_or_flipped_file_gives_the_turns_before_the_damage",
        ),
    ),
    Row(
        "the wall clock jumps by an hour",
        "deadlines do not change; a coordinator's orders stay in order",
        (f"{_REPLICA}a_new_process_outranks_the_one_before_it", _SCHEDULES),
    ),
    Row(
        "the event loop is blocked for seconds",
        "the log names the cause; the blocked time does not count as silence of other processes",
        (
            f"{_USER_CODE}what_blocks_the_event_loop_is_named",
            f"{_REPLICA}the_time_in_which_the_replica_itself_stood_still_does_not_count",
            f"{_COORDINATOR}a_worker_that_stalls_again_and_again_keeps_its_work",
        ),
    ),
    Row(
        "memory or connections run out",
        "load is rejected, and the service recovers",
        (
            "servers/endpoint/test_registry.py::test_memory_that_is_all_in_use_is_an_overload",
            f"{_BAD_REQUESTS}36_the_oldest_connections_make_room",
            "servers/endpoint/test_routes_openai.py::test_calls_beyond_the_bound_are_refused_and_their_places_come_back",
        ),
    ),
    Row(
        "SIGTERM under load",
        "no new work starts, running work ends within the grace period, the rest can be resumed",
        (
            f"{_RESTART}a_service_that_stops_begins_nothing_and_leaves_the_rest_to_the_next",
            f"{_SERVICE}ctrl_c_leaves_no_process",
            f"{_SERVICE}a_part_that_is_told_to_end_gives_back_what_it_has_and_ends",
        ),
    ),
    Row(
        "a redeploy under load",
        "no connection is refused; accepted work is neither lost nor duplicated",
        (_DEPLOY,),
    ),
    Row(
        "a client that reads one byte a second",
        "it is disconnected; other clients do not wait",
        (
            f"{_BAD_REQUESTS}35_who_does_not_read_is_cut_off_and_others_do_not_wait",
            f"{_BAD_REQUESTS}35_an_answer_that_nobody_takes_is_given_up",
        ),
    ),
    Row(
        "headers or a body that do not arrive",
        "the connection is closed at a deadline",
        (
            f"{_BAD_REQUESTS}36_headers_that_do_not_come_are_not_waited_for",
            f"{_BAD_REQUESTS}36_a_body_that_does_not_come_is_not_waited_for",
        ),
    ),
    Row(
        "a body beyond the limit, also chunked",
        "413 before more than the limit is stored in memory",
        (f"{_BAD_REQUESTS}37_a_body_beyond_the_bound", f"{_BAD_REQUESTS}37_a_body_without_a_length"),
    ),
    Row("a compressed bomb", "415", (f"{_BAD_REQUESTS}38_compressed_bodies_are_not_taken",)),
    Row(
        "headers of 64 KB, ten thousand headers",
        "431 or 400; the process continues",
        (
            f"{_BAD_REQUESTS}39_too_many_headers",
            f"{_BAD_REQUESTS}39_what_has_no_end_is_not_listened_to",
            f"{_BAD_REQUESTS}39_lines_are_counted_while_they_come",
        ),
    ),
    Row(
        "malformed, truncated or empty JSON, a wrong media type",
        "400 in the dialect's error format",
        (f"{_BAD_INPUT}what_is_no_json", f"{_BAD_INPUT}40_the_wrong_media_type_is_named"),
    ),
    Row("nesting of 100,000, an integer of 5,000 digits", "400", (f"{_BAD_INPUT}what_is_no_json",)),
    Row(
        "NaN, Infinity, 1e999",
        "400 that names the field",
        (f"{_BAD_INPUT}what_is_no_json", f"{_BAD_INPUT}bad_bodies"),
    ),
    Row("a lone surrogate", "400", (f"{_BAD_INPUT}what_is_no_json", f"{_BAD_INPUT}bad_bodies")),
    Row(
        "UTF-16, invalid UTF-8, duplicate names, NUL",
        "400; the last of duplicate names is used; NUL is preserved",
        (
            f"{_BAD_INPUT}what_is_no_json",
            f"{_BAD_INPUT}44_of_duplicate_names_the_last_counts",
            f"{_BAD_INPUT}44_nul_and_control_characters_pass_exactly",
        ),
    ),
    Row("a body with thousands of errors", "the first errors are reported", (f"{_BAD_INPUT}bad_bodies",)),
    Row(
        "a wrong type, a number out of range, lists that are too long",
        "400 that names the field",
        (f"{_BAD_INPUT}bad_bodies", f"{_BAD_INPUT}46_what_is_harmless_is_accepted"),
    ),
    Row(
        "a prompt longer than the context, odd `max_tokens`",
        "400 `context_length_exceeded`; `max_tokens` is reduced to the remaining context",
        (
            f"{_BAD_INPUT}47_more_than_the_context_holds_is_clamped",
            f"{_BAD_INPUT}bad_bodies",
            f"{_SERVICE}a_prompt_longer_than_the_context_is_a_record_of_its_own",
        ),
    ),
    Row(
        "a catastrophic pattern, grammar or schema",
        "refused, or compiled without delaying other calls",
        (
            f"{_BAD_INPUT}48_a_pattern_that_is_catastrophic_to_match_does_not_hold_up_others",
            "sessions/test_refusals.py::test_what_cannot_be_constrained_is_refused",
        ),
    ),
    Row(
        "hostile output of the model, for each parser",
        "parsed in linear time; content is kept",
        (
            f"{_HERMES}hostile_text_takes_linear_time",
            "parsers/test_qwen3_xml.py::test_hostile_text_takes_linear_time",
            "parsers/test_families.py::test_a_turn_cut_anywhere_has_no_call_that_was_not_written",
        ),
    ),
    Row(
        "an unknown model, an unknown or expired session",
        "404; 410",
        (
            f"{_BAD_REQUESTS}50_a_session_that_expired_is_gone",
            f"{_BAD_REQUESTS}50_a_finished_session_takes_no_call_and_a_deleted_one_never_was",
            "servers/endpoint/test_routes_openai.py::test_refusals",
        ),
    ),
    Row(
        "no key, a wrong key, two keys",
        "401 in the dialect's error format",
        (f"{_KEYS}51_without_a_good_key", f"{_KEYS}51_accepted_forms"),
    ),
    Row(
        "a forged Host or path",
        "keys are required on every route",
        (
            f"{_KEYS}52_a_bad_host_opens_nothing",
            f"{_KEYS}52_no_spelling_of_a_path_goes_round_the_key",
            f"{_KEYS}52_without_keys_this_machine_is_served_by_its_names",
        ),
    ),
    Row(
        "ambiguous requests (request smuggling)",
        "400, and the connection is closed",
        (f"{_KEYS}53_requests_of_two_readings_are_refused",),
    ),
    Row(
        "an admin route with a user's key",
        "403",
        (
            f"{_KEYS}54_a_users_key_and_a_sessions_key_have_their_bounds",
            "servers/ingress/test_ingress.py::test_a_users_key_does_not_open_admin_routes",
        ),
    ),
    Row(
        "weights from outside the roots, or not safetensors",
        "400",
        (
            "servers/ingress/test_ingress.py::test_weights_come_from_under_the_roots_only",
            "test_checks.py::test_a_broken_checkpoint_is_refused",
        ),
    ),
    Row(
        "pickle bytes to every open port",
        "never unpickled; the connection is closed",
        (
            f"{_REPLICA}foreign_bytes_are_refused",
            "servers/weight_transfer/test_protocol.py::test_a_stranger_is_dropped_and_disturbs_nobody",
            f"{_BAD_INPUT}what_is_no_json",
        ),
    ),
    Row(
        "image URLs to private addresses",
        "nothing is fetched: images are data URLs, or files under the roots",
        (
            "test_images.py::test_what_is_no_image_is_refused",
            "test_images.py::test_local_files_are_read_within_their_roots_only",
        ),
    ),
    Row(
        "code in the sandbox that reads the host, forks, fills the disk",
        "denied; quotas are enforced",
        (
            f"{_PYTHON}nothing_of_the_host_is_reachable",
            f"{_PYTHON}sixteen_trajectories_share_two_workers_past_hostile_ones",
            "parts/tools/test_escapes.py::test_an_escape_fails",
            "parts/tools/test_sandboxes.py::test_a_killed_worker_leaves_nothing",
        ),
    ),
    Row(
        "a chat template in a request, arguments with loops",
        "the template is refused; arguments that the model's template does not read are ignored",
        (
            f"{_BAD_INPUT}bad_bodies",
            "servers/endpoint/test_client_habits.py::test_every_dialect_gives_arguments_to_the_template",
        ),
    ),
    Row(
        "another key's session or rollout",
        "404",
        (
            f"{_KEYS}60_nobody_sees_another_keys_session",
            "servers/ingress/test_ingress.py::test_a_key_reaches_its_own_rollouts_and_the_admin_all",
        ),
    ),
    Row(
        "newlines and secrets in headers",
        "escaped; keys are not logged",
        (
            f"{_KEYS}61_a_request_id_that_could_write_logs_is_replaced",
            f"{_KEYS}61_keys_are_not_logged",
            "test_logs.py::test_secrets_never_reach_the_file",
        ),
    ),
    Row(
        "Ray's ports without its token",
        "refused",
        why_not="tested by Ray: the service starts Ray with token authentication and without its dashboard.",
    ),
    Row(
        "a long run under random kills",
        "each accepted call is committed once or returns an error; no token has a wrong version; stable memory",
        why_not="`make soak` is this run, 20 minutes on two cores; results: `tests/benchmarks/RESULTS.md`.",
    ),
    Row(
        "a replica's process stops responding permanently",
        "its work continues on other replicas; the process is replaced within a minute",
        (f"{_SERVICE}a_part_that_stands_still_for_good_is_replaced", _SCHEDULES),
    ),
    Row(
        "an engine hangs during its start, in Python or native code",
        "its process reports the location, exits, and is restarted",
        (
            "servers/test_start_bound.py::test_the_process_ends_and_says_why",
            f"{_REPLICA}the_start_of_the_engine_is_bounded_and_the_wait_before_it_is_not",
        ),
    ),
    Row(
        "finite weights with uniform logits",
        "the canary replica refuses them with an error; the others keep their weights; no token is sent",
        (
            "fleet/test_noise.py::test_the_first_refuses_noise_and_the_fleet_stays_where_it_was",
            "servers/engines/vllm/test_vllm_weights.py::test_noise_is_refused_and_no_token_of_it_given_out",
            _SCHEDULES,
        ),
    ),
    Row(
        "an unknown model name; a hub that cannot be reached or refuses; a file that cannot be converted",
        "one line before anything starts: the accepted forms and known names, or the reason",
        (
            f"{_MODELS}test_fetch.py::test_an_unknown_name_lists_the_known_ones",
            f"{_MODELS}test_hub.py::test_a_hub_that_refuses_is_one_line",
            f"{_MODELS}test_hub.py::test_a_hub_that_cannot_be_reached_is_one_line",
            f"{_MODELS}test_convert.py::test_an_architecture_that_cannot_be_converted_is_one_line",
            f"{_MODELS}test_fetch.py::test_a_file_that_is_no_gguf_is_refused_with_the_converters_reason",
        ),
    ),
    Row(
        "a model's package is missing or has other bytes; the cache's disk is full",
        "one line that names the package or the disk; complete packages are kept",
        (
            f"{_MODELS}test_fetch.py::test_a_missing_part_is_named_and_the_others_are_not_fetched_again",
            f"{_MODELS}test_fetch.py::test_a_part_with_other_bytes_is_named_and_the_others_are_kept",
            f"{_MODELS}test_fetch.py::test_a_wrong_file_and_a_full_disk_are_one_line",
            f"{_MODELS}test_fetch.py::test_a_disk_that_is_full_in_the_middle_is_one_line",
        ),
    ),
    Row(
        "messages for a model without a chat template",
        "400 with the hint `chat.template.file`; text and tokens are completed",
        ("servers/test_without_template.py::test_a_base_model_completes_text_and_tokens_and_refuses_messages",),
    ),
    Row(
        "a hot load of a missing, damaged or other model's snapshot; a ledger entry of an unknown version",
        "the hot load fails with one line, and the fleet keeps its weights; 404 with the known versions",
        (
            f"{_HOT_LOAD}a_snapshot_that_cannot_be_served_fails_and_the_fleet_keeps_its_weights",
            f"{_HOT_LOAD}requests_that_are_refused",
        ),
    ),
    Row(
        "the coordinator restarts during a hot load; a hot load is cancelled while replicas stage",
        "it continues under its id; the fleet keeps its weights and takes the next one",
        (
            f"{_HOT_LOAD}an_open_hot_load_continues_after_a_restart",
            f"{_HOT_LOAD}a_hot_load_is_cancelled_while_replicas_stage_and_the_next_one_runs",
        ),
    ),
    Row(
        "a replay of a record without ids, seeds, its task or its weights",
        "one line with all that is missing; nothing is sampled",
        (
            "parts/verify/test_replay.py::test_a_record_that_cannot_be_replayed_is_refused_with_what_is_missing",
            "parts/verify/test_replay.py::test_versions_of_the_followed_store_are_used",
        ),
    ),
    Row(
        "an import of a file that has another format, or whose continuation is missing",
        "one line with the file and the reason; no run is written",
        (
            "parts/view/test_atif.py::test_other_files_are_refused_in_one_line",
            "parts/view/test_atif.py::test_a_missing_continuation_is_named",
        ),
    ),
)


def page() -> str:
    """Return the page: every case, the required behavior, and the tests or the reason why there are no tests."""
    lines = [
        "# Faults and bad input",
        "",
        "This page is for people who want to know how the service handles a fault or bad input, and which test",
        "proves it. `python -m tests.faults.matrix` writes the page.",
        "",
        "`make test-faults` runs 1,000 seeded fault schedules on the complete service in virtual time",
        '(`ARGS="--count 10000"` for more, `ARGS="--seed 17"` to repeat one). `make soak` kills processes of',
        "a real service.",
        "",
        "| # | case | expected | tests |",
        "|---:|---|---|---|",
    ]
    for number, row in enumerate(ROWS, 1):
        names = [name.rpartition("/")[2].replace(".py::test_", ": ") for name in row.tests]
        found = "<br>".join(f"`{name}`" for name in names)
        lines.append(f"| {number} | {row.case} | {row.expected} | {found or row.why_not} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
