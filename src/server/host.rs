//! Protects a server without keys from web pages.
//!
//! A page can make its own host name resolve to this machine and then send requests as if the server were its
//! own (DNS rebinding). The browser sees one origin and sends no preflight request. The name is still in the
//! header `Host`. So a server without keys that only this machine can reach answers only to names that no
//! page on the Internet can have. With keys, a page would have to know one. A server on a network has names
//! that it does not know.

use std::net::IpAddr;

use axum::http::HeaderMap;
use axum::http::header::HOST;

use super::cors::Origin;

/// Suffixes of names that resolve only within a network (RFC 6761, RFC 6762, RFC 8375, and ICANN's for
/// private use, with which containers name their host).
const PRIVATE: [&str; 4] = [".localhost", ".local", ".home.arpa", ".internal"];

/// Whether the request was sent to a private name, to an address, or to a host whose pages are allowed. A
/// request without the header `Host` was not sent by a browser.
pub(super) fn is_own(headers: &HeaderMap, own_name: &str, allowed: &[Origin]) -> bool {
    let Some(host) = headers.get(HOST) else { return true };
    let Ok(host) = host.to_str() else { return false };
    if allowed.iter().any(|origin| origin.has_host(host)) {
        return true;
    }
    let name = without_port(host);
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    // Names without a dot belong to this machine or its network.
    let is_private = !name.is_empty() && !name.contains('.') || PRIVATE.iter().any(|end| name.ends_with(end));
    address.parse::<IpAddr>().is_ok()
        || is_private && !name.contains([':', '[', ']'])
        || name == own_name.to_ascii_lowercase()
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // In an IPv6 address without brackets, the last colon does not begin a port.
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && is_closed(name) => name,
        _ => host,
    }
}

fn is_closed(name: &str) -> bool {
    !name.contains(':') || name.ends_with(']')
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn private_names_and_addresses_are_its_own() {
        let allowed = ["https://chat.example".parse().unwrap(), "http://lan.example:3000".parse().unwrap()];
        let check = |hosts: &[&str], expected: bool| {
            for host in hosts {
                let headers = HeaderMap::from_iter([(HOST, HeaderValue::from_str(host).unwrap())]);
                assert_eq!(is_own(&headers, "My.Server.example", &allowed), expected, "{host:?}");
            }
        };
        check(&["localhost", "localhost:8000", "LOCALHOST", "localhost.:80", "a.localhost:8000"], true);
        check(&["workbench:1", "workbench.local", "host.docker.internal:8000", "my.server.example"], true);
        check(&["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "::1", "192.168.1.2:80"], true);
        check(&["chat.example", "lan.example:3000"], true);
        check(&["", ":80", "evil.example", "evil.example:8000", "localhost.evil.example"], false);
        check(
            &["127.0.0.1.evil.example", "lan.example", "chat.example:8000", "evil.internal.example"],
            false,
        );
        check(&["1.2.3", "[evil]:80", "a:b:c"], false);
        assert!(is_own(&HeaderMap::new(), "x", &[]));
        let any = ["*".parse().unwrap()];
        assert!(is_own(&HeaderMap::from_iter([(HOST, HeaderValue::from_static("a.example"))]), "y", &any));
    }
}
