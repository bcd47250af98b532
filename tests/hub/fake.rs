//! A Hub and its storage host on two local ports, with faults on request.
//!
//! It answers as the real one does: repository information as JSON, small files through a redirect on
//! the same host, large ones through a redirect to the storage host, ETag and commit headers on the
//! answers of the Hub only, ranges on data. The line to the storage host may be slow.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    Hub,
    Storage,
}

#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) host: Host,
    pub(crate) method: String,
    pub(crate) path: String,
    /// Names in lower case.
    pub(crate) headers: BTreeMap<String, String>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// The requested bytes.
    pub(crate) fn range(&self) -> Option<Range<usize>> {
        let (start, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some(start.parse().ok()?..last.parse::<usize>().ok()? + 1)
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// Send only this many bytes of the body and then …
    pub(crate) stop_after: Option<usize>,
    /// … say nothing for the rest of the test (`true`) or close the connection.
    pub(crate) stall: bool,
}

impl Response {
    pub(crate) fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub(crate) fn refusal(status: u16, code: &str, message: &str) -> Self {
        let mut response = Self::status(status);
        for (name, value) in [("x-error-code", code), ("x-error-message", message)] {
            if !value.is_empty() {
                response.headers.push((name, value.to_owned()));
            }
        }
        response
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }
}

/// Looks at a request and the answer that is about to be sent, and may change the answer.
type Fault = Box<dyn FnMut(&Request, &mut Response) + Send>;

#[derive(Default)]
struct State {
    repo: String,
    /// Revision to commit.
    revisions: BTreeMap<String, String>,
    files: BTreeMap<String, Vec<u8>>,
    requests: Vec<Request>,
    fault: Option<Fault>,
    line: Line,
    traffic: Traffic,
}

/// What lies between the storage host and the client.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Line {
    /// Before each answer.
    pub(crate) latency: Duration,
    /// On each connection; 0 is no limit.
    pub(crate) bytes_per_second: usize,
}

/// What the storage host has sent.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Traffic {
    pub(crate) num_bytes: usize,
    num_open: usize,
    /// Most answers that were on their way at once.
    pub(crate) most_open: usize,
}

pub(crate) struct FakeHub {
    hub: SocketAddr,
    storage: SocketAddr,
    state: Arc<Mutex<State>>,
    stopped: Arc<AtomicBool>,
}

impl FakeHub {
    pub(crate) fn new(repo: &str, files: &[(&str, &[u8])]) -> Self {
        let state = State {
            repo: repo.to_owned(),
            revisions: BTreeMap::from([
                ("main".to_owned(), COMMIT.to_owned()),
                (COMMIT.to_owned(), COMMIT.to_owned()),
            ]),
            files: files.iter().map(|(name, data)| ((*name).to_owned(), data.to_vec())).collect(),
            ..State::default()
        };
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let storage = TcpListener::bind("127.0.0.1:0").unwrap();
        let fake = Self {
            hub: hub.local_addr().unwrap(),
            storage: storage.local_addr().unwrap(),
            state: Arc::new(Mutex::new(state)),
            stopped: Arc::default(),
        };
        fake.listen(hub, Host::Hub);
        fake.listen(storage, Host::Storage);
        fake
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.hub)
    }

    pub(crate) fn add_revision(&self, revision: &str, commit: &str) {
        let mut state = self.state.lock().unwrap();
        for name in [revision, commit] {
            state.revisions.insert(name.to_owned(), commit.to_owned());
        }
    }

    pub(crate) fn set_fault(&self, fault: impl FnMut(&Request, &mut Response) + Send + 'static) {
        self.state.lock().unwrap().fault = Some(Box::new(fault));
    }

    pub(crate) fn clear_fault(&self) {
        self.state.lock().unwrap().fault = None;
    }

    pub(crate) fn set_line(&self, line: Line) {
        self.state.lock().unwrap().line = line;
    }

    /// What was sent since the last call, when all of it is: a client may have read its last bytes before they count.
    pub(crate) fn take_traffic(&self) -> Traffic {
        let since = Instant::now();
        loop {
            let traffic = &mut self.state.lock().unwrap().traffic;
            if traffic.num_open == 0 {
                return std::mem::take(traffic);
            }
            assert!(since.elapsed() < Duration::from_secs(60), "answers are still on their way: {traffic:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The requests since the last call.
    pub(crate) fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    fn listen(&self, listener: TcpListener, host: Host) {
        let (state, stopped, storage) = (self.state.clone(), self.stopped.clone(), self.storage);
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let (state, stopped) = (state.clone(), stopped.clone());
                // A client that hangs up early is part of the tests.
                thread::spawn(move || {
                    stream.and_then(|stream| serve(stream, host, storage, &state, &stopped))
                });
            }
        });
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        for address in [self.hub, self.storage] {
            let _ = TcpStream::connect(address);
        }
    }
}

/// What the Hub calls the content of a large file.
pub(crate) fn etag(data: &[u8]) -> String {
    hex(ring::digest::digest(&ring::digest::SHA256, data).as_ref())
}

