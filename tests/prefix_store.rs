//! Prefixes in files: another engine over the same directory gives the same tokens and computes less, whatever the files
//! went through.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tinyvllm::engine::{CacheEvent, Event, Medium, Request};
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{Llm, LlmOptions, NoProgress};
use tinyvllm::prefix_store::{StoreOptions, clear_directory, inspect_directory};
use tinyvllm::sampling::SamplingParams;

const MAX_BYTES: u64 = 64 << 20;

struct Loaded {
    llm: Llm,
    notices: Arc<Mutex<Vec<String>>>,
}

fn load(files: ModelFiles, folder: Option<&Path>, block_size: usize, cache_bytes: u64) -> Loaded {
    let notices = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&notices);
    let mut options = LlmOptions {
        prefix_store: folder.map(|folder| StoreOptions {
            directory: folder.to_owned(),
            max_bytes: MAX_BYTES,
            // Small models are computed faster than they are read.
            reads_always: true,
            on_notice: Arc::new(move |line| heard.lock().unwrap().push(line.to_owned())),
        }),
        ..LlmOptions::default()
    };
    options.limits.max_model_len = Some(128);
    options.limits.block_size = block_size;
    options.limits.kv_cache_memory_bytes = Some(cache_bytes);
    let model = ResolvedModel { display_name: "model".to_owned(), files, revision: None, notice: None };
    Loaded { llm: Llm::load(&model, &options, &NoProgress).unwrap(), notices }
}

fn demo(folder: Option<&Path>) -> Loaded {
    load(ModelFiles::Demo, folder, 16, 8 << 20)
}

fn tiny(name: &str) -> ModelFiles {
    ModelFiles::Folder(
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny")).join(name),
    )
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 5 + (i * i + seed * 31 + i) % 90).collect()
}

fn request(prompt: Vec<u32>, salt: Option<&str>) -> Request {
    let params = SamplingParams { max_tokens: Some(12), ignore_eos: true, ..SamplingParams::greedy() };
    Request { cache_salt: salt.map(str::to_owned), ..Request::new(prompt, params) }
}

/// The answer, and how many tokens of the prompt were in the cache when it was admitted.
fn answer(loaded: &Loaded, request: Request) -> (Vec<u32>, usize) {
    let (mut tokens, mut num_cached) = (Vec::new(), 0);
    for event in loaded.llm.engine().submit(request).unwrap() {
        match event {
            Event::Token { token_id, .. } => tokens.push(token_id),
            Event::Finished { stats, error, .. } => {
                assert_eq!(error, None);
                num_cached = stats.num_cached_tokens;
            }
            _ => {}
        }
    }
    (tokens, num_cached)
}

/// Waits until the store knows what is in the directory.
fn wait(loaded: &Loaded, folder: &Path) {
    let start = Instant::now();
    let num_packs = inspect_directory(folder, false).unwrap().packs.len() as u64;
    while loaded.llm.engine().stats().unwrap().prefix_store.unwrap().num_packs < num_packs {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", loaded.notices);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Fills the directory and says what the answers are.
fn fill(files: impl Fn() -> ModelFiles, folder: &Path, requests: &[Request]) -> Vec<Vec<u32>> {
    let first = load(files(), Some(folder), 16, 8 << 20);
    // What is computed before the model's fingerprint is known is not kept.
    let (start, mut seed) = (Instant::now(), 1_000);
    while inspect_directory(folder, true).unwrap().packs.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", first.notices);
        answer(&first, request(prompt(seed, 40), None));
        seed += 1;
        std::thread::sleep(Duration::from_millis(100));
    }
    requests.iter().map(|request| answer(&first, request.clone()).0).collect()
}

fn check_restart(files: impl Fn() -> ModelFiles) {
    let folder = tempfile::tempdir().unwrap();
    let requests: Vec<Request> =
        [33, 48, 70, 91].into_iter().map(|len| request(prompt(len, len), None)).collect();
    let answers = fill(&files, folder.path(), &requests);
    let (plain, again) = (load(files(), None, 16, 8 << 20), load(files(), Some(folder.path()), 16, 8 << 20));
    wait(&again, folder.path());
    for (request, answer_before) in requests.iter().zip(&answers) {
        let (tokens, num_cached) = answer(&again, request.clone());
        assert_eq!((&tokens, &answer(&plain, request.clone()).0), (answer_before, answer_before));
        assert_eq!(num_cached, (request.prompt_token_ids.len() - 1) / 16 * 16, "all full blocks are read");
        assert_eq!(answer(&again, request.clone()), (tokens, num_cached), "and found in memory then");
    }
    let stats = again.llm.engine().stats().unwrap();
    assert_eq!(stats.num_external_hits, (32 + 32 + 64 + 80) as u64);
    assert_eq!(stats.prefix_store.unwrap().num_failed_reads, 0);
    assert!(again.notices.lock().unwrap().is_empty(), "{:?}", again.notices);
}

#[test]
fn a_restart_finds_prefixes_and_gives_the_same_tokens() {
    check_restart(|| ModelFiles::Demo);
    check_restart(|| tiny("llama"));
}

#[test]
fn with_latent_attention_too() {
    check_restart(|| tiny("deepseek_v2_lite"));
}

#[test]
fn salts_do_not_share_and_another_block_size_finds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let salted = request(prompt(7, 60), Some("a"));
    let answers = fill(|| ModelFiles::Demo, folder.path(), std::slice::from_ref(&salted));
    let again = demo(Some(folder.path()));
    wait(&again, folder.path());
    for other in [None, Some(""), Some("b")] {
        let (tokens, num_cached) = answer(&again, request(prompt(7, 60), other));
        assert_eq!((&tokens, num_cached), (&answers[0], 0), "{other:?}");
    }
    assert_eq!(answer(&again, salted), (answers[0].clone(), 48));
    let other = load(ModelFiles::Demo, Some(folder.path()), 32, 8 << 20);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(other.llm.engine().stats().unwrap().prefix_store.unwrap().num_packs, 0);
}

