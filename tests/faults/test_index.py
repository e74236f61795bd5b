"""The faults that a run must survive, by number, and the tests that hold each; or to whom it belongs.

Survive means: bounded time, no episode lost or written twice, no process left over, the right exit code, a message that
says what to do. `test_every_named_test_exists` keeps the list true.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
EPISODE, RUNNER, RUN = "episode/test_episode.py", "episode/test_runner.py", "runs/test_run.py"
RECORD, RECORD_FAULTS = "runs/test_record.py", "runs/test_record_faults.py"
OUTBOX = "runs/test_outbox.py"
HTTP, VLLM, HF = "engines/test_vllm_http.py", "engines/test_vllm_real.py", "engines/test_hf.py"
POOL = "rewards/workers/test_worker_pool.py"
RAY, ENGINE_POOL = "engines/test_ray.py", "engines/test_pool.py"
ENGINES, LOG, RUNS, STALLS, POLICY = (
    "faults/test_engine_faults.py", "faults/test_log_faults.py", "faults/test_run_faults.py", "faults/test_stalls.py",
    "faults/test_policy_server_faults.py",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens, `file: [tests]` that hold it, and what is left open or true besides."""

    what: str
    tests: dict[str, list[str]]
    note: str = ""


FAULTS = {
    1: Fault(
        "engine raises mid-episode",
        {
            EPISODE: ["test_an_engine_that_crashes_on_a_later_turn_keeps_the_turns_before_and_no_reward"],
            RUNNER: ["test_an_engine_that_crashes_once_costs_one_attempt_and_no_episode"],
        },
    ),
    2: Fault(
        "engine answers 500, 429, garbage, a truncated body, no choices",
        {
            HTTP: [
                "test_bad_answer_is_an_engine_error_that_says_what_came",
                "test_retries_are_bounded_and_the_last_failure_is_named",
                "test_truncated_body_is_retried_and_then_named",
                "test_retry_after_extends_the_pause",
            ],
            ENGINES: [
                "test_a_server_that_answers_badly_costs_attempts_and_no_episode",
                "test_chaos_loses_and_doubles_no_episode",
            ],
            POLICY: ["test_each_mode_of_the_server_is_a_record_of_what_it_sent_or_a_line_that_names_it"],
        },
    ),
    3: Fault(
        "engine never answers",
        {
            HTTP: ["test_server_that_never_answers_meets_the_deadline_and_sees_the_connection_close"],
            EPISODE: [
                "test_a_generation_beyond_its_deadline_is_the_engines_failure",
                "test_an_engine_that_never_answers_is_cancelled_by_the_episode_timeout",
            ],
            STALLS: ["test_a_stall_is_reported_with_what_each_episode_waits_for_and_then_stops_the_run"],
        },
    ),
    4: Fault(
        "engine dies with requests in flight and comes back on its port",
        {
            HTTP: ["test_server_that_dies_with_a_request_in_flight_and_comes_back_is_asked_again"],
            ENGINES: [
                "test_a_server_that_dies_under_many_episodes_and_comes_back_on_its_port_loses_none",
                "test_an_engine_that_stays_away_is_named_and_bounded",
            ],
            VLLM: ["test_death_of_vllm_is_named_ctrl_c_is_ours_and_stdout_stays_clean"],
        },
    ),
    5: Fault(
        "a client's cancel reaches the engine",
        {
            HTTP: ["test_cancelling_generate_closes_the_connection"],
            VLLM: ["test_cancelled_generate_is_aborted_in_vllm", "test_http_cancel_reaches_the_server"],
            HF: ["test_cancelling_frees_the_slot_and_leaves_the_others"],
            ENGINES: ["test_cancelling_a_run_reaches_the_server_for_every_episode_in_flight"],
        },
    ),
    6: Fault(
        "log-probabilities and tokens of different length",
        {
            POLICY: ["test_each_mode_of_the_server_is_a_record_of_what_it_sent_or_a_line_that_names_it"],
            EPISODE: ["test_an_engine_that_fails_or_lies_is_infrastructure_and_returns_no_reward"],
            HTTP: ["test_logprobs_of_other_tokens_are_refused"],
            ENGINES: ["test_a_server_that_answers_badly_costs_attempts_and_no_episode"],
        },
    ),
    7: Fault(
        "env.reset raises",
        {
            EPISODE: ["test_an_exception_of_an_environment_is_recorded_and_it_is_closed_once"],
        },
    ),
    8: Fault(
        "env.step raises once, always, a BaseException, a CancelledError of its own",
        {
            EPISODE: [
                "test_an_exception_of_an_environment_is_recorded_and_it_is_closed_once",
                "test_an_exception_of_a_plain_step_in_its_thread_is_recorded_at_once",
                "test_an_async_method_that_exits_ends_its_episode_and_not_the_program",
            ],
            RUNNER: ["test_an_error_of_the_environment_is_not_tried_again"],
        },
    ),
    9: Fault(
        "env.step blocks for ever: in a thread, on the event loop, in native code with the GIL",
        {
            EPISODE: ["test_a_plain_step_that_blocks_for_ever_costs_its_episode_and_not_the_process"],
            STALLS: [
                "test_a_loop_that_is_held_up_for_the_stall_timeout_is_dumped_from_outside",
                "test_a_third_signal_ends_a_run_whose_event_loop_is_blocked",
                "test_native_code_that_keeps_the_gil_is_dumped_and_what_ended_before_is_kept",
            ],
        },
        "Native code that keeps the GIL can be dumped, but only SIGKILL ends it: such an environment wants a process "
        "of its own (sandbox, issue 6).",
    ),
    10: Fault(
        "env returns a NaN, infinite or no reward, too long an observation, what is no UTF-8",
        {
            EPISODE: [
                "test_a_reward_that_is_not_a_finite_number_breaks_the_contract",
                "test_a_step_that_returns_something_else_breaks_the_contract",
            ],
            "runs/test_serialize.py": ["test_values_outside_json_have_a_documented_form"],
            "chat/test_dialogue.py": ["test_a_long_observation_ends_the_episode_by_default"],
        },
    ),
    11: Fault(
        "env leaks tasks, threads, processes",
        {
            ENGINES: ["test_an_environment_that_leaks_tasks_and_threads_does_not_keep_its_run_from_ending"],
            RUNS: ["test_a_run_ends_although_its_environment_left_tasks_and_threads"],
        },
        "Processes that an environment starts itself are ended by the sandbox, issue 6.",
    ),
    12: Fault("reward model slow, hung, flapping, NaN", {}, "Reward models: issue 8. The maths grader's workers: 13."),
    13: Fault(
        "reward worker killed",
        {
            POOL: [
                "test_a_worker_killed_once_in_a_check_is_replaced_and_the_check_repeated",
                "test_a_worker_killed_twice_in_a_check_is_a_failure_and_others_continue",
                "test_workers_end_with_a_parent_that_is_killed",
            ],
        },
    ),
    14: Fault(
        "Ray actor killed, node or object lost, constructor fails",
        {
            RAY: [
                "test_an_actor_that_died_is_replaced_and_its_requests_are_served",
                "test_an_operation_that_an_actor_does_not_support_is_one_clear_error",
                "test_a_run_loses_nothing_when_one_of_its_two_actors_is_killed",
                "test_killing_the_driver_ends_the_engines_and_the_ray_that_it_started",
            ],
            ENGINE_POOL: [
                "test_the_requests_of_an_engine_that_dies_move_to_another_at_once",
                "test_an_engine_that_cannot_start_again_is_tried_with_longer_waits",
                "test_one_death_more_than_allowed_stops_the_run",
                "test_an_engine_that_cannot_start_fails_the_start_and_closes_the_others",
            ],
        },
        "A node lost is its actors killed; objects hold weights alone, which every successor is given anew.",
    ),
    15: Fault(
        "one sample of a group fails",
        {
            ENGINES: ["test_one_sample_that_fails_leaves_its_siblings_whole"],
        },
        "What a trainer does with an incomplete group: issue 5.",
    ),
    16: Fault(
        "a result is delivered twice",
        {
            RECORD: [
                "test_an_episode_that_comes_twice_is_written_once",
                "test_duplicated_lines_count_once_and_the_first_holds",
            ],
        },
    ),
    17: Fault(
        "a late result after a new attempt",
        {
            LOG: [
                "test_a_late_result_of_a_superseded_attempt_changes_nothing",
                "test_a_late_failure_does_not_replace_the_failure_of_a_later_attempt",
            ],
        },
    ),
    18: Fault(
        "consumer slower than the producers",
        {
            ENGINES: ["test_a_consumer_slower_than_the_engine_holds_episodes_back_instead_of_memory"],
            RUNNER: ["test_a_plan_is_pulled_only_as_far_as_episodes_can_start"],
        },
        "A trainer behind the rollouts: issue 5.",
    ),
    19: Fault(
        "kill -9 of the run at random moments, then resume",
        {
            RUNS: ["test_a_run_of_500_killed_at_50_moments_ends_with_each_episode_once_in_the_order_of_the_data"],
            LOG: ["test_a_kill_before_any_call_of_a_write_leaves_the_old_file_or_the_new_one"],
        },
    ),
    20: Fault(
        "kill -9 of every kind of child",
        {
            POOL: ["test_a_worker_killed_once_in_a_check_is_replaced_and_the_check_repeated"],
            VLLM: ["test_death_of_vllm_is_named_ctrl_c_is_ours_and_stdout_stays_clean"],
        },
        "Sandboxes: issue 6; actors: 14.",
    ),
    21: Fault(
        "kill during a write, before every call of it",
        {
            LOG: ["test_a_kill_before_any_call_of_a_write_leaves_the_old_file_or_the_new_one"],
        },
        "A trainer's checkpoint: issue 5.",
    ),
    22: Fault(
        "ENOSPC, EDQUOT, EROFS, EIO, EMFILE, ENOMEM; a disk that hangs",
        {
            LOG: [
                "test_a_run_whose_disk_hangs_ends_after_a_signal_and_names_what_is_not_stored",
                "test_a_run_whose_disk_hangs_is_stopped_by_the_watchdog_without_a_signal",
                "test_a_run_whose_last_sync_hangs_says_so_and_ends",
                "test_every_error_of_the_disk_stops_the_run_keeps_what_is_there_and_is_over_when_it_is",
                "test_every_error_on_opening_is_one_line_of_configuration_and_leaves_no_lock",
            ],
            RUN: ["test_a_full_disk_stops_the_run_with_3_and_keeps_what_is_there"],
            RECORD_FAULTS: [
                "test_a_full_disk_stops_the_run_and_keeps_every_earlier_line",
                "test_no_file_descriptor_left_is_a_config_error",
            ],
            OUTBOX: ["test_an_append_that_hangs_is_named_and_neither_the_metrics_nor_the_end_wait_for_it"],
        },
        "Checkpoints: issue 5; the sandbox's folder: issue 6.",
    ),
    23: Fault(
        "torn tail, flipped byte, CRLF, BOM, empty file, no last newline, two writers, newer schema",
        {
            RECORD_FAULTS: [
                "test_a_torn_last_line_is_cut_off_and_reported",
                "test_a_flipped_byte_costs_its_line_only_and_is_reported",
                "test_byte_order_mark_crlf_blank_lines_and_an_empty_file_are_read",
                "test_a_last_line_that_lacks_only_its_newline_is_kept",
            ],
            RECORD: [
                "test_a_second_writer_is_refused_with_the_name_of_the_first",
                "test_another_schema_is_refused_in_config_and_in_lines",
            ],
        },
    ),
    24: Fault(
        "the clock jumps an hour back or forth",
        {
            STALLS: [
                "test_deadlines_and_intervals_are_measured_with_clocks_that_never_jump",
                "test_time_in_which_the_process_was_stopped_is_not_a_lag_and_time_in_which_it_was_not_is",
                "test_a_run_under_a_jumping_clock_is_as_any_other",
            ],
        },
    ),
    25: Fault(
        "SIGINT once, twice, three times, SIGTERM, SIGHUP with a terminal that is gone",
        {
            RUNS: [
                "test_one_signal_drains_and_leaves_no_process",
                "test_a_closed_terminal_means_nothing_to_a_run_under_nohup",
                "test_a_terminal_that_closes_drains_the_run_which_records_all_the_same",
                "test_a_terminal_that_hangs_up_twice_still_drains",
                "test_a_run_whose_reader_left_continues_to_its_end",
                "test_a_signal_wakes_an_idle_event_loop_and_the_handlers_are_given_back",
            ],
            RUN: [
                "test_a_second_interrupt_cancels_at_once",
                "test_a_third_signal_ends_the_process_no_matter_what_hangs",
                "test_interrupting_the_start_ends_at_once_without_a_traceback",
            ],
            STALLS: ["test_a_third_signal_ends_a_run_whose_event_loop_is_blocked"],
        },
        "At a trainer's checkpoint: issue 5.",
    ),
    26: Fault(
        "SIGSTOP, then SIGCONT",
        {
            STALLS: [
                "test_a_run_that_is_stopped_and_continued_dispatches_nothing_twice_and_stalls_not",
                "test_a_stall_is_counted_in_looks_so_that_a_stopped_process_is_none",
            ],
        },
        "5 s instead of 60. Deadlines of steps and generations count the stopped time, the stall watchdog does not.",
    ),
    27: Fault(
        "unknown host, half-open TCP, RST, slowloris",
        {
            ENGINES: [
                "test_an_unknown_host_name_is_a_config_error_at_the_start_and_an_engine_error_later",
                "test_a_connection_that_opens_and_never_answers_meets_the_deadline",
                "test_a_server_that_answers_badly_costs_attempts_and_no_episode",
            ],
            HTTP: ["test_reset_connection_is_retried", "test_slow_trickle_meets_the_deadline"],
            POLICY: ["test_each_mode_of_the_server_is_a_record_of_what_it_sent_or_a_line_that_names_it"],
        },
    ),
    28: Fault("sandbox down at the start and in the middle", {}, "Sandbox: issue 6."),
    29: Fault("zygote killed, wedged, talking garbage", {}, "Sandbox: issue 6."),
    30: Fault(
        "10,000 short episodes",
        {
            RUNNER: ["test_two_thousand_episodes_leave_no_task_no_thread_and_no_memory_behind"],
        },
        "The long form is benchmarks/soak.py.",
    ),
    31: Fault(
        "the event loop is blocked for more than a second",
        {
            STALLS: ["test_a_call_that_blocks_the_event_loop_is_named_once_a_minute"],
        },
    ),
    32: Fault(
        "a worker's exception that cannot be pickled",
        {
            ENGINES: ["test_an_exception_that_cannot_be_pickled_keeps_its_type_message_and_place"],
        },
        "The maths grader's workers speak JSON and never pickle.",
    ),
    33: Fault(
        "shutdown with many in flight returns within the grace",
        {
            RUNS: ["test_many_in_flight_end_within_the_grace"],
            RUN: [
                "test_episodes_that_do_not_end_within_the_grace_are_cancelled",
                "test_a_run_ends_although_a_step_ignores_being_cancelled",
            ],
        },
    ),
    34: Fault(
        "resume with another configuration",
        {
            RUN: [
                "test_resume_with_a_flag_that_changes_what_is_measured_is_refused_with_a_diff",
                "test_resume_with_data_that_has_grown_is_refused",
            ],
            RECORD: ["test_resuming_with_another_config_is_refused_with_the_differences"],
        },
    ),
    35: Fault(
        "resume of a complete run",
        {
            RUNS: ["test_resuming_a_complete_run_writes_nothing", "test_resuming_a_complete_run_fixes_its_metrics"],
            RUN: ["test_resuming_a_complete_run_exits_with_0_and_adds_no_line"],
        },
    ),
    36: Fault(
        "two runs in one directory",
        {
            RUN: ["test_a_second_run_in_the_same_directory_is_refused_while_the_first_continues"],
            RECORD: ["test_a_second_writer_is_refused_with_the_name_of_the_first"],
        },
    ),
    37: Fault(
        "no HOME, no /dev/shm, TMPDIR that may not execute",
        {
            RUNS: [
                "test_a_run_needs_no_home_and_no_temporary_folder",
                "test_a_run_needs_no_shared_memory_and_no_executable_temporary_folder",
            ],
        },
        "With the scripted engine; vLLM needs shared memory for more than one GPU.",
    ),
    38: Fault(
        "no further process or thread can be had",
        {
            RUNS: [
                "test_a_thread_that_cannot_be_had_at_once_is_waited_for",
                "test_no_thread_available_is_infrastructure",
                "test_episodes_are_stored_although_no_thread_can_be_had_any_more",
            ],
            OUTBOX: ["test_without_a_free_thread_episodes_are_stored_anyway"],
            POOL: ["test_a_missing_interpreter_is_a_failure"],
        },
        "Sandboxes: issue 6.",
    ),
}


def test_every_fault_has_its_place():
    assert list(FAULTS) == list(range(1, 39))


@pytest.mark.parametrize("number", FAULTS)
def test_every_named_test_exists(number):
    fault = FAULTS[number]
    assert fault.tests or "issue" in fault.note, "tests, or to whom it belongs"
    for file, names in fault.tests.items():
        tree = ast.parse((TESTS / file).read_text())
        there = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        assert set(names) <= there
        assert names
