//! `--model` from argument to files, against a fake Hub on this machine.

#![expect(clippy::unwrap_used, reason = "what fails here fails the test, also in helper functions")]

#[path = "hub/fake.rs"]
mod fake;
#[path = "hub/left.rs"]
mod left;
#[path = "hub/ranges.rs"]
mod ranges;
// Elsewhere the system's authorities are in no file that a test could name.
#[cfg(target_os = "linux")]
#[path = "hub/tls.rs"]
mod tls;

use std::cell::RefCell;
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fake::{COMMIT, FakeHub, Host, Request, Response, etag, etag_of};
use tempfile::TempDir;
use tinyvllm::hub::{
    HubConfig, ModelFiles, ModelSource, NoProgress, Progress, ResolvedModel, Token, resolve,
};
use tinyvllm::{Error, ErrorKind, Result};

const WEIGHTS: &str = "model.safetensors";

/// Long enough not to fit into one packet or one write.
fn weights() -> Vec<u8> {
    (0..300_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn hub_with_a_folder() -> FakeHub {
    FakeHub::new(
        "org/name",
        &[
            ("README.md", b"text"),
            ("config.json", b"{}"),
            ("tokenizer.json", b"{\"t\":1}"),
            ("chat_template.jinja", b"{{ x }}"),
            (WEIGHTS, &weights()),
            ("pytorch_model.bin", b"bin"),
            ("consolidated.safetensors", b"other layout"),
            ("original/model.safetensors", b"other layout"),
        ],
    )
}

/// Waits short enough for tests.
fn config(hub: &FakeHub, cache: &TempDir) -> HubConfig {
    HubConfig {
        endpoint: hub.endpoint(),
        token: Token::new("hf_secret", "HF_TOKEN"),
        connect_timeout: Duration::from_secs(2),
        read_timeout: Duration::from_secs(1),
        num_retries: 2,
        retry_delay: Duration::from_millis(1),
        ..HubConfig::new(cache.path())
    }
}

fn get(argument: &str, config: &HubConfig) -> Result<ResolvedModel> {
    resolve(&ModelSource::parse(argument, None)?, config, &NoProgress)
}

fn get_revision(revision: &str, config: &HubConfig) -> Result<ResolvedModel> {
    resolve(&ModelSource::parse("org/name", Some(revision))?, config, &NoProgress)
}

fn repo_dir(cache: &TempDir) -> PathBuf {
    cache.path().join("models--org--name")
}

fn snapshot(cache: &TempDir) -> PathBuf {
    repo_dir(cache).join("snapshots").join(COMMIT)
}

/// Where earlier versions gathered data.
fn shared_incomplete(cache: &TempDir, data: &[u8]) -> PathBuf {
    repo_dir(cache).join("blobs").join(format!("{}.incomplete", etag(data)))
}

/// What has arrived of a file.
fn incomplete(cache: &TempDir, data: &[u8]) -> Option<PathBuf> {
    let blobs = repo_dir(cache).join("blobs");
    let is_of_it = |name: &String| name.starts_with(&etag(data)) && name.ends_with(".incomplete");
    let found: Vec<_> = fs::read_dir(&blobs)
        .ok()?
        .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
        .filter(is_of_it)
        .collect();
    assert!(found.len() < 2, "{found:?}");
    found.first().map(|name| blobs.join(name))
}

fn incomplete_len(cache: &TempDir, data: &[u8]) -> u64 {
    incomplete(cache, data).and_then(|path| fs::metadata(path).ok()).map_or(0, |metadata| metadata.len())
}

/// The ranges that were asked of the storage host.
fn data_ranges(hub: &FakeHub) -> Vec<String> {
    let requests = hub.take_requests();
    requests.iter().filter(|r| is_data(r)).map(|r| r.header("range").unwrap_or("none").to_owned()).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn is_data(request: &Request) -> bool {
    request.host == Host::Storage && request.method == "GET"
}

/// The kind fits, message and hint say what they should, and neither shows a secret.
#[track_caller]
fn assert_error(error: &Error, kind: ErrorKind, words: &[&str]) {
    let text = format!("{error:?}");
    assert_eq!(error.kind(), kind, "{text}");
    assert!(error.hint().is_some_and(|hint| !hint.is_empty()), "no way out: {text}");
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
    let mut source = std::error::Error::source(error);
    let mut chain = text;
    while let Some(error) = source {
        chain.push_str(&error.to_string());
        source = error.source();
    }
    assert!(!chain.contains("hf_secret") && !chain.contains("s3cret"), "a secret is shown: {chain}");
}

#[test]
fn a_folder_arrives_in_the_shared_layout_with_only_what_is_needed() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let model = get("org/name", &config(&hub, &cache)).unwrap();

    assert_eq!(model.display_name, "org/name");
    assert_eq!(model.files, ModelFiles::Folder(snapshot(&cache)));
    assert_eq!(model.revision.as_deref(), Some(COMMIT));
    assert_eq!(model.notice, None);
    assert_eq!(names(&snapshot(&cache)), ["chat_template.jinja", "config.json", WEIGHTS, "tokenizer.json"]);
    assert_eq!(fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), weights());
    assert_eq!(fs::read_to_string(repo_dir(&cache).join("refs/main")).unwrap(), COMMIT);
    assert_eq!(names(&repo_dir(&cache)), ["blobs", "refs", "snapshots"]);
    assert!(names(&repo_dir(&cache).join("blobs")).iter().all(|name| !name.contains("incomplete")));
    #[cfg(unix)]
    assert_eq!(
        fs::read_link(snapshot(&cache).join(WEIGHTS)).unwrap(),
        PathBuf::from(format!("../../blobs/{}", etag(&weights())))
    );

    hub.take_requests();
    let again = get("org/name", &config(&hub, &cache)).unwrap();
    assert_eq!(again, model);
    assert_eq!(hub.take_requests().len(), 1, "one question whether the branch has moved, and no more");
}

#[test]
fn the_token_goes_to_the_hub_and_to_no_other_host() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    get("org/name", &config(&hub, &cache)).unwrap();
    let requests = hub.take_requests();
    assert!(requests.iter().any(is_data));
    for request in &requests {
        let expected = (request.host == Host::Hub).then_some("Bearer hf_secret");
        assert_eq!(request.header("authorization"), expected, "{request:?}");
    }

    let cache = TempDir::new().unwrap();
    get("org/name", &HubConfig { token: None, ..config(&hub, &cache) }).unwrap();
    assert!(hub.take_requests().iter().all(|request| request.header("authorization").is_none()));
}

