//! Which test covers which kind of bad input or fault. The list keeps itself true: a test that is renamed or
//! gone fails here.

use std::path::Path;

const BAD_INPUTS: &str = "tests/server/bad_inputs.rs";
const LIFE: &str = "tests/server/life.rs";
const FAILURES: &str = "tests/server/failures.rs";
const LOAD: &str = "tests/server/load.rs";
const HUB: &str = "tests/hub.rs";
const FILES: &str = "tests/cli/bad_files.rs";
const ERRORS: &str = "tests/cli/errors.rs";

const MALFORMED: (&str, &str) = (BAD_INPUTS, "malformed_requests_get_json_errors");
const RANGES: (&str, &str) = (BAD_INPUTS, "values_out_of_range_are_refused_by_name");
const REFUSED: (&str, &str) = (BAD_INPUTS, "what_is_known_and_not_supported_is_refused_by_name");
const WINDOW: (&str, &str) = (BAD_INPUTS, "a_context_window_is_never_exceeded_or_cut");
const KEYS: (&str, &str) = (LIFE, "everything_but_health_and_the_page_requires_the_key");
const PLENTY: (&str, &str) = (LOAD, "sixty_four_clients_of_every_kind_leave_no_trace");

/// A kind of input or fault, and the tests that cover it: file and function.
type Row = (&'static str, &'static [(&'static str, &'static str)]);

