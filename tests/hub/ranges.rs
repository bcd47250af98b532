//! A file in many ranges, over several connections, and what can go wrong with single ones.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::fake::Line;
use super::*;

const RANGE: usize = 32 << 10;

/// A model in one file of two megabytes, which is fetched in many ranges.
fn hub_with_a_file() -> (FakeHub, Vec<u8>) {
    let data: Vec<u8> = (0..2_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8).collect();
    (FakeHub::new("org/name", &[("n.gguf", &data)]), data)
}

fn in_ranges(hub: &FakeHub, cache: &TempDir) -> HubConfig {
    HubConfig { max_range_bytes: RANGE as u64, max_connections: 8, ..config(hub, cache) }
}

#[track_caller]
fn assert_file(cache: &TempDir, data: &[u8]) {
    assert!(fs::read(snapshot(cache).join("n.gguf")).unwrap() == data, "other bytes");
    assert_eq!(names(&repo_dir(cache).join("blobs")), [etag(data)], "nothing is left next to it");
}

/// Answers the `n`-th request for data otherwise, counted from 1.
fn nth(
    n: usize,
    fault: impl Fn(&Request, &mut Response) + Send + 'static,
) -> impl FnMut(&Request, &mut Response) {
    let mut count = 0;
    move |request, response| {
        if is_data(request) {
            count += 1;
            if count == n {
                fault(request, response);
            }
        }
    }
}

#[test]
fn ranges_make_up_the_file_and_each_byte_is_sent_once() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    get("org/name", &in_ranges(&hub, &cache)).unwrap();
    assert_file(&cache, &data);
    assert_eq!(hub.take_traffic().num_bytes, data.len());
    let requests = hub.take_requests();
    let mut ranges: Vec<_> = requests.iter().filter(|r| is_data(r)).map(|r| r.range().unwrap()).collect();
    assert_eq!(ranges[0], 0..RANGE, "the first one, which shows that there are ranges");
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
    assert!(ranges.iter().all(|range| range.len() <= RANGE) && ranges.last().unwrap().end == data.len());
    let num_resolved = requests.iter().filter(|r| r.host == Host::Hub && r.method == "GET").count();
    assert_eq!(num_resolved, 2, "the list of files, and once where the file is");
}

/// The line gives each connection this many bytes a second, and every answer comes late.
#[test]
fn several_connections_are_several_times_as_fast_as_one() {
    let (hub, data) = hub_with_a_file();
    hub.set_line(Line { latency: Duration::from_millis(50), bytes_per_second: 2_000_000 });
    let time = |max_connections: usize| {
        let cache = TempDir::new().unwrap();
        let config = HubConfig { max_range_bytes: 100_000, max_connections, ..config(&hub, &cache) };
        hub.take_traffic();
        let started = Instant::now();
        get("org/name", &config).unwrap();
        let seconds = started.elapsed().as_secs_f64();
        assert_file(&cache, &data);
        (seconds, hub.take_traffic().most_open)
    };
    let ((one, alone), (eight, together)) = (time(1), time(8));
    // One connection needs 20 times 50 ms and a second for the bytes, eight about an eighth of it.
    assert_eq!(alone, 1);
    assert!((4..=8).contains(&together), "{together} at once");
    assert!(one > 2.0 && eight < one / 2.5, "{one} s over one connection, {eight} s over eight");
}

#[test]
fn a_range_that_is_cut_off_resumes_alone() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    let mut count = 0;
    hub.set_fault(move |request, response| {
        if is_data(request) {
            count += 1;
            if count % 10 == 0 {
                response.stop_after = Some(10_000);
            }
        }
    });
    get("org/name", &in_ranges(&hub, &cache)).unwrap();
    assert_file(&cache, &data);
    assert_eq!(hub.take_traffic().num_bytes, data.len(), "what had arrived was not sent again");
    assert!(data_ranges(&hub).len() > data.len() / RANGE + 5);
}