#[test]
fn a_cache_made_by_the_python_libraries_is_used_as_it_is() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let (blobs, refs) = (repo_dir(&cache).join("blobs"), repo_dir(&cache).join("refs"));
    for folder in [&blobs, &refs, &snapshot(&cache)] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(refs.join("main"), COMMIT).unwrap();
    for (name, data) in
        [("config.json", b"{}".to_vec()), ("tokenizer.json", b"{\"t\":1}".to_vec()), (WEIGHTS, weights())]
    {
        let etag = etag_of(name, &data);
        fs::write(blobs.join(&etag), &data).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(format!("../../blobs/{etag}"), snapshot(&cache).join(name)).unwrap();
        #[cfg(not(unix))]
        fs::copy(blobs.join(&etag), snapshot(&cache).join(name)).unwrap();
    }

    let offline = get("org/name", &HubConfig { offline: true, ..config(&hub, &cache) }).unwrap();
    assert_eq!(offline.files, ModelFiles::Folder(snapshot(&cache)));
    assert!(hub.take_requests().is_empty());

    get("org/name", &config(&hub, &cache)).unwrap();
    let requests = hub.take_requests();
    assert!(!requests.iter().any(is_data), "the weights were there");
    assert!(requests.iter().any(|request| request.path.ends_with("chat_template.jinja")), "this was missing");
    assert!(snapshot(&cache).join("chat_template.jinja").exists());
}

