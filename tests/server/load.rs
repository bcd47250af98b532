//! The server under load: many clients of every kind for a minute, and a stream during a long prompt.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Answer, Server, TIMEOUT, connect, post, post_bytes, read_answer};

const COMPLETIONS: &str = "/v1/completions";
const NUM_CLIENTS: u64 = 64;
const DURATION: Duration = Duration::from_secs(60);
/// When everything that is needed for this load has been allocated.
const WARM: Duration = Duration::from_secs(20);

/// Held by tests that load the machine or measure times: one at a time.
static MACHINE: Mutex<()> = Mutex::new(());

pub(super) fn machine() -> MutexGuard<'static, ()> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers that look random, the same in each run.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Requests of different lengths, ways to sample and numbers of sequences; some begin alike.
fn bodies() -> Vec<Value> {
    let story = "Once upon a time, in a small village by the sea, there lived a little girl who";
    (0..24_u64)
        .map(|seed| {
            let prompt = match seed % 3 {
                0 => story.to_owned(),
                1 => {
                    format!("{story} had {seed} friends. {}", "They went to the sea. ".repeat(seed as usize))
                }
                _ => format!("Story {seed}"),
            };
            json!({
                "prompt": prompt, "seed": seed, "max_tokens": 3 + seed * 4, "n": 1 + seed % 2,
                "temperature": if seed % 4 == 0 { 0.0 } else { 1.0 }, "ignore_eos": seed % 5 == 0,
            })
        })
        .collect()
}

/// The text of each choice.
fn texts(values: &[Value]) -> HashMap<u64, String> {
    let mut texts: HashMap<u64, String> = HashMap::new();
    for choice in values.iter().flat_map(|value| value["choices"].as_array().unwrap()) {
        let text = texts.entry(choice["index"].as_u64().unwrap()).or_default();
        text.push_str(choice["text"].as_str().unwrap());
    }
    texts
}

/// What one client does, again and again. Counts the answers that it has compared.
fn client(
    address: SocketAddr,
    number: u64,
    end: Instant,
    alone: &[(Value, HashMap<u64, String>)],
    num_compared: &AtomicUsize,
) {
    let mut random = Random((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    while Instant::now() < end {
        let (body, wanted) = &alone[random.below(alone.len() as u64) as usize];
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let request = post_bytes(COMPLETIONS, "", &streamed.to_string());
        let compare = |answer: &Answer| {
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(texts(&answer.events()), *wanted, "{body}");
            num_compared.fetch_add(1, Ordering::Relaxed);
        };
        match random.below(20) {
            0..8 => compare(&super::client::send(address, &request)),
            8..11 => {
                let answer = post(address, COMPLETIONS, body).success();
                assert_eq!(texts(std::slice::from_ref(&answer)), *wanted, "{body}");
                num_compared.fetch_add(1, Ordering::Relaxed);
            }
            // A slow reader.
            11..13 => {
                let mut stream = connect(address);
                stream.write_all(request.as_bytes()).unwrap();
                compare(&read_answer(Slowly(&mut stream)));
            }
            // One that leaves somewhere in the answer.
            13..17 => {
                let mut stream = connect(address);
                stream.write_all(request.as_bytes()).unwrap();
                let mut bytes = vec![0; random.below(3_000) as usize + 1];
                let _ = stream.read_exact(&mut bytes);
            }
            // One that leaves at once, with its request half or fully sent.
            17..19 => {
                let mut stream = connect(address);
                let len = random.below(request.len() as u64 + 1) as usize;
                let _ = stream.write_all(&request.as_bytes()[..len]);
                let _ = stream.shutdown(Shutdown::Both);
            }
            // One that never reads.
            _ => {
                let mut stream = connect(address);
                stream.write_all(request.as_bytes()).unwrap();
                std::thread::sleep(Duration::from_millis(200 + random.below(800)));
            }
        }
    }
}

/// Reads little, and seldom.
struct Slowly<'a>(&'a mut TcpStream);

impl Read for Slowly<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        std::thread::sleep(Duration::from_millis(3));
        let len = bytes.len().min(512);
        self.0.read(&mut bytes[..len])
    }
}

/// Memory of the process that is in use, in KiB; 0 where the system does not report it.
fn resident_kib(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse().unwrap())
}

#[test]
fn sixty_four_clients_of_every_kind_leave_no_trace() {
    let _machine = machine();
    // So little memory that sequences are preempted.
    let server = Server::start(
        "--max-num-seqs 16 --block-size 8 --kv-cache-memory-bytes 8M --disable-access-log --write-timeout 5",
    );
    let ask = |body: Value| {
        let answer = server.post(COMPLETIONS, &body).success();
        (body, texts(std::slice::from_ref(&answer)))
    };
    let alone: Vec<_> = bodies().into_iter().map(ask).collect();
    let num_compared = AtomicUsize::new(0);
    let start = Instant::now();
    let (address, end) = (server.address(), start + DURATION);
    let warm_kib = std::thread::scope(|scope| {
        for number in 0..NUM_CLIENTS {
            let (alone, num_compared) = (&alone, &num_compared);
            std::thread::Builder::new()
                .stack_size(256 << 10)
                .spawn_scoped(scope, move || client(address, number, end, alone, num_compared))
                .unwrap();
        }
        std::thread::sleep(WARM);
        resident_kib(&server)
    });
    for gauge in ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"] {
        server.wait_for_metric(gauge, 0.0);
    }
    let compared = num_compared.load(Ordering::Relaxed);
    assert!(compared > 64, "only {compared} answers were complete");
    let end_kib = resident_kib(&server);
    assert!(
        end_kib <= warm_kib + warm_kib / 10 + (8 << 10),
        "{warm_kib} KiB were in use after {WARM:?}, {end_kib} KiB at the end"
    );
    // An idle engine has checked that all blocks are accounted for, or it would have ended.
    assert_eq!(server.get("/health").status, 200);
    for (body, wanted) in &alone {
        assert_eq!(ask(body.clone()).1, *wanted);
    }
}