#[test]
fn damaged_packs_are_computed_again() {
    let folder = tempfile::tempdir().unwrap();
    let requests = [request(prompt(3, 90), None)];
    let answers = fill(|| ModelFiles::Demo, folder.path(), &requests);
    for pack in inspect_directory(folder.path(), false).unwrap().packs {
        let mut bytes = std::fs::read(&pack.path).unwrap();
        // Blocks only: the index is whole.
        let middle = bytes.len() / 3;
        bytes[128..middle].iter_mut().for_each(|byte| *byte ^= 0x40);
        std::fs::write(&pack.path, bytes).unwrap();
    }
    let again = demo(Some(folder.path()));
    wait(&again, folder.path());
    assert_eq!(answer(&again, requests[0].clone()).0, answers[0]);
}

#[test]
fn a_cache_that_is_smaller_than_what_is_read_is_no_matter() {
    let folder = tempfile::tempdir().unwrap();
    let requests: Vec<Request> = (0..12).map(|seed| request(prompt(seed, 100), None)).collect();
    let answers = fill(|| ModelFiles::Demo, folder.path(), &requests);
    let again = load(ModelFiles::Demo, Some(folder.path()), 16, 1 << 20);
    wait(&again, folder.path());
    let streams: Vec<_> =
        requests.iter().map(|request| again.llm.engine().submit(request.clone()).unwrap()).collect();
    for (stream, wanted) in streams.into_iter().zip(&answers) {
        let token = |event| match event {
            Event::Token { token_id, .. } => Some(token_id),
            _ => None,
        };
        assert_eq!(&stream.filter_map(token).collect::<Vec<_>>(), wanted);
    }
}

#[test]
fn a_folder_that_cannot_be_used_stops_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "text").unwrap();
    let loaded = demo(Some(&file.join("below")));
    assert_eq!(answer(&loaded, request(prompt(1, 40), None)).0.len(), 12);
    assert_eq!(loaded.notices.lock().unwrap().len(), 1, "{:?}", loaded.notices);
}

fn generate(folder: &Path, seed: u32) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tinyvllm"));
    let ids: Vec<String> = prompt(seed, 100).iter().map(ToString::to_string).collect();
    command.args(["generate", "--model", "demo", "--prompt-ids", &ids.join(","), "--max-tokens", "80"]);
    command.args(["--temperature", "0", "--ignore-eos", "--block-size", "16", "--prefix-cache-gb", "0.03"]);
    command.arg("--prefix-cache-dir").arg(folder).stdin(Stdio::null());
    command
}

#[test]
fn a_process_may_be_killed_at_any_moment() {
    let num_kills = std::env::var("TINYVLLM_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(20_u64);
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("cache");
    let wanted = generate(&folder.path().join("other"), 1).output().unwrap();
    assert!(wanted.status.success(), "{}", String::from_utf8_lossy(&wanted.stderr));
    for kill in 0..num_kills {
        let mut child =
            generate(&path, kill as u32 % 5 + 1).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(kill * 7_919 % 400));
        // It may have ended.
        let _ = child.kill();
        child.wait().unwrap();
        if kill % 10 == 9 {
            let output = generate(&path, 1).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(output.stdout, wanted.stdout);
            let report = inspect_directory(&path, true).unwrap();
            assert!(!report.packs.is_empty());
            assert!(report.packs.iter().all(|pack| pack.contents.is_ok()), "{report:?}");
            assert!(report.num_bytes <= 30_000_000 + 3_750_000, "{}", report.num_bytes);
        }
    }
}