#[test]
fn a_cached_model_runs_whatever_happens_to_the_hub() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let config = config(&hub, &cache);
    let model = get("org/name", &config).unwrap();

    let check = |config: &HubConfig, word: &str| {
        let found = get("org/name", config).unwrap();
        assert_eq!(found.files, model.files);
        assert_eq!(found.revision, model.revision);
        let notice = found.notice.unwrap();
        assert!(notice.contains("org/name") && notice.contains(word), "{notice}");
    };
    let closed = HubConfig { endpoint: closed_endpoint(), ..config.clone() };
    check(&closed, "cannot reach `127.0.0.1:");
    for (status, word) in [(500, "500"), (429, "refuses more requests"), (401, "does not accept the token")] {
        hub.set_fault(move |_, response| *response = Response::status(status));
        check(&config, word);
    }
    hub.set_fault(|_, response| response.status = 0);
    check(&config, "no answer");

    // What the cache does not have cannot be had.
    let error = get("org/other", &closed).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["cannot reach", "check the network"]);
    let error = get_revision("v2", &closed).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["cannot reach"]);
}

/// An address without a listener.
fn closed_endpoint() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[test]
fn an_https_address_is_spoken_to_in_tls() {
    const HANDSHAKE: u8 = 22;
    let (listener, cache) = (TcpListener::bind("127.0.0.1:0").unwrap(), TempDir::new().unwrap());
    let endpoint = format!("https://{}", listener.local_addr().unwrap());
    let first_byte = std::thread::spawn(move || {
        let mut byte = [0];
        listener.accept().unwrap().0.read_exact(&mut byte).map(|()| byte[0]).unwrap()
    });
    let config = HubConfig { endpoint, num_retries: 0, ..HubConfig::new(cache.path()) };
    let error = get("org/name", &config).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["cannot reach"]);
    assert_eq!(first_byte.join().unwrap(), HANDSHAKE);
}

#[test]
fn offline_never_touches_the_network() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let online = config(&hub, &cache);
    let offline = HubConfig { offline: true, ..online.clone() };

    let error = get("org/name", &offline).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["`org/name` is not in the cache", "HF_HUB_OFFLINE"]);
    assert!(hub.take_requests().is_empty());

    get("org/name", &online).unwrap();
    hub.take_requests();
    let model = get("org/name", &offline).unwrap();
    assert_eq!((model.files, model.notice), (ModelFiles::Folder(snapshot(&cache)), None));
    get_revision(COMMIT, &offline).unwrap();
    let error = get_revision("v2", &offline).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["revision `v2`", "HF_HUB_OFFLINE"]);
    let error = get("org/name:Q4_0", &offline).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["not complete", "no GGUF files"]);

    fs::remove_file(repo_dir(&cache).join("blobs").join(etag(&weights()))).unwrap();
    let error = get("org/name", &offline).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["not complete"]);
    assert!(hub.take_requests().is_empty());
}

#[test]
fn a_revision_is_a_branch_a_tag_or_a_commit() {
    const OTHER: &str = "fedcba9876543210fedcba9876543210fedcba98";
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let config = config(&hub, &cache);
    hub.add_revision("v2", OTHER);
    hub.add_revision("refs/pr/1", OTHER);

    assert_eq!(get("org/name", &config).unwrap().revision.as_deref(), Some(COMMIT));
    hub.take_requests();
    for revision in ["v2", "refs/pr/1", OTHER] {
        let model = get_revision(revision, &config).unwrap();
        assert_eq!(model.revision.as_deref(), Some(OTHER), "{revision}");
        assert_eq!(model.files, ModelFiles::Folder(repo_dir(&cache).join("snapshots").join(OTHER)));
    }
    assert!(!hub.take_requests().iter().any(is_data), "the same content is not fetched for another commit");
    assert_eq!(fs::read_to_string(repo_dir(&cache).join("refs/refs/pr/1")).unwrap(), OTHER);

    let error = get_revision("nothing", &config).unwrap_err();
    assert_error(
        &error,
        ErrorKind::NotFound,
        &["`org/name` has no revision `nothing`", "/org/name/tree/main"],
    );
}