/// Times at which chunks of a stream arrive.
fn arrivals(mut stream: TcpStream) -> Vec<Instant> {
    let mut buffer = [0; 4_096];
    let mut arrivals = Vec::new();
    while stream.read(&mut buffer).is_ok_and(|num_bytes| num_bytes > 0) {
        arrivals.push(Instant::now());
    }
    arrivals
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The demo model with a longer window, in which its text makes no sense and its speed is the same.
fn model_with_window(len: u32) -> tempfile::TempDir {
    let mut model = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../src/demo/model.gguf")).unwrap();
    let name = b"llama.context_length";
    let at = model.windows(name.len()).position(|bytes| bytes == name).unwrap() + name.len();
    // A number of the type u32.
    assert_eq!(model[at..at + 4], 4_u32.to_le_bytes());
    model[at + 4..at + 8].copy_from_slice(&len.to_le_bytes());
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.gguf"), model).unwrap();
    folder
}

#[test]
fn a_stream_does_not_wait_for_anothers_long_prompt() {
    const BUDGET: usize = 128;
    const PROMPT: usize = 12 * BUDGET;
    let _machine = machine();
    // Computed at once, the prompt would delay all clients for twelve steps.
    let folder = model_with_window(2_048);
    let model = folder.path().join("model.gguf");
    let server =
        Server::start_with("--max-num-batched-tokens 128 --max-num-seqs 4 --disable-access-log", |command| {
            command.arg("--model").arg(&model);
        });
    let prompt =
        |len: usize, first: usize| (0..len).map(|i| 300 + (i * 7 + first * 13) % 700).collect::<Vec<_>>();
    let (mut steps, mut gaps) = (Vec::new(), Vec::new());
    for round in 0..12 {
        // The slowest step of such a prompt, alone: the last one, which reads the keys of all others. How much slower
        // than the first it is depends on the processor.
        let own = prompt(PROMPT, round);
        let ask = |prompt: &[usize]| {
            let body = json!({"prompt": prompt, "max_tokens": 1, "cache_salt": format!("step {round}")});
            server.post(COMPLETIONS, &body).success()
        };
        ask(&own[..PROMPT - BUDGET]);
        let answer = ask(&own);
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], PROMPT - BUDGET);
        steps.push(answer["timings"]["prefill_ms"].as_f64().unwrap() / 1e3);

        let body = json!({"prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": true});
        let mut stream = connect(server.address());
        stream.write_all(post_bytes(COMPLETIONS, "", &body.to_string()).as_bytes()).unwrap();
        stream.peek(&mut [0]).unwrap();
        let reader = std::thread::spawn(move || arrivals(stream));
        let salt = format!("long {round}");
        let body = json!({"prompt": prompt(PROMPT, round), "max_tokens": 1, "cache_salt": salt});
        let begin = Instant::now();
        let answer = server.post(COMPLETIONS, &body).success();
        let end = Instant::now();
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        let arrivals = reader.join().unwrap();
        let between =
            |pair: &[Instant]| (pair[1] > begin && pair[0] < end).then(|| (pair[1] - pair[0]).as_secs_f64());
        let during: Vec<f64> = arrivals.windows(2).filter_map(between).collect();
        assert!(during.len() >= 5, "the stream had {} tokens during the prompt", during.len());
        gaps.push(during.into_iter().fold(0.0, f64::max));
    }
    // Whatever else the machine does makes some rounds slower; a prompt computed at once would make all of them.
    gaps.sort_by(f64::total_cmp);
    let (gap, step) = (gaps[0], median(steps));
    assert!(gap < 3.0 * step, "the longest gap is {gap} s, a full step takes {step} s; all gaps: {gaps:?}");
}

#[test]
fn a_scrape_does_not_wait_for_steps() {
    let _machine = machine();
    let server = Server::start("--max-num-seqs 16 --disable-access-log");
    let body = json!({"prompt": "Once", "n": 16, "max_tokens": 500, "ignore_eos": true, "stream": true});
    let mut times = Vec::new();
    let start = Instant::now();
    // As often as it takes, because the load does not last long.
    while times.len() < 15 {
        assert!(start.elapsed() < TIMEOUT, "only {} scrapes were under load", times.len());
        let mut stream = connect(server.address());
        stream.write_all(post_bytes(COMPLETIONS, "", &body.to_string()).as_bytes()).unwrap();
        stream.peek(&mut [0]).unwrap();
        for _ in 0..5 {
            let start = Instant::now();
            let page = server.get("/metrics").text();
            let time = start.elapsed().as_secs_f64();
            let running = page.lines().find(|line| line.starts_with("vllm:num_requests_running")).unwrap();
            times.extend(running.ends_with(" 16").then_some(time));
        }
    }
    let time = median(times);
    assert!(time < 0.05, "a scrape takes {time} s");
}
