//! The chat page as bytes: its headers, and that it reveals nothing. What it does is in `browser`.

use super::client::{Server, send};

#[test]
fn the_page_is_open_and_the_same_for_all_clients() {
    let server = Server::start("--api-key secret --served-model-name hidden-name");
    let answer = server.get("/");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("text/html; charset=utf-8"));
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-store"),
        ("cross-origin-opener-policy", "same-origin"),
    ] {
        assert_eq!(answer.header(name), Some(value), "{name}");
    }
    assert!(answer.header("x-request-id").is_some());
    let policy = answer.header("content-security-policy").unwrap();
    let directives: Vec<&str> = policy.split("; ").collect();
    for directive in [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ] {
        assert!(directives.contains(&directive), "{directive} is missing in {policy}");
    }
    assert!(!policy.contains("unsafe") && !policy.contains('*'));
    let nonce = policy.split("script-src 'nonce-").nth(1).unwrap().split('\'').next().unwrap();
    let text = answer.text();
    assert_eq!(text.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
    // It knows neither the model nor the key, and only the nonce differs from one time to the next.
    assert!(!text.contains("hidden-name") && !text.contains("secret"));
    let again = server.get("/");
    let other = again.header("content-security-policy").unwrap();
    assert_ne!(other, policy);
    let start = other.find("nonce-").unwrap() + 6;
    assert_eq!(again.text().replace(&other[start..start + nonce.len()], nonce), text);
    let request = |method: &str| {
        send(server.address(), format!("{method} / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
    };
    let head = request("HEAD");
    assert!(head.status == 200 && head.body.is_empty());
    assert_eq!((request("POST").status, request("POST").header("allow")), (405, Some("GET,HEAD")));
}