#[test]
fn every_refusal_has_its_own_message_and_way_out() {
    let hub = hub_with_a_folder();
    let messages = RefCell::new(Vec::new());
    let check = |fault: Response, with_token: bool, kind: ErrorKind, words: &[&str]| {
        let cache = TempDir::new().unwrap();
        let mut config = config(&hub, &cache);
        if !with_token {
            config.token = None;
        }
        hub.set_fault(move |_, response| *response = fault.clone());
        let error = get("org/name", &config).unwrap_err();
        assert_error(&error, kind, words);
        messages.borrow_mut().push(error.message().to_owned());
    };
    use ErrorKind::{NotFound, RateLimited, Unauthorized, Unavailable};
    let refusal = Response::refusal;
    let repo_not_found = "Repository not found";
    check(
        refusal(404, "RepoNotFound", repo_not_found),
        true,
        NotFound,
        &["no model `org/name`", "check the name"],
    );
    check(refusal(404, "RevisionNotFound", ""), true, NotFound, &["no revision `main`"]);
    check(refusal(401, "GatedRepo", ""), false, Unauthorized, &["gated", "no token", "accept its terms at"]);
    check(refusal(403, "GatedRepo", ""), true, Unauthorized, &["gated", "no access", "request access at"]);
    check(
        refusal(401, "", "Invalid username or password."),
        false,
        Unauthorized,
        &["requires a token", "HF_TOKEN"],
    );
    check(
        refusal(401, "", "Invalid credentials in Authorization header"),
        true,
        Unauthorized,
        &["does not accept the token from HF_TOKEN", "settings/tokens"],
    );
    check(refusal(403, "", ""), true, Unauthorized, &["may not read"]);
    check(refusal(403, "", ""), false, Unauthorized, &["not give the model", "set HF_TOKEN"]);
    check(
        refusal(429, "", "").with("retry-after", "17"),
        true,
        RateLimited,
        &["refuses more requests", "wait 17 s"],
    );
    check(Response::status(503), true, Unavailable, &["503", "later"]);
    check(Response::status(200).body("<html>log in</html>"), true, Unavailable, &["not answer like the Hub"]);

    let mut distinct = messages.borrow().clone();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), messages.borrow().len(), "two refusals have the same message: {distinct:#?}");

    // The same meaning in other words of the Hub.
    check(
        refusal(401, "RepoNotFound", repo_not_found),
        false,
        NotFound,
        &["no model", "private, set HF_TOKEN"],
    );
    check(Response::status(404), true, NotFound, &["no model `org/name`"]);
    check(Response::status(401), true, Unauthorized, &["does not accept the token"]);
    check(Response::status(429), false, RateLimited, &["wait some minutes", "set HF_TOKEN"]);
}

#[test]
fn a_model_may_be_listed_for_all_and_gated_for_the_files() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    hub.set_fault(|request, response| {
        if request.path.contains("/resolve/") {
            *response = Response::refusal(401, "GatedRepo", "Access to model org/name is restricted");
        }
    });
    let error = get("org/name", &HubConfig { token: None, ..config(&hub, &cache) }).unwrap_err();
    assert_error(&error, ErrorKind::Unauthorized, &["gated, and no token is set"]);
    assert!(!repo_dir(&cache).join("refs").exists(), "nothing in the cache claims to be the model");
}

#[test]
fn a_failure_on_the_way_is_tried_again_and_a_refusal_is_not() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let mut num_faults = 0;
    hub.set_fault(move |request, response| {
        if num_faults < 2 && request.path.contains("/revision/") {
            num_faults += 1;
            *response = Response::status(502);
        }
    });
    get("org/name", &config(&hub, &cache)).unwrap();

    hub.take_requests();
    hub.set_fault(|_, response| *response = Response::status(404));
    get("org/other", &config(&hub, &cache)).unwrap_err();
    assert_eq!(hub.take_requests().len(), 1);
    hub.set_fault(|_, response| *response = Response::status(502));
    get("org/other", &config(&hub, &cache)).unwrap_err();
    assert_eq!(hub.take_requests().len(), 3);
}

