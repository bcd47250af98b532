//! Web pages of other origins: who is let in, and that asking opens nothing.

use super::client::{Answer, Server, send};

const CHAT: &str = "/v1/chat/completions";

fn ask(server: &Server, method: &str, path: &str, headers: &str) -> Answer {
    send(
        server.address(),
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n"),
    )
}

fn question(server: &Server, origin: &str) -> Answer {
    let headers = format!(
        "origin: {origin}\r\naccess-control-request-method: POST\r\n\
         access-control-request-headers: authorization,content-type,x-stainless-lang\r\n"
    );
    ask(server, "OPTIONS", CHAT, &headers)
}

#[test]
fn no_other_origin_is_let_in_unless_it_is_named() {
    let server = Server::start("--api-key secret");
    let answer = question(&server, "https://a.example");
    assert_eq!(answer.status, 401);
    assert!(!answer.head.to_lowercase().contains("access-control"));
    let answer = ask(&server, "GET", "/health", "origin: https://a.example\r\n");
    assert_eq!(answer.status, 200);
    assert!(!answer.head.to_lowercase().contains("access-control"));
}

#[test]
fn named_origins_may_ask_and_still_need_the_key() {
    let server = Server::start(
        "--api-key secret --allowed-origins https://a.example --allowed-origins http://localhost:3000",
    );
    for origin in ["https://a.example", "http://localhost:3000"] {
        let answer = question(&server, origin);
        assert_eq!((answer.status, answer.body.len()), (204, 0));
        assert_eq!(answer.header("access-control-allow-origin"), Some(origin));
        assert_eq!(answer.header("access-control-allow-methods"), Some("GET, POST"));
        let allowed = answer.header("access-control-allow-headers").unwrap();
        assert!(allowed.contains("authorization") && allowed.contains("x-stainless-lang"));
        assert_eq!(answer.header("vary"), Some("origin"));
        // Who asks is not let in by that, and can read that a key is needed.
        let headers = format!("origin: {origin}\r\n");
        let answer = ask(&server, "GET", "/v1/models", &headers);
        assert_eq!(answer.status, 401);
        assert_eq!(answer.header("access-control-allow-origin"), Some(origin));
        let answer = ask(&server, "GET", "/v1/models", &format!("{headers}authorization: Bearer secret\r\n"));
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("access-control-expose-headers"), Some("x-request-id, retry-after"));
        // OPTIONS without the question of a browser is a request like others.
        assert_eq!(ask(&server, "OPTIONS", CHAT, &headers).status, 401);
    }
    for origin in [
        "https://b.example",
        "http://a.example",
        "https://a.example:444",
        "null",
        "https://a.example.evil.example",
    ] {
        let answer = question(&server, origin);
        assert_eq!(answer.status, 401, "{origin}");
        assert_eq!(answer.header("access-control-allow-origin"), None, "{origin}");
        assert_eq!(answer.header("vary"), Some("origin"));
    }
    // Without an origin nothing is said of origins.
    assert_eq!(server.get("/health").header("access-control-allow-origin"), None);
}
