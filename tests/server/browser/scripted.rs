//! A server that serves our page and answers by a script.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::super::client::Server;
use super::Page;

/// How a request is answered.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    /// A stream of these deltas, and its end.
    Deltas(Vec<Value>),
    /// The first deltas; the others at the test's command.
    Held(Vec<Value>, Vec<Value>),
    /// These bytes as a stream, and then the connection closes.
    Bytes(String),
    /// A status with headers and a JSON body.
    Status(u16, &'static str, Value),
}

/// A page that is ready, with a server that gives each of these answers, in order. None without a browser.
pub(super) fn start(answers: &[&str]) -> Option<(Page, Scripted)> {
    let page = Page::start()?;
    let server = Scripted::start("m");
    server.will(answers.iter().map(|answer| Reply::text(answer, 3)));
    page.open(&server.url());
    page.until_ready();
    Some((page, server))
}

impl Reply {
    /// An answer that comes in chunks of this many characters.
    pub(super) fn text(text: &str, size: usize) -> Self {
        let characters: Vec<char> = text.chars().collect();
        let chunks =
            characters.chunks(size).map(|chunk| json!({"content": chunk.iter().collect::<String>()}));
        Self::Deltas(chunks.collect())
    }

    /// What is sent at once, and what at the test's command.
    fn bytes(self) -> (String, Option<String>) {
        let chunks = |deltas: Vec<Value>| -> String {
            let chunk =
                |delta: Value| json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
            deltas.into_iter().map(|delta| format!("data: {}\n\n", chunk(delta))).collect()
        };
        let stream = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        match self {
            Self::Deltas(deltas) => (format!("{stream}{}{DONE}", chunks(deltas)), None),
            Self::Held(first, rest) => (format!("{stream}{}", chunks(first)), Some(chunks(rest) + DONE)),
            Self::Bytes(body) => (format!("{stream}{body}"), None),
            Self::Status(status, headers, body) => {
                let head = "content-type: application/json\r\nconnection: close";
                (format!("HTTP/1.1 {status} X\r\n{head}\r\n{headers}\r\n{body}"), None)
            }
        }
    }
}

const DONE: &str = "data: [DONE]\n\n";

/// What the server knows.
struct State {
    /// The answer to `GET /`, as the real server gave it.
    page: Vec<u8>,
    model: String,
    health: VecDeque<Reply>,
    replies: VecDeque<Reply>,
    /// Answers to requests for tokens.
    counts: VecDeque<Reply>,
    /// Names that the model gives to conversations. Without any it says nothing.
    names: VecDeque<String>,
    /// What is held back may go on.
    is_released: bool,
}

/// The server. It ends with the test's process.
pub(super) struct Scripted {
    pub(super) address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Scripted {
    pub(super) fn start(model: &str) -> Self {
        let answer = Server::start("").get("/");
        assert_eq!(answer.status, 200);
        let kept = answer.head.lines().filter(|line| !line.to_lowercase().starts_with("transfer-encoding"));
        let head: Vec<&str> = kept.collect();
        let page = [head.join("\r\n").into_bytes(), b"\r\n\r\n".to_vec(), answer.body].concat();
        let state = State {
            page,
            model: model.to_owned(),
            health: VecDeque::new(),
            replies: VecDeque::new(),
            counts: VecDeque::new(),
            names: VecDeque::new(),
            is_released: false,
        };
        let state = Arc::new(Mutex::new(state));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &state));
            }
        });
        Self { address, state }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// Answers the next requests for an answer so.
    pub(super) fn will(&self, replies: impl IntoIterator<Item = Reply>) {
        self.state.lock().unwrap().replies.extend(replies);
    }

    /// Answers the next requests for tokens so. Else there are 7.
    pub(super) fn will_count(&self, replies: impl IntoIterator<Item = Reply>) {
        self.state.lock().unwrap().counts.extend(replies);
    }

    /// Gives this name to the next conversation.
    pub(super) fn will_name(&self, name: &str) {
        self.state.lock().unwrap().names.push_back(name.to_owned());
    }

    /// Sends what was held back, and holds nothing back from now on.
    pub(super) fn release(&self) {
        self.state.lock().unwrap().is_released = true;
    }

    /// Answers the next requests for `/health` so.
    pub(super) fn will_be(&self, replies: impl IntoIterator<Item = Reply>) {
        self.state.lock().unwrap().health.extend(replies);
    }
}

fn serve(mut stream: TcpStream, state: &Mutex<State>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut head = String::new();
    // A browser opens connections that it does not use.
    while reader.read_line(&mut head).is_ok_and(|num_bytes| num_bytes > 2) {}
    let length =
        head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    if reader.read_exact(&mut body).is_err() {
        return;
    }
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    let reply = {
        let mut state = state.lock().unwrap();
        let good = |value: Value| Some(Reply::Status(200, "", value));
        match head.split(' ').nth(1) {
            Some("/") => {
                // The browser may have left.
                let _ = stream.write_all(&state.page);
                return;
            }
            Some("/health") => state.health.pop_front().or_else(|| good(json!({"status": "ok"}))),
            Some("/v1/models") => good(json!({"data": [{"id": state.model, "max_model_len": 4_096}]})),
            Some("/model_info") => {
                good(json!({"preferred_sampling_params": {"temperature": 0.7, "top_k": 0}}))
            }
            Some("/tokenize") => {
                state.counts.pop_front().or_else(|| good(json!({"count": 7, "max_model_len": 4_096})))
            }
            Some("/v1/chat/completions") if asked["stream"] == true => state.replies.pop_front(),
            Some("/v1/chat/completions") => {
                let content = state.names.pop_front().unwrap_or_default();
                good(json!({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}))
            }
            _ => None,
        }
    };
    let Some((first, rest)) = reply.map(Reply::bytes) else { return };
    // The browser may have left.
    let _ = stream.write_all(first.as_bytes());
    let Some(rest) = rest else { return };
    while !state.lock().unwrap().is_released {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let _ = stream.write_all(rest.as_bytes());
}