#[test]
fn a_type_picks_the_gguf_file_of_a_repository() {
    let hub = FakeHub::new(
        "org/name",
        &[
            ("n-Q4_K.gguf", b"GGUF-q4k"),
            ("n-Q4_K_M.gguf", b"GGUF-q4km"),
            ("big/n-Q8_0-00001-of-00002.gguf", b"GGUF-part1"),
            ("big/n-Q8_0-00002-of-00002.gguf", b"GGUF-part2"),
            ("x-Q5_0.gguf", b"GGUF-x"),
            ("y-Q5_0.gguf", b"GGUF-y"),
        ],
    );
    let cache = TempDir::new().unwrap();
    let config = config(&hub, &cache);

    let model = get("org/name:q4_k_m", &config).unwrap();
    assert_eq!(model.files, ModelFiles::Gguf(snapshot(&cache).join("n-Q4_K_M.gguf")));
    assert_eq!(model.display_name, "org/name:q4_k_m");
    assert_eq!(names(&snapshot(&cache)), ["n-Q4_K_M.gguf"]);
    assert_eq!(fs::read(snapshot(&cache).join("n-Q4_K_M.gguf")).unwrap(), b"GGUF-q4km");

    let model = get("org/name:Q8_0", &config).unwrap();
    assert_eq!(model.files, ModelFiles::Gguf(snapshot(&cache).join("big/n-Q8_0-00001-of-00002.gguf")));
    assert_eq!(fs::read(snapshot(&cache).join("big/n-Q8_0-00002-of-00002.gguf")).unwrap(), b"GGUF-part2");
    get("org/name:Q8_0", &HubConfig { offline: true, ..config.clone() }).unwrap();

    let error = get("org/name:Q6_K", &config).unwrap_err();
    assert_error(&error, ErrorKind::NotFound, &["`Q6_K`", "n-Q4_K.gguf, n-Q4_K_M.gguf, x-Q5_0.gguf"]);
    let error = get("org/name:Q5_0", &config).unwrap_err();
    assert_error(&error, ErrorKind::NotFound, &["several", "x-Q5_0.gguf, y-Q5_0.gguf"]);
    let error = get("org/name", &config).unwrap_err();
    assert_error(&error, ErrorKind::NotFound, &["several GGUF files", "org/name:Q4_K_M"]);
    let model = get("org/name:y-Q5_0.gguf", &config).unwrap();
    assert_eq!(model.files, ModelFiles::Gguf(snapshot(&cache).join("y-Q5_0.gguf")));
}

#[test]
fn an_index_decides_which_shards_are_fetched() {
    const INDEX: &str = "model.safetensors.index.json";
    let index =
        br#"{"weight_map": {"a": "s-00001-of-00002.safetensors", "b": "s-00002-of-00002.safetensors"}}"#;
    let files: [(&str, &[u8]); 5] = [
        ("config.json", b"{}"),
        (INDEX, index),
        ("s-00001-of-00002.safetensors", b"one"),
        ("s-00002-of-00002.safetensors", b"two"),
        ("unrelated.safetensors", b"no"),
    ];
    let (hub, cache) = (FakeHub::new("org/name", &files), TempDir::new().unwrap());
    let config_full = config(&hub, &cache);
    get("org/name", &config_full).unwrap();
    assert_eq!(
        names(&snapshot(&cache)),
        ["config.json", INDEX, "s-00001-of-00002.safetensors", "s-00002-of-00002.safetensors"]
    );

    // A cache that lacks one shard is not the model.
    fs::remove_file(snapshot(&cache).join("s-00002-of-00002.safetensors")).unwrap();
    let error = get("org/name", &HubConfig { offline: true, ..config_full.clone() }).unwrap_err();
    assert_error(
        &error,
        ErrorKind::Unavailable,
        &["not complete", "`s-00002-of-00002.safetensors` is missing"],
    );
    get("org/name", &config_full).unwrap();

    let (hub, cache) = (FakeHub::new("org/name", &files[..3]), TempDir::new().unwrap());
    let error = get("org/name", &config(&hub, &cache)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel);
    assert!(error.message().contains("names `s-00002-of-00002.safetensors`"), "{error:?}");
}

#[test]
fn a_connection_that_is_cut_resumes_where_it_ended() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    hub.set_fault(|request, response| {
        if is_data(request) && response.body.len() > 100_000 {
            response.stop_after = Some(100_000);
        }
    });
    get("org/name", &config(&hub, &cache)).unwrap();
    assert_eq!(fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), weights());
    assert_eq!(data_ranges(&hub), ["bytes=0-299999", "bytes=100000-299999", "bytes=200000-299999"]);
}