/// In the order of the numbers that comments in the tests refer to, from 1.
const ROWS: &[Row] = &[
    ("a body that is no JSON", &[MALFORMED]),
    ("JSON nested deeply", &[MALFORMED]),
    ("a body over the limit", &[MALFORMED]),
    ("a head over the limit", &[MALFORMED]),
    ("a slow head or body", &[(BAD_INPUTS, "slow_senders_are_cut_off")]),
    ("a wrong content type", &[MALFORMED]),
    ("a wrong method or path", &[MALFORMED, ("tests/server/schema.rs", "schemathesis_finds_no_fault")]),
    ("a missing or wrong key", &[KEYS, (LIFE, "keys_come_from_the_environment_too")]),
    ("a path outside the interface, without a key", &[KEYS]),
    ("an unknown model", &[MALFORMED]),
    ("wrong messages", &[RANGES]),
    ("a prompt longer than the window", &[WINDOW]),
    ("prompt and output longer than the window", &[WINDOW]),
    (
        "a wrong max_tokens",
        &[RANGES, ("tests/server/answers.rs", "prompts_are_reported_as_in_vllm_and_openai")],
    ),
    ("a wrong n", &[RANGES]),
    ("sampling parameters out of range", &[RANGES]),
    ("too many log-probabilities", &[RANGES]),
    ("a wrong logit_bias", &[RANGES]),
    ("wrong stop strings", &[RANGES]),
    ("a wrong prompt", &[RANGES]),
    ("text that spells special tokens", &[(BAD_INPUTS, "text_that_spells_special_tokens_stays_text")]),
    (
        "a hostile schema or expression",
        &[
            ("tests/server/structured.rs", "hostile_formats_are_refused_within_a_second"),
            ("src/grammar/tests.rs", "hostile_specifications_are_errors_in_time"),
            ("src/grammar/tests.rs", "hostile_specifications_that_are_accepted_stay_within_limits"),
        ],
    ),
    (
        "a grammar that cannot be satisfied",
        &[
            ("tests/server/structured.rs", "a_grammar_that_fails_on_the_way_ends_its_own_request_only"),
            ("tests/engine/main.rs", "a_dead_end_ends_its_sequence_and_no_other"),
        ],
    ),
    (
        "a template that is missing, fails or does not end",
        &[
            ("src/chat/tests.rs", "a_missing_or_broken_template_is_an_error"),
            ("src/chat/hostile_tests.rs", "loops_end"),
        ],
    ),
    ("a template in the request", &[REFUSED]),
    (
        "wrong tools",
        &[
            ("tests/server/tools.rs", "what_cannot_be_honoured_is_refused"),
            ("src/server/api/tools.rs", "what_is_not_valid_is_refused_by_name"),
        ],
    ),
    ("images, and addresses to fetch", &[REFUSED]),
    ("a crowd", &[(LIFE, "a_crowd_is_turned_away_and_those_inside_are_unhurt"), PLENTY]),
    (
        "clients that leave or do not read",
        &[
            (LIFE, "a_client_that_disconnects_frees_everything"),
            (LIFE, "a_client_that_leaves_the_queue_is_dropped_while_others_run"),
            (LIFE, "a_client_that_does_not_read_is_aborted"),
            (LIFE, "a_client_that_stalls_is_cut_off"),
            PLENTY,
        ],
    ),
    ("hostile request ids", &[MALFORMED, ("tests/server/logs.rs", "every_line_of_the_log_is_a_json_object")]),
    ("a request while the model loads", &[(FAILURES, "while_the_model_loads_the_server_reports_progress")]),
    (
        "a full cache, and a sequence that can never fit",
        &[
            ("tests/engine/main.rs", "preemption_happens_and_changes_nothing"),
            ("tests/engine/main.rs", "bad_requests_are_refused_with_value_and_limit"),
            PLENTY,
        ],
    ),
    ("a step that fails", &[(FAILURES, "a_step_that_fails_ends_its_requests_and_three_in_a_row_the_health")]),
    (
        "logits that are no numbers",
        &[
            ("src/sampling/sampler.rs", "logits_that_are_no_numbers_are_reported"),
            ("tests/engine/main.rs", "a_sequence_whose_logits_are_no_numbers_ends_alone"),
        ],
    ),
    ("an engine that panics", &[(FAILURES, "an_engine_that_panics_ends_all_requests_and_the_server")]),
    // There are no ranks: one process, one device.
    ("a rank that dies", &[(FAILURES, "a_lost_device_ends_all_requests_and_the_server")]),
    (
        "signals",
        &[
            (LIFE, "a_signal_lets_running_requests_end_and_others_wait_elsewhere"),
            (LIFE, "when_the_time_is_over_answers_end_with_an_error"),
            (LIFE, "a_second_signal_ends_the_program_at_once"),
        ],
    ),
    (
        "a port in use, a device that is not there",
        &[
            (LIFE, "a_port_in_use_is_known_before_the_model_is_loaded"),
            (ERRORS, "a_device_that_is_not_there_is_an_error_before_anything_is_loaded"),
        ],
    ),
    (
        "a model that cannot be had",
        &[
            (HUB, "every_refusal_has_its_own_message_and_way_out"),
            (ERRORS, "offline_without_the_model_in_the_cache"),
            (ERRORS, "models_that_are_not_there"),
        ],
    ),
    (
        "a download that is killed, a full disk",
        &[
            (HUB, "a_download_that_is_killed_leaves_no_half_file_and_is_resumed"),
            (HUB, "a_disk_that_fills_up_keeps_what_was_written"),
            (HUB, "a_full_disk_is_named"),
        ],
    ),
    (
        "damaged safetensors",
        &[(FILES, "damaged_safetensors"), (FILES, "tensors_that_do_not_fit_the_configuration")],
    ),
    ("damaged GGUF files", &[(FILES, "damaged_gguf_files")]),
    (
        "damaged configurations and tokenizers",
        &[
            (FILES, "configurations_that_cannot_be"),
            (FILES, "damaged_tokenizers"),
            (FILES, "end_tokens_may_be_a_list_and_generation_config_wins"),
        ],
    ),
    // The module that maps files says what is out of its hands.
    ("a file that is replaced while it is mapped", &[]),
    ("a clock that jumps", &[("tests/tidy.rs", "modules_use_only_what_they_may")]),
    (
        "odd text",
        &[
            (BAD_INPUTS, "text_that_spells_special_tokens_stays_text"),
            ("src/tokenizer/detokenizer.rs", "an_emoji_cut_across_tokens_appears_once_it_is_complete"),
            ("src/tokenizer/detokenizer.rs", "deltas_join_to_the_full_decode"),
        ],
    ),
    (
        "an end at once, a stop string across chunks",
        &[
            ("tests/server/answers.rs", "stops_logprobs_and_counts_are_right"),
            ("tests/cli/generate.rs", "an_immediate_end_is_an_empty_text"),
            ("src/tokenizer/stop.rs", "nothing_of_a_stop_string_leaks"),
        ],
    ),
    ("a scrape under load", &[(LOAD, "a_scrape_does_not_wait_for_steps")]),
];

#[test]
fn every_row_has_its_tests() {
    assert_eq!(ROWS.len(), 48);
    for (number, (what, tests)) in (1..).zip(ROWS) {
        assert!(!tests.is_empty() || [36, 44].contains(&number), "{number}, {what}: no test");
        for (file, test) in *tests {
            let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(file);
            let text = std::fs::read_to_string(path).unwrap();
            assert!(text.contains(&format!("fn {test}(")), "{number}, {what}: {file} has no test {test}");
        }
    }
}