#[test]
fn a_range_that_never_comes_ends_the_download_and_what_was_before_it_is_kept() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    let config = in_ranges(&hub, &cache);
    hub.set_fault(|request, response| {
        if is_data(request) && request.range().unwrap().contains(&1_000_000) {
            response.stop_after = Some(0);
        }
    });
    let error = get("org/name", &config).unwrap_err();
    let gap = 1_000_000 / RANGE * RANGE;
    // Ranges before it may have been on their way when it was cancelled.
    let kept = incomplete_len(&cache, &data);
    assert!(kept > 0 && kept <= gap as u64, "{kept} of {gap} bytes");
    assert_error(&error, ErrorKind::Unavailable, &[&format!("stopped after {kept} of 2000000 bytes")]);

    hub.clear_fault();
    hub.take_traffic();
    get("org/name", &config).unwrap();
    assert_file(&cache, &data);
    assert_eq!(hub.take_traffic().num_bytes, data.len() - kept as usize, "only what was missing");
}

#[test]
fn a_download_in_ranges_that_is_killed_fetches_what_is_missing() {
    const TEST: &str = "ranges::a_download_in_ranges_that_is_killed_fetches_what_is_missing";
    if let Some(config) = child_config() {
        panic!("it should not have ended: {:?}", get("org/name", &config));
    }
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    hub.set_line(Line { latency: Duration::from_millis(5), bytes_per_second: 200_000 });
    let mut process = child(TEST, &hub, &cache).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while incomplete_len(&cache, &data) < 300_000 {
        assert!(Instant::now() < deadline, "the download did not begin");
        assert_eq!(process.try_wait().unwrap(), None, "the download ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    // What is under way stays in the line for a moment.
    std::thread::sleep(Duration::from_millis(300));
    let arrived = incomplete_len(&cache, &data);
    hub.set_line(Line::default());
    hub.take_traffic();
    get("org/name", &in_ranges(&hub, &cache)).unwrap();
    assert_file(&cache, &data);
    assert_eq!(hub.take_traffic().num_bytes as u64, data.len() as u64 - arrived);
}

#[test]
fn an_answer_of_another_range_is_asked_for_again() {
    let wrong: [fn(&Request, &mut Response); 6] = [
        // Another offset, fewer bytes than declared, more than requested, no offset at all.
        |_, response| response.headers = vec![("content-range", "bytes 7-32774/2000000".to_owned())],
        |_, response| response.body.truncate(RANGE - 1),
        |request, response| {
            let range = request.range().unwrap();
            response.body.push(1);
            response.headers =
                vec![("content-range", format!("bytes {}-{}/2000000", range.start, range.end))];
        },
        |_, response| response.headers.clear(),
        // The whole file, although there were ranges before; the address does not hold any more.
        |_, response| *response = Response::status(200).body(vec![1; 2_000_000]),
        |_, response| *response = Response::status(416).with("content-range", "bytes */2000000"),
    ];
    for fault in wrong {
        let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
        hub.set_fault(nth(20, fault));
        get("org/name", &in_ranges(&hub, &cache)).unwrap();
        assert_file(&cache, &data);
        assert_eq!(data_ranges(&hub).len(), data.len().div_ceil(RANGE) + 1, "one range was asked for again");
    }
}

#[test]
fn an_answer_for_a_shorter_range_is_completed() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    hub.set_fault(|request, response| {
        if is_data(request) {
            let start = request.range().unwrap().start;
            response.body.truncate(20_000);
            let last = start + response.body.len() - 1;
            response.headers = vec![("content-range", format!("bytes {start}-{last}/2000000"))];
        }
    });
    get("org/name", &in_ranges(&hub, &cache)).unwrap();
    assert_file(&cache, &data);
    assert_eq!(hub.take_traffic().num_bytes, data.len());
}

#[test]
fn no_request_asks_for_a_whole_large_file() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    hub.set_fault(|request, response| {
        if is_data(request) && request.range().is_none_or(|range| range.len() > 1 << 20) {
            *response = Response::status(400);
        }
    });
    get("org/name", &config(&hub, &cache)).unwrap();
    assert_file(&cache, &data);
}

