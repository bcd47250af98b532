//! A process that may have few files open, and connections that are more than that.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Output};

use serde_json::{Value, json};

use super::client::{Server, TIMEOUT, connect, post_bytes, read_answer};

const COMPLETIONS: &str = "/v1/completions";

/// The program after these commands of a shell.
fn after_commands(commands: &str) -> Command {
    let mut command = Command::new("sh");
    let script = format!("{commands}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_tinyvllm")]);
    command
}

/// What comes of starting a server that cannot start.
fn failed_start(commands: &str) -> Output {
    let mut command = after_commands(commands);
    command.args(["serve", "--port", "0", "--threads", "1"]).output().unwrap()
}

fn number(info: &Value, name: &str) -> u64 {
    info[name].as_u64().unwrap_or_else(|| panic!("{name} in {info}"))
}

/// A connection from another address of this machine than others come from, where there is one.
fn connect_from_elsewhere(to: SocketAddr) -> TcpStream {
    if !cfg!(target_os = "linux") {
        return connect(to);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((Ipv4Addr::new(127, 0, 0, 99), 0).into()).unwrap();
        socket.connect(to).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

#[test]
fn connections_fit_the_open_files_and_others_are_answered_from_the_reserve() {
    let server = Server::start_command(after_commands("ulimit -n 64"), "", |_| ());
    let log = server.log();
    assert!(
        log.iter().any(|line| line.starts_with("note: ") && line.contains("64 open files (ulimit -n)")),
        "{log:?}"
    );
    let info = server.get("/server_info").success();
    let most = number(&info, "max_connections");
    assert_eq!(number(&info, "max_open_files"), 64);
    assert!((8..48).contains(&most), "{info}");
    assert!((2..=most / 2).contains(&number(&info, "max_connections_per_address")), "{info}");
    // More than there are files. The first ones are served, and the last ones are closed.
    let mut crowd: Vec<TcpStream> = (0..200).map(|_| connect(server.address())).collect();
    let request = post_bytes(COMPLETIONS, "", &json!({"prompt": "Once", "max_tokens": 3}).to_string());
    crowd[0].write_all(request.as_bytes()).unwrap();
    assert_eq!(read_answer(crowd.remove(0)).status, 200, "an accepted client is served");
    for (path, wanted) in
        [("/health", 200), ("/v1/models", if cfg!(target_os = "linux") { 200 } else { 503 })]
    {
        let mut other = connect_from_elsewhere(server.address());
        write!(other, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
        assert_eq!(read_answer(other).status, wanted, "{path}");
    }
    drop(crowd);
    let start = std::time::Instant::now();
    while server.get("/v1/models").status != 200 {
        assert!(start.elapsed() < TIMEOUT, "connections are free when others have disconnected");
    }
    assert!(
        !server.log().iter().any(|line| line.contains("connections cannot be accepted")),
        "{:?}",
        server.log()
    );
}

#[test]
fn what_the_system_allows_is_taken() {
    let hard = Command::new("sh").args(["-c", "ulimit -Hn"]).output().unwrap();
    let hard = String::from_utf8(hard.stdout).unwrap().trim().parse::<u64>().unwrap_or(u64::MAX);
    let server = Server::start_command(after_commands("ulimit -Sn 64"), "", |_| ());
    let info = server.get("/server_info").success();
    if hard >= 5_000 {
        let wanted = [("max_connections", 4_096), ("max_connections_per_address", 1_024)];
        wanted.iter().for_each(|(name, most)| assert_eq!(number(&info, name), *most));
        assert!(!server.log().iter().any(|line| line.contains("ulimit")), "{:?}", server.log());
    }
    assert!(number(&info, "max_open_files") >= hard.min(4_096 + 64), "{info}");
}

#[test]
fn too_little_to_start_with_is_an_error_that_names_the_limit() {
    let check = |commands: &str, words: &[&str]| {
        let Output { status, stderr, .. } = failed_start(commands);
        let text = String::from_utf8_lossy(&stderr);
        assert_eq!(status.code(), Some(1), "{commands}: {text}");
        words.iter().for_each(|word| assert!(text.contains(word), "{commands}: {text} should say {word}"));
    };
    for limit in [8, 12, 20] {
        check(
            &format!("ulimit -n {limit}"),
            &[&format!("may have {limit} open files"), "ulimit -n", "hint: "],
        );
    }
    if cfg!(all(target_os = "linux", target_env = "gnu")) {
        // Threads share a heap where addresses are few, so these are enough.
        let server = Server::start_command(after_commands("ulimit -v 500000"), "", |_| ());
        let body = json!({"prompt": "Once", "max_tokens": 3, "guided_regex": "[a-z ]+"});
        server.post(COMPLETIONS, &body).success();
        for mebibytes in [60, 100, 200] {
            let limit = format!("{mebibytes} MiB of address space (ulimit -v)");
            check(&format!("ulimit -v {}", mebibytes * 1_024), &[&limit, "hint: "]);
        }
    }
}