#[test]
fn a_server_that_falls_silent_is_left_and_the_rest_is_fetched_next_time() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let config = config(&hub, &cache);
    hub.set_fault(|request, response| {
        if is_data(request) {
            response.stop_after = Some(if request.range().unwrap().start == 0 { 70_000 } else { 0 });
            response.stall = true;
        }
    });
    let started = Instant::now();
    let error = get("org/name", &config).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["stopped after 70000 of 300000 bytes", "no data for 1s"]);
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(incomplete_len(&cache, &weights()), 70_000);
    assert!(!snapshot(&cache).join(WEIGHTS).exists() && !repo_dir(&cache).join("refs").exists());

    hub.clear_fault();
    hub.take_requests();
    get("org/name", &config).unwrap();
    assert_eq!(fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), weights());
    assert_eq!(data_ranges(&hub), ["bytes=70000-299999"]);
    assert_eq!(incomplete(&cache, &weights()), None);
}

#[test]
fn a_server_that_never_answers_does_not_hold_the_program() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    hub.set_fault(|_, response| response.status = 0);
    let started = Instant::now();
    let error = get("org/name", &config(&hub, &cache)).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["no answer from `127.0.0.1:", "within 1s"]);
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[test]
fn a_server_without_ranges_begins_anew_but_not_for_ever() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let config = config(&hub, &cache);
    let mut num_cuts = 0;
    let no_ranges = move |max_cuts: u32| {
        move |request: &Request, response: &mut Response| {
            if is_data(request) {
                *response = Response::status(200).body(weights());
                if num_cuts < max_cuts {
                    num_cuts += 1;
                    response.stop_after = Some(50_000);
                }
            }
        }
    };
    hub.set_fault(no_ranges(1));
    get("org/name", &config).unwrap();
    assert_eq!(fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), weights());

    let cache = TempDir::new().unwrap();
    hub.set_fault(no_ranges(u32::MAX));
    let error = get("org/name", &HubConfig { cache_dir: cache.path().to_owned(), ..config }).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["stopped after 50000 of 300000 bytes"]);
}

/// Runs this test again in a process of its own, which downloads and reports.
fn child(test: &str, hub: &FakeHub, cache: &TempDir) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env("FAKE_HUB", hub.endpoint()).env("FAKE_HUB_CACHE", cache.path());
    command
}

/// In a process made by [`child`]: what it shall do.
fn child_config() -> Option<HubConfig> {
    let endpoint = std::env::var("FAKE_HUB").ok()?;
    let cache_dir = std::env::var_os("FAKE_HUB_CACHE")?;
    Some(HubConfig { endpoint, num_retries: 0, ..HubConfig::new(cache_dir) })
}

#[test]
fn a_download_that_is_killed_leaves_no_half_file_and_is_resumed() {
    if let Some(config) = child_config() {
        panic!("the download should not have ended: {:?}", get("org/name", &config));
    }
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    hub.set_fault(|request, response| {
        if is_data(request) {
            response.stop_after = Some(120_000);
            response.stall = true;
        }
    });
    let mut process =
        child("a_download_that_is_killed_leaves_no_half_file_and_is_resumed", &hub, &cache).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while incomplete_len(&cache, &weights()) < 120_000 {
        assert!(Instant::now() < deadline, "the download did not begin");
        assert_eq!(process.try_wait().unwrap(), None, "the download ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(!snapshot(&cache).join(WEIGHTS).exists());
    assert!(!repo_dir(&cache).join("blobs").join(etag(&weights())).exists());
    let offline = HubConfig { offline: true, ..config(&hub, &cache) };
    assert_error(&get("org/name", &offline).unwrap_err(), ErrorKind::Unavailable, &["not in the cache"]);

    hub.clear_fault();
    hub.take_requests();
    get("org/name", &config(&hub, &cache)).unwrap();
    assert_eq!(fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), weights());
    assert_eq!(data_ranges(&hub), ["bytes=120000-299999"]);
}

/// The limit on file sizes replaces a disk that fills up while the file grows.
#[cfg(unix)]
#[test]
fn a_disk_that_fills_up_keeps_what_was_written() {
    if let Some(config) = child_config() {
        let error = get("org/name", &config).unwrap_err();
        assert_error(
            &error,
            ErrorKind::Io,
            &["has no space for `", "`model.safetensors`: it needs 293.0 KiB", "are written", "the next run"],
        );
        println!("reported as a full disk");
        return;
    }
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let test = child("a_disk_that_fills_up_keeps_what_was_written", &hub, &cache);
    let mut limited = Command::new("sh");
    // Without the trap the signal would kill the process instead of failing the write.
    limited.args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$0\" \"$@\""]);
    limited.arg(test.get_program()).args(test.get_args());
    limited.envs(test.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = limited.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("reported as a full disk"), "{output:?}");

    let written = incomplete_len(&cache, &weights());
    assert!(written > 0 && written < 300_000, "{written}");
    assert!(!snapshot(&cache).join(WEIGHTS).exists());
    hub.take_requests();
    get("org/name", &config(&hub, &cache)).unwrap();
    assert_eq!(fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), weights());
    assert_eq!(data_ranges(&hub), [format!("bytes={written}-299999")]);
}