#[test]
fn a_file_of_unknown_length_arrives_in_one_answer() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    hub.set_fault(|_, response| response.headers.retain(|(name, _)| *name != "x-linked-size"));
    get("org/name", &in_ranges(&hub, &cache)).unwrap();
    assert_file(&cache, &data);
    assert_eq!(data_ranges(&hub), ["none"]);
}

#[test]
fn a_flipped_bit_never_becomes_a_model() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    let flip = |_: &Request, response: &mut Response| response.body[77] ^= 4;
    hub.set_fault(nth(30, flip));
    get("org/name", &in_ranges(&hub, &cache)).unwrap();
    assert_file(&cache, &data);
    assert_eq!(hub.take_traffic().num_bytes, 2 * data.len(), "which range it was cannot be known");

    let cache = TempDir::new().unwrap();
    hub.set_fault(move |request, response| {
        if is_data(request) && request.range().unwrap().contains(&1_000_000) {
            flip(request, response);
        }
    });
    let error = get("org/name", &in_ranges(&hub, &cache)).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["`n.gguf` arrived 3 times", "SHA-256", "faulty disk"]);
    assert_eq!(hub.take_traffic().num_bytes, 3 * data.len());
    assert!(names(&repo_dir(&cache).join("blobs")).is_empty(), "it is deleted");
    assert!(!snapshot(&cache).exists() && !repo_dir(&cache).join("refs").exists());
}

#[test]
fn a_small_file_is_checked_as_git_names_it() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    hub.set_fault(|request, response| {
        if request.path.contains("resolve-cache/tokenizer.json") && request.method == "GET" {
            response.body[1] ^= 1;
        }
    });
    let error = get("org/name", &config(&hub, &cache)).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["`tokenizer.json` arrived 3 times", "SHA-1"]);
    assert!(!snapshot(&cache).join("tokenizer.json").exists());
}

#[test]
fn a_server_that_asks_for_a_pause_gets_it() {
    #[derive(Default)]
    struct Pauses(RefCell<Vec<Duration>>);
    impl Progress for Pauses {
        fn start(&self, _: &str, _: Option<u64>, _: u64) {}
        fn advance(&self, _: u64) {}
        fn finish(&self) {}
        fn pause(&self, file: &str, duration: Duration) {
            assert_eq!(file, "n.gguf");
            self.0.borrow_mut().push(duration);
        }
    }
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    let limited = |seconds: &str| Response::status(429).with("retry-after", seconds);
    let answer = limited("1");
    hub.set_fault(nth(20, move |_, response| *response = answer.clone()));
    let (source, pauses) = (ModelSource::parse("org/name", None).unwrap(), Pauses::default());
    let started = Instant::now();
    resolve(&source, &in_ranges(&hub, &cache), &pauses).unwrap();
    assert!(started.elapsed() >= Duration::from_secs(1));
    assert_file(&cache, &data);
    assert_eq!(*pauses.0.borrow(), [Duration::from_secs(1)]);
    assert_eq!(hub.take_traffic().num_bytes, data.len());

    // Longer than anybody waits.
    let cache = TempDir::new().unwrap();
    let answer = limited("3600");
    hub.set_fault(nth(20, move |_, response| *response = answer.clone()));
    let error = get("org/name", &in_ranges(&hub, &cache)).unwrap_err();
    assert_error(&error, ErrorKind::RateLimited, &["refuses more requests", "wait 3600 s"]);
    assert!(incomplete_len(&cache, &data) > 0, "what had arrived is kept");
}

#[test]
fn an_address_that_expires_is_asked_for_again() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    // How often each address was used.
    let mut uses = Vec::new();
    hub.set_fault(move |request, response| {
        if request.host == Host::Hub && request.method == "GET" && request.path.contains("/resolve/") {
            let (_, location) = response.headers.iter_mut().find(|(name, _)| *name == "location").unwrap();
            location.push_str(&format!("&number={}", uses.len()));
            uses.push(0);
        } else if is_data(request) {
            let (_, number) = request.path.split_once("&number=").unwrap();
            let uses: &mut usize = &mut uses[number.parse::<usize>().unwrap()];
            *uses += 1;
            if *uses > 25 {
                *response = Response::status(403);
            }
        }
    });
    get("org/name", &in_ranges(&hub, &cache)).unwrap();
    assert_file(&cache, &data);
    assert_eq!(hub.take_traffic().num_bytes, data.len());
}

