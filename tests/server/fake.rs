//! A server that answers by a script, also badly.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A list of one model.
pub(crate) const MODELS: &str = r#"{"object":"list","data":[{"id":"fake","object":"model"}]}"#;

/// Answers every request on a connection of its own, then closes it. Ends with the test program.
pub(crate) fn start(answer: impl Fn(usize, &str, &mut TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answer = Arc::new(answer);
    let num_posts = Arc::new(AtomicUsize::new(0));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (answer, num_posts) = (Arc::clone(&answer), Arc::clone(&num_posts));
            std::thread::spawn(move || serve(&mut stream.unwrap(), &num_posts, &*answer));
        }
    });
    address
}

/// `answer` gets the number of the request to an endpoint that generates, its path, and where to write.
fn serve(stream: &mut TcpStream, num_posts: &AtomicUsize, answer: &dyn Fn(usize, &str, &mut TcpStream)) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    let mut path = String::new();
    let mut len = 0;
    while reader.read_line(&mut line).is_ok_and(|num_bytes| num_bytes > 0) && line != "\r\n" {
        if path.is_empty() {
            path = line.split(' ').nth(1).unwrap().to_owned();
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
            len = value.trim().parse().unwrap();
        }
        line.clear();
    }
    if path.is_empty() || reader.read_exact(&mut vec![0; len]).is_err() {
        return;
    }
    match path.as_str() {
        "/v1/models" => whole(stream, "200 OK", MODELS),
        "/v1/completions" | "/v1/chat/completions" => {
            answer(num_posts.fetch_add(1, Ordering::SeqCst), &path, stream);
        }
        _ => answer(usize::MAX, &path, stream),
    }
}

/// Writes a whole answer.
pub(crate) fn whole(stream: &mut TcpStream, status: &str, body: &str) {
    // A client that has gone is none of this test's concern.
    let _ = write!(
        stream,
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
}

/// Begins a stream.
pub(crate) fn begin_stream(stream: &mut TcpStream) {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let _ = stream.write_all(head.as_bytes());
}

/// Writes an event, as a chunk.
pub(crate) fn event(stream: &mut TcpStream, data: &str) {
    let _ = write!(stream, "{:x}\r\ndata: {data}\n\n\r\n", data.len() + 8);
}

/// Ends a stream.
pub(crate) fn end_stream(stream: &mut TcpStream) {
    event(stream, "[DONE]");
    let _ = stream.write_all(b"0\r\n\r\n");
}

/// A stream of two tokens, in which the server counts `num_tokens`.
pub(crate) fn good_stream(stream: &mut TcpStream, num_tokens: usize) {
    begin_stream(stream);
    event(stream, r#"{"choices":[{"index":0,"text":"one","finish_reason":null}]}"#);
    event(stream, r#"{"choices":[{"index":0,"text":" two","finish_reason":"length"}]}"#);
    event(
        stream,
        &format!(r#"{{"choices":[],"usage":{{"prompt_tokens":9,"completion_tokens":{num_tokens}}}}}"#),
    );
    end_stream(stream);
}
