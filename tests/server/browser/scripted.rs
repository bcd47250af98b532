//! A server that serves our page and answers what a test wants.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::super::client::Server;

/// How a request is answered.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    /// A stream of these deltas, and its end.
    Deltas(Vec<Value>),
    /// These bytes as a stream, and then the connection closes.
    Bytes(String),
    /// A status with headers and a JSON body.
    Status(u16, &'static str, Value),
}

impl Reply {
    /// An answer that comes in pieces of so many characters.
    pub(super) fn text(text: &str, size: usize) -> Self {
        let characters: Vec<char> = text.chars().collect();
        let pieces =
            characters.chunks(size).map(|piece| json!({"content": piece.iter().collect::<String>()}));
        Self::Deltas(pieces.collect())
    }

    fn bytes(self) -> String {
        let stream = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        match self {
            Self::Deltas(deltas) => {
                let mut text = stream.to_owned();
                for delta in deltas {
                    let chunk = json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
                    text.push_str(&format!("data: {chunk}\n\n"));
                }
                text + "data: [DONE]\n\n"
            }
            Self::Bytes(body) => format!("{stream}{body}"),
            Self::Status(status, headers, body) => {
                format!(
                    "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\n{headers}\r\n{body}"
                )
            }
        }
    }
}

/// What the server knows.
struct State {
    /// The answer to `GET /`, as the real server gave it.
    page: Vec<u8>,
    model: String,
    health: VecDeque<Reply>,
    replies: VecDeque<Reply>,
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
        let state =
            State { page, model: model.to_owned(), health: VecDeque::new(), replies: VecDeque::new() };
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
    let bytes = {
        let mut state = state.lock().unwrap();
        match head.split(' ').nth(1) {
            Some("/") => state.page.clone(),
            Some("/health") => {
                let reply = state.health.pop_front();
                reply.unwrap_or(Reply::Status(200, "", json!({"status": "ok"}))).bytes().into_bytes()
            }
            Some("/v1/models") => {
                let card = json!({"id": state.model, "max_model_len": 4_096});
                Reply::Status(200, "", json!({"data": [card]})).bytes().into_bytes()
            }
            Some("/v1/chat/completions") => match state.replies.pop_front() {
                Some(reply) => reply.bytes().into_bytes(),
                None => return,
            },
            _ => return,
        }
    };
    // The browser may have left.
    let _ = stream.write_all(&bytes);
}