#[test]
fn what_waits_for_files_is_in_the_memory_plan() {
    let folder = tempfile::tempdir().unwrap();
    let available = |prefix_store| {
        let options = LlmOptions { prefix_store, ..LlmOptions::default() };
        let (display_name, files) = ("demo".to_owned(), ModelFiles::Demo);
        let model = ResolvedModel { display_name, files, revision: None, notice: None };
        Llm::inspect(&model, &options).unwrap().demand.available_bytes
    };
    let directory = folder.path().to_owned();
    let store =
        StoreOptions { directory, max_bytes: MAX_BYTES, reads_always: false, on_notice: Arc::new(|_| ()) };
    let (without, with) = (available(None), available(Some(store)));
    // What other processes take meanwhile is far less.
    assert!(with + (128 << 20) < without, "{with} {without}");
}

/// As on a disk that is full: the system takes some of a file and then no more.
#[cfg(unix)]
#[test]
fn a_file_that_cannot_be_written_to_its_end_costs_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (path, plain) = (folder.path().join("cache"), generate(folder.path().join("other").as_path(), 1));
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\""]).arg(plain.get_program());
    limited.args(generate(&path, 1).get_args()).stdin(Stdio::null());
    let output = limited.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("cached prefixes are not written").count(), 1, "{text}");
    assert_eq!(output.stdout, { plain }.output().unwrap().stdout);
    assert!(inspect_directory(&path, true).unwrap().packs.is_empty());
    let files = std::fs::read_dir(&path).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
    assert!(files.max().unwrap() < 1_000, "what was begun is removed");
}

/// Where blocks are, by medium and name: parents and tokens, as a subscriber knows them from the events.
type Heard = HashMap<(Medium, u64), (Option<u64>, Vec<u32>)>;

/// Follows the events of an engine's blocks.
fn follow(loaded: &Loaded) -> Arc<Mutex<Heard>> {
    let heard = Arc::new(Mutex::new(Heard::new()));
    let blocks = Arc::clone(&heard);
    let listener = move |events| {
        let mut blocks = blocks.lock().unwrap();
        for event in events {
            match event {
                CacheEvent::Stored { hash, parent, token_ids, medium } => {
                    assert_eq!(blocks.insert((medium, hash), (parent, token_ids)), None, "stored twice");
                }
                CacheEvent::Removed { hash, medium } => {
                    assert!(blocks.remove(&(medium, hash)).is_some(), "removed and not there");
                }
            }
        }
    };
    loaded.llm.engine().watch_cache(Box::new(listener)).unwrap();
    heard
}

/// The names of a prompt's full blocks in one medium, along the chain of parents.
fn names(heard: &Heard, prompt: &[u32], medium: Medium) -> Vec<u64> {
    let mut names: Vec<u64> = Vec::new();
    for tokens in prompt.chunks_exact(16) {
        let wanted = (names.last().copied(), tokens.to_vec());
        let found = heard.iter().find(|((own, _), block)| *own == medium && **block == wanted);
        let Some(((_, name), _)) = found else { break };
        names.push(*name);
    }
    names
}

fn wait_until(heard: &Mutex<Heard>, is_done: impl Fn(&Heard) -> bool) {
    let start = Instant::now();
    while !is_done(&heard.lock().unwrap()) {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", heard.lock().unwrap().len());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_subscriber_of_the_events_knows_what_is_in_files() {
    let folder = tempfile::tempdir().unwrap();
    let requests = [request(prompt(3, 90), None), request(prompt(4, 60), Some("a"))];
    fill(|| ModelFiles::Demo, folder.path(), &requests);
    let again = demo(Some(folder.path()));
    let heard = follow(&again);
    let (public, secret) = (prompt(3, 90), prompt(4, 60));
    // No request comes meanwhile.
    wait_until(&heard, |heard| names(heard, &public, Medium::Disk).len() == 5);
    assert!(heard.lock().unwrap().values().all(|(_, tokens)| *tokens != secret[..16]), "a salted one");
    answer(&again, requests[0].clone());
    let both = [Medium::Disk, Medium::Cache].map(|medium| names(&heard.lock().unwrap(), &public, medium));
    assert_eq!(both[0], both[1], "a block has one name");
    // A computed block is reported when its file has its name.
    let other = prompt(9, 40);
    answer(&again, request(other.clone(), None));
    wait_until(&heard, |heard| names(heard, &other, Medium::Disk).len() == 2);
    clear_directory(folder.path()).unwrap();
    wait_until(&heard, |heard| heard.keys().all(|(medium, _)| *medium == Medium::Cache));
    assert_eq!(names(&heard.lock().unwrap(), &public, Medium::Cache), both[0]);
}