/// A device that answers each write as a full disk does.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_named() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let path = shared_incomplete(&cache, &weights());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("/dev/full", path).unwrap();
    let error = get("org/name", &config(&hub, &cache)).unwrap_err();
    assert_error(
        &error,
        ErrorKind::Io,
        &["has no space", "0 bytes are written", "free 293.0 KiB", "HF_HUB_CACHE"],
    );
    assert!(!snapshot(&cache).join(WEIGHTS).exists());
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let file = cache.path().join("file");
    fs::write(&file, "").unwrap();
    let error = get("org/name", &HubConfig { cache_dir: file, ..config(&hub, &cache) }).unwrap_err();
    assert_error(&error, ErrorKind::Io, &["cannot create the folder", "HF_HOME"]);
}

#[test]
fn several_at_once_fetch_each_file_once() {
    struct CountsWaits<'a>(&'a AtomicUsize);
    impl Progress for CountsWaits<'_> {
        fn start(&self, _: &str, _: Option<u64>, _: u64) {}
        fn advance(&self, _: u64) {}
        fn finish(&self) {}
        fn wait_for_other_process(&self, _: &str) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let num_waits = AtomicUsize::new(0);
    // The first one is slow enough for the others to overlap with it.
    hub.set_fault(|request, response| {
        if is_data(request) && request.range().unwrap().start == 0 {
            response.stop_after = Some(1000);
            response.stall = true;
        }
    });
    let config = config(&hub, &cache);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let source = ModelSource::parse("org/name", None).unwrap();
                let model = resolve(&source, &config, &CountsWaits(&num_waits)).unwrap();
                assert_eq!(model.files, ModelFiles::Folder(snapshot(&cache)));
            });
        }
    });
    assert_eq!(fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), weights());
    let requests = hub.take_requests();
    assert_eq!(requests.iter().filter(|r| is_data(r) && r.path.contains(WEIGHTS)).count(), 2);
    assert!(num_waits.load(Ordering::SeqCst) >= 3);
    assert!(names(&repo_dir(&cache).join("blobs")).iter().all(|name| !name.contains("incomplete")));
}

#[test]
fn progress_reports_what_arrives() {
    #[derive(Default)]
    struct Log(RefCell<Vec<String>>, RefCell<u64>);
    impl Progress for Log {
        fn start(&self, file: &str, total_bytes: Option<u64>, resumed_from: u64) {
            self.0.borrow_mut().push(format!("{file} {total_bytes:?} {resumed_from}"));
            *self.1.borrow_mut() = 0;
        }
        fn advance(&self, bytes: u64) {
            *self.1.borrow_mut() += bytes;
        }
        fn finish(&self) {
            self.0.borrow_mut().push(format!("+{}", self.1.borrow()));
        }
    }
    let (hub, cache) = (FakeHub::new("org/name", &[("n.gguf", &weights())]), TempDir::new().unwrap());
    let path = shared_incomplete(&cache, &weights());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, &weights()[..1000]).unwrap();
    let log = Log::default();
    let source = ModelSource::parse("org/name", None).unwrap();
    resolve(&source, &config(&hub, &cache), &log).unwrap();
    resolve(&source, &config(&hub, &cache), &log).unwrap();
    assert_eq!(*log.0.borrow(), ["n.gguf Some(300000) 1000", "+299000"]);
}