/// What the Hub calls the content of the file `name`: small ones have the name that Git has for them.
pub(crate) fn etag_of(name: &str, data: &[u8]) -> String {
    if !is_small(name) {
        return etag(data);
    }
    let mut blob = format!("blob {}\0", data.len()).into_bytes();
    blob.extend_from_slice(data);
    hex(ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_small(name: &str) -> bool {
    name.ends_with(".json") || name.ends_with(".jinja")
}

fn serve(
    mut stream: TcpStream,
    host: Host,
    storage: SocketAddr,
    state: &Mutex<State>,
    stopped: &AtomicBool,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut words = first.split(' ');
    let mut request = Request {
        host,
        method: words.next().unwrap_or_default().to_owned(),
        path: words.next().unwrap_or_default().to_owned(),
        headers: BTreeMap::new(),
    };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(':') else { break };
        request.headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let (response, line) = {
        let mut state = state.lock().unwrap();
        let mut response = answer(&request, storage, &state);
        if let Some(fault) = &mut state.fault {
            fault(&request, &mut response);
        }
        state.requests.push(request.clone());
        (response, if host == Host::Storage { state.line } else { Line::default() })
    };
    thread::sleep(line.latency);
    if response.status == 0 {
        return wait_for_end(stopped);
    }
    let mut head = format!("HTTP/1.1 {} Whatever\r\nConnection: close\r\n", response.status);
    for (name, value) in &response.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("Content-Length: {}\r\n\r\n", response.body.len()));
    if request.method == "HEAD" {
        return stream.write_all(head.as_bytes());
    }
    let count = |change: &dyn Fn(&mut Traffic)| {
        if host == Host::Storage {
            change(&mut state.lock().unwrap().traffic);
        }
    };
    count(&|traffic| {
        traffic.num_open += 1;
        traffic.most_open = traffic.most_open.max(traffic.num_open);
    });
    let end = response.stop_after.map_or(response.body.len(), |end| end.min(response.body.len()));
    let sent = stream.write_all(head.as_bytes()).and_then(|()| {
        send(&mut stream, &response.body[..end], line, &|num_bytes| {
            count(&|traffic| traffic.num_bytes += num_bytes);
        })
    });
    count(&|traffic| traffic.num_open -= 1);
    sent?;
    if response.stall { wait_for_end(stopped) } else { Ok(()) }
}

fn send(stream: &mut TcpStream, body: &[u8], line: Line, count: &dyn Fn(usize)) -> std::io::Result<()> {
    const CHUNK: usize = 16 << 10;
    for chunk in body.chunks(CHUNK) {
        stream.write_all(chunk)?;
        count(chunk.len());
        if line.bytes_per_second > 0 {
            thread::sleep(Duration::from_secs_f64(chunk.len() as f64 / line.bytes_per_second as f64));
        }
    }
    Ok(())
}

fn wait_for_end(stopped: &AtomicBool) -> std::io::Result<()> {
    while !stopped.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn answer(request: &Request, storage: SocketAddr, state: &State) -> Response {
    let repo = &state.repo;
    if request.host == Host::Storage {
        return match request.path.strip_prefix("/data/").and_then(|path| path.split('?').next()) {
            Some(file) => data(request, &state.files[file]),
            None => Response::status(404),
        };
    }
    if let Some(revision) = request.path.strip_prefix(&format!("/api/models/{repo}/revision/")) {
        return match state.revisions.get(&revision.replace("%2F", "/")) {
            Some(commit) => {
                let siblings: Vec<_> =
                    state.files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
                let info = serde_json::json!({ "id": repo, "sha": commit, "siblings": siblings });
                Response::status(200).body(info.to_string())
            }
            None => Response::refusal(404, "RevisionNotFound", "Invalid rev id"),
        };
    }
    let Some(path) = request.path.strip_prefix(&format!("/{repo}/resolve/")) else {
        return match request.path.strip_prefix("/api/resolve-cache/") {
            Some(file) => {
                let contents = &state.files[file];
                data(request, contents).with("etag", format!("\"{}\"", etag_of(file, contents)))
            }
            None => Response::refusal(404, "RepoNotFound", "Repository not found"),
        };
    };
    let (commit, file) = path.split_once('/').unwrap_or((path, ""));
    let Some(contents) = state.files.get(file) else {
        return Response::refusal(404, "EntryNotFound", "Entry not found");
    };
    if is_small(file) {
        Response::status(307)
            .with("location", format!("/api/resolve-cache/{file}"))
            .with("x-repo-commit", commit)
    } else {
        Response::status(302)
            .with("location", format!("http://{storage}/data/{file}?signature=s3cret"))
            .with("x-repo-commit", commit)
            .with("etag", "\"of-the-pointer-file\"")
            .with("x-linked-etag", format!("\"{}\"", etag(contents)))
            .with("x-linked-size", contents.len().to_string())
    }
}

fn data(request: &Request, contents: &[u8]) -> Response {
    match request.range() {
        None => Response::status(200).body(contents),
        Some(Range { start, end }) if start < contents.len() => {
            let end = end.min(contents.len());
            Response::status(206)
                .with("content-range", format!("bytes {start}-{}/{}", end - 1, contents.len()))
                .body(&contents[start..end])
        }
        Some(_) => Response::status(416).with("content-range", format!("bytes */{}", contents.len())),
    }
}