#[test]
fn a_file_that_changes_on_the_way_is_not_mixed() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    let new: Vec<u8> = data.iter().map(|byte| !byte).collect();
    // Names that prove nothing, so that the storage host's own have to do.
    let version = std::sync::Arc::new(Mutex::new(1));
    let named = |change_at: usize, always: bool| {
        let (version, new) = (version.clone(), new.clone());
        let mut count = 0;
        move |request: &Request, response: &mut Response| {
            let mut version = version.lock().unwrap();
            if is_data(request) {
                count += 1;
                if count % change_at == 0 && (always || count == change_at) {
                    *version += 1;
                }
                if *version > 1
                    && let Some(range) = request.range()
                {
                    response.body = new[range].to_vec();
                }
                response.headers.push(("etag", format!("\"v{version}\"")));
            } else if request.path.contains("/resolve/") {
                response.headers.retain(|(name, _)| *name != "x-linked-etag");
                response.headers.push(("x-linked-etag", format!("\"version-{version}\"")));
            }
        }
    };
    hub.set_fault(named(20, false));
    get("org/name", &in_ranges(&hub, &cache)).unwrap();
    assert!(fs::read(snapshot(&cache).join("n.gguf")).unwrap() == new, "all of it is the new one");
    assert_eq!(names(&repo_dir(&cache).join("blobs")), ["version-2"]);

    let cache = TempDir::new().unwrap();
    hub.set_fault(named(20, true));
    let error = get("org/name", &in_ranges(&hub, &cache)).unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["`n.gguf` changed 3 times", "HF_ENDPOINT"]);
    assert!(names(&repo_dir(&cache).join("blobs")).is_empty());
}

/// With a checksum, storage hosts may call the content as they like.
#[test]
fn names_of_storage_hosts_do_not_outweigh_a_checksum() {
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    let is_odd = AtomicBool::new(false);
    hub.set_fault(move |request, response| {
        if is_data(request) {
            response.headers.push(("etag", format!("\"{}\"", is_odd.fetch_xor(true, Ordering::SeqCst))));
        }
    });
    get("org/name", &in_ranges(&hub, &cache)).unwrap();
    assert_file(&cache, &data);
    assert_eq!(hub.take_traffic().num_bytes, data.len());
}

#[test]
fn progress_of_many_ranges_adds_up_to_the_file() {
    #[derive(Default)]
    struct Sum(RefCell<(u64, Vec<String>)>);
    impl Progress for Sum {
        fn start(&self, _: &str, total_bytes: Option<u64>, resumed_from: u64) {
            let sum = &mut *self.0.borrow_mut();
            sum.0 = resumed_from;
            sum.1.push(format!("{resumed_from} of {total_bytes:?}"));
        }
        fn advance(&self, bytes: u64) {
            let sum = &mut *self.0.borrow_mut();
            sum.0 += bytes;
            assert!(sum.0 <= 2_000_000);
        }
        fn finish(&self) {
            assert_eq!(self.0.borrow().0, 2_000_000);
            self.0.borrow_mut().1.push("finished".to_owned());
        }
    }
    let ((hub, data), cache) = (hub_with_a_file(), TempDir::new().unwrap());
    let path = shared_incomplete(&cache, &data);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, &data[..123_456]).unwrap();
    let sum = Sum::default();
    resolve(&ModelSource::parse("org/name", None).unwrap(), &in_ranges(&hub, &cache), &sum).unwrap();
    assert_eq!(sum.0.borrow().1, ["123456 of Some(2000000)", "finished"]);
    assert_eq!(hub.take_traffic().num_bytes, data.len() - 123_456);
}
