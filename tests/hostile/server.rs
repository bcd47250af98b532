//! The server as users start it: a process of its own, with the built-in model and two keys.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

/// Keys of the one that sends much and of the one that sends little.
pub(crate) const HOG: &str = "hog";
pub(crate) const LIGHT: &str = "light";

/// A request that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) struct Server {
    child: Child,
    address: String,
    _keys: NamedTempFile,
}

impl Server {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut keys = NamedTempFile::new().unwrap();
        writeln!(keys, "{HOG}\n{LIGHT}").unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_tinyvllm"))
            .args(["serve", "--model", "demo", "--port", "0", "--api-key-file"])
            .arg(keys.path())
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| Some(line.split_once("ready: http://")?.1.split('/').next()?.to_owned()))
            .expect("the server does not start");
        // Its log would stop it if it were not read.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address, _keys: keys }
    }

    /// Sends bytes and reads what comes until the other side closes; returns the status, 0 without one, and the text.
    pub(crate) fn send(&self, request: &[u8]) -> (u16, String) {
        self.send_until(request, &AtomicBool::new(false))
    }

    /// The same, and goes away when that is set.
    pub(crate) fn send_until(&self, request: &[u8], is_over: &AtomicBool) -> (u16, String) {
        let mut answer = Vec::new();
        // A connection that is closed early has said what it has to say.
        let _ = self.exchange(request, is_over, &mut answer);
        let text = String::from_utf8_lossy(&answer).into_owned();
        let status = text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        (status, text)
    }

    fn exchange(&self, request: &[u8], is_over: &AtomicBool, answer: &mut Vec<u8>) -> std::io::Result<()> {
        let start = Instant::now();
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(Duration::from_millis(100)))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        // One that refuses a body may close before all of it was sent.
        let _ = stream.write_all(request);
        let mut buffer = [0; 1 << 16];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(num_bytes) => answer.extend_from_slice(&buffer[..num_bytes]),
                Err(error) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(error);
                }
                Err(_) if is_over.load(Ordering::Relaxed) => return Ok(()),
                Err(_) => assert!(start.elapsed() < TIMEOUT, "no answer"),
            }
        }
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let head = format!(
            "GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {LIGHT}\r\nConnection: close\r\n\r\n"
        );
        self.send(head.as_bytes())
    }

    /// Seconds that a completion of this many tokens takes, which must come.
    pub(crate) fn complete(&self, num_tokens: usize) -> f64 {
        let start = Instant::now();
        let body = format!(
            r#"{{"prompt":"Once upon a time","max_tokens":{num_tokens},"ignore_eos":true,"seed":5}}"#
        );
        let (status, text) = self.send(&post("/v1/completions", LIGHT, "", body.as_bytes()));
        assert_eq!(status, 200, "{text}");
        start.elapsed().as_secs_f64()
    }

    /// The same text as ever, or it is broken.
    pub(crate) fn text(&self) -> String {
        let body = br#"{"prompt":"Once upon","max_tokens":12,"temperature":0}"#;
        let (status, text) = self.send(&post("/v1/completions", LIGHT, "", body));
        assert_eq!(status, 200, "{text}");
        text.split(r#""text":""#).nth(1).unwrap().split(r#"","#).next().unwrap().to_owned()
    }

    /// A number of `/metrics`.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics");
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split(' ').next_back().unwrap().parse().unwrap()
    }

    /// Megabytes that it has in memory, and the most that it had.
    pub(crate) fn memory(&self) -> Option<(u64, u64)> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let read = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        };
        Some((read("VmRSS:")? >> 10, read("VmHWM:")? >> 10))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A POST of JSON with this key and further header lines, each of which ends its line.
pub(crate) fn post(path: &str, key: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut request = format!(
        "POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Authorization: Bearer {key}\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(body);
    request
}