#[test]
fn a_hostile_hub_cannot_write_outside_the_cache() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let config = config(&hub, &cache);
    let check = |fault: fn(&Request, &mut Response), kind: ErrorKind| {
        hub.set_fault(fault);
        assert_eq!(get("org/name", &config).unwrap_err().kind(), kind);
    };
    let names_as_file = |name: &str, sha: &str| serde_json::json!({ "sha": sha, "siblings": [{ "rfilename": name }, { "rfilename": "config.json" }] });
    let outside = names_as_file("../../../../evil.safetensors", COMMIT).to_string();
    let bad_commit = names_as_file("model.safetensors", "../../../evil").to_string();
    for (info, kind) in [(outside, ErrorKind::Unsupported), (bad_commit, ErrorKind::Unavailable)] {
        hub.set_fault(move |_, response| *response = Response::status(200).body(info.clone()));
        assert_eq!(get("org/name", &config).unwrap_err().kind(), kind);
    }
    check(
        |request, response| {
            if request.method == "HEAD" {
                *response = Response::status(200).with("etag", "\"../../evil\"");
            }
        },
        ErrorKind::Unavailable,
    );
    check(
        |request, response| {
            if request.method == "HEAD" {
                *response =
                    Response::status(302).with("location", "file:///etc/passwd").with("etag", "\"e\"");
            }
        },
        ErrorKind::Unavailable,
    );
    check(
        |request, response| {
            if request.path.contains("/resolve") {
                *response = Response::status(302).with("location", "/org/name/resolve/again");
            }
        },
        ErrorKind::Unavailable,
    );
    // Neither more nor fewer bytes than announced become the file.
    check(
        |request, response| {
            if is_data(request) {
                response.body.push(0);
            }
        },
        ErrorKind::Unavailable,
    );
    check(
        |request, response| {
            if is_data(request) {
                *response = Response::status(206).with("content-range", "bytes 5-9/300000").body("wrong");
            }
        },
        ErrorKind::Unavailable,
    );
    assert!(!snapshot(&cache).join(WEIGHTS).exists());
    assert!(names(cache.path()).iter().all(|name| [".locks", "models--org--name"].contains(&name.as_str())));
}

#[test]
fn settings_that_cannot_work_are_refused_before_the_network() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let config = config(&hub, &cache);
    for endpoint in ["huggingface.co", "ftp://a", "https://me:pw@huggingface.co", ""] {
        let error =
            get("org/name", &HubConfig { endpoint: endpoint.to_owned(), ..config.clone() }).unwrap_err();
        assert_error(&error, ErrorKind::InvalidRequest, &["HF_ENDPOINT"]);
    }
    let token = Token::new("hf_secret\r\nHost: evil", "/home/me/token");
    let error = get("org/name", &HubConfig { token, ..config.clone() }).unwrap_err();
    assert_error(&error, ErrorKind::InvalidRequest, &["/home/me/token"]);
    assert!(hub.take_requests().is_empty());

    // A mirror may live below a path, and a slash at the end is common.
    get("org/name", &HubConfig { endpoint: format!("{}/", hub.endpoint()), ..config }).unwrap();
}

#[test]
fn what_is_on_disk_needs_no_hub() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["safetensors", "one", "two", "nothing"] {
        fs::create_dir(at(name)).unwrap();
    }
    for name in ["safetensors/config.json", "one/n-Q4_0.gguf", "one/README.md", "two/a.gguf", "two/b.gguf"] {
        fs::write(at(name), "x").unwrap();
    }
    let config = HubConfig { endpoint: closed_endpoint(), ..HubConfig::new(at("cache")) };
    let local = |name: &str| get(at(name).to_str().unwrap(), &config);
    let check = |name: &str, display_name: &str, files: ModelFiles| {
        let expected =
            ResolvedModel { display_name: display_name.to_owned(), files, revision: None, notice: None };
        assert_eq!(local(name).unwrap(), expected);
    };
    check("safetensors", "safetensors", ModelFiles::Folder(at("safetensors")));
    check("one", "one", ModelFiles::Gguf(at("one/n-Q4_0.gguf")));
    check("one/n-Q4_0.gguf", "n-Q4_0", ModelFiles::Gguf(at("one/n-Q4_0.gguf")));
    assert_error(&local("two").unwrap_err(), ErrorKind::NotFound, &["several GGUF files: a.gguf, b.gguf"]);
    assert_error(
        &local("nothing").unwrap_err(),
        ErrorKind::NotFound,
        &["neither config.json nor a .gguf file"],
    );
    assert_eq!(get("demo", &config).unwrap().files, ModelFiles::Demo);
    assert!(!at("cache").exists());
}
