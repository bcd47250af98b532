//! The program as a server, and a plain HTTP client that can also misbehave.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Nothing here takes so long, unless it hangs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A running server, killed when dropped.
pub(crate) struct Server {
    child: Child,
    address: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Starts the demo model with these flags and waits until it is ready.
    pub(crate) fn start(flags: &str) -> Self {
        Self::start_with(flags, |_| ())
    }

    pub(crate) fn start_with(flags: &str, change: impl FnOnce(&mut Command)) -> Self {
        Self::start_command(Command::new(env!("CARGO_BIN_EXE_tinyvllm")), flags, change)
    }

    /// The same with this command, which ends in the program.
    pub(crate) fn start_command(
        mut command: Command,
        flags: &str,
        change: impl FnOnce(&mut Command),
    ) -> Self {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TINYVLLM_") {
                command.env_remove(name);
            }
        }
        command.args(["serve", "--port", "0"]).args(flags.split_whitespace());
        match flags.contains("--kernels reference") {
            true => command.env("RAYON_NUM_THREADS", "1"),
            false => command.args(["--threads", "1"]),
        };
        change(&mut command);
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let log = Arc::new(Mutex::new(Vec::new()));
        let ready = loop {
            let line = lines.next().unwrap_or_else(|| panic!("the server ended: {:?}", log.lock().unwrap()));
            log.lock().unwrap().push(line.clone());
            // A line of text, or the notice of a line in JSON.
            if let Some((_, url)) = line.split_once("ready: http://") {
                break url.split('/').next().unwrap().parse().unwrap();
            }
        };
        let sink = Arc::clone(&log);
        let reader = std::thread::spawn(move || lines.for_each(|line| sink.lock().unwrap().push(line)));
        Self { child, address: ready, log, reader: Some(reader) }
    }

    /// The number of the process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        get(self.address, path)
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        post(self.address, path, body)
    }

    /// A gauge or counter, summed over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics").text();
        let values = page.lines().filter_map(|line| {
            let (found, value) = line.rsplit_once(' ')?;
            found.starts_with(name).then(|| value.parse::<f64>().unwrap())
        });
        values.sum()
    }

    /// Asks for a metric until it has this value.
    #[track_caller]
    pub(crate) fn wait_for_metric(&self, name: &str, wanted: f64) {
        let start = Instant::now();
        loop {
            let value = self.metric(name);
            if value == wanted {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "{name} is {value}, not {wanted}");
        }
    }

    /// Waits until nothing runs and nothing waits, on one page: the end of a waiting request may be noticed after the end of
    /// a permit, and what still waits could run.
    #[track_caller]
    pub(crate) fn wait_until_idle(&self) {
        let start = Instant::now();
        loop {
            let page = self.get("/metrics").text();
            let gauges = ["vllm:num_requests_running", "vllm:num_requests_waiting"];
            let found: Vec<&str> =
                page.lines().filter(|line| gauges.iter().any(|name| line.starts_with(name))).collect();
            assert!(gauges.iter().all(|name| found.iter().any(|line| line.starts_with(name))), "{found:?}");
            if found.iter().all(|line| line.ends_with(" 0")) {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "{found:?}");
        }
    }

    #[cfg(unix)]
    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let id = nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        nix::sys::signal::kill(id, signal).unwrap();
    }

    /// What it has logged so far.
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    /// Waits for the program to end by itself; also returns what it logged.
    pub(crate) fn wait(mut self) -> (ExitStatus, Vec<String>) {
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        (status, std::mem::take(&mut self.log.lock().unwrap()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {} {}", self.head, String::from_utf8_lossy(&self.body)))
    }

    /// The body of an answer that must be 200.
    #[track_caller]
    pub(crate) fn success(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// The data of all events; the last must be `[DONE]` and is omitted.
    #[track_caller]
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{}", self.text());
        events(&self.text())
    }
}

/// The events of a stream in which each has a name, which its data repeats.
#[track_caller]
pub(crate) fn named_events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.header("content-type"), Some("text/event-stream"), "{}", answer.text());
    let text = answer.text();
    let events = text.split_terminator("\n\n").map(|event| {
        let lines: Vec<&str> = event.lines().collect();
        let [name, data] = lines[..] else { panic!("{event:?} is no event with a name") };
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{event}");
        data
    });
    events.collect()
}

/// The data of a stream that is complete.
#[track_caller]
pub(crate) fn events(text: &str) -> Vec<Value> {
    let data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let (last, chunks) = data.split_last().unwrap_or_else(|| panic!("no events in {text:?}"));
    assert_eq!(*last, "[DONE]");
    chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().skip(1).find_map(|line| {
        let (found, value) = line.split_once(": ")?;
        found.eq_ignore_ascii_case(name).then_some(value)
    })
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Answer {
    send(address, format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
}

pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    send(address, post_bytes(path, "", &body.to_string()))
}

/// The bytes of a JSON request with `connection: close`.
pub(crate) fn post_bytes(path: &str, headers: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
}

/// Sends bytes and reads until the server closes.
#[track_caller]
pub(crate) fn send(address: SocketAddr, bytes: impl AsRef<[u8]>) -> Answer {
    let mut stream = connect(address);
    // A server that has refused may close before it has read everything.
    let _ = stream.write_all(bytes.as_ref());
    read_answer(stream)
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Reads an answer to the end of the connection.
#[track_caller]
pub(crate) fn read_answer(mut stream: impl Read) -> Answer {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no head in {:?}", String::from_utf8_lossy(&bytes)));
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body = &bytes[end + 4..];
    let body = match header(&head, "transfer-encoding") {
        Some("chunked") => unchunk(body),
        _ => body.to_vec(),
    };
    Answer { status, head, body }
}

/// Joins chunks; a body that breaks off gives what there is.
fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let len = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        let data = &bytes[end + 2..];
        if len == 0 || data.len() < len + 2 {
            break;
        }
        body.extend_from_slice(&data[..len]);
        bytes = &data[len + 2..];
    }
    body
}

/// Reads until `wanted` was seen and returns everything so far.
#[track_caller]
pub(crate) fn read_until(stream: &mut TcpStream, wanted: &str) -> String {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4_096];
    while !String::from_utf8_lossy(&bytes).contains(wanted) {
        let num_bytes = stream.read(&mut buffer).unwrap();
        assert!(num_bytes > 0, "the connection ended after {:?}", String::from_utf8_lossy(&bytes));
        bytes.extend_from_slice(&buffer[..num_bytes]);
    }
    String::from_utf8(bytes).unwrap()
}
