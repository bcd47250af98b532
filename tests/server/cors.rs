//! Web pages of other origins: which are allowed, and that a preflight grants nothing.

use super::client::{Answer, Server, send};

const CHAT: &str = "/v1/chat/completions";

fn ask(server: &Server, method: &str, path: &str, headers: &str) -> Answer {
    send(
        server.address(),
        format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"),
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
        assert_eq!(answer.header("access-control-allow-methods"), Some("DELETE, GET, POST"));
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
        assert_eq!(
            answer.header("access-control-expose-headers"),
            Some("x-request-id, x-ignored-fields, x-dropped-bytes, retry-after")
        );
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
    // Without an origin there are no CORS headers.
    assert_eq!(server.get("/health").header("access-control-allow-origin"), None);
}

/// A page whose name leads to this machine is, to a browser, a page of this server.
#[test]
fn without_keys_no_name_that_a_page_could_have_is_answered() {
    let ask = |server: &Server, path: &str, host: &str, more: &str| {
        let head = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{more}\r\n");
        send(server.address(), head)
    };
    let server = Server::start("--allowed-origins http://chat.example:3000");
    for host in ["localhost", "127.0.0.1:8000", "[::1]:8000", "chat.example:3000"] {
        assert_eq!(ask(&server, "/v1/models", host, "").status, 200, "{host}");
    }
    for host in ["evil.example", "evil.example:8000", "localhost.evil.example"] {
        let answer = ask(&server, "/v1/models", host, "");
        assert_eq!(answer.status, 403, "{host}");
        assert_eq!(answer.json()["error"]["code"], "foreign_host");
    }
    assert_eq!(ask(&server, "/health", "evil.example", "").status, 200);
    // A page does not know the key.
    let server = Server::start("--api-key secret");
    assert_eq!(ask(&server, "/v1/models", "evil.example", "authorization: Bearer secret\r\n").status, 200);
    assert_eq!(ask(&server, "/v1/models", "evil.example", "").status, 401);
}
