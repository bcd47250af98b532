//! Protection of a server without keys from web pages.
//!
//! A page may let its own name lead to this machine and then asks as if the server were its own (DNS
//! rebinding): the browser sees one origin and sends no question before. The name stays in the header `Host`.
//! So a server that only this machine can reach, and that has no keys, answers only to names of this machine.
//! With keys, a page would have to know one; and whoever listens to a network has names that are not known here.

use std::net::IpAddr;

use axum::http::HeaderMap;
use axum::http::header::HOST;

use super::cors::Origin;

/// Whether the request was sent to a name of this machine, to an address, or to a host whose pages are let in.
/// What has no such header was not sent by a browser.
pub(super) fn is_own(headers: &HeaderMap, own_name: &str, allowed: &[Origin]) -> bool {
    let Some(host) = headers.get(HOST) else { return true };
    let Ok(host) = host.to_str() else { return false };
    if allowed.iter().any(|origin| origin.has_host(host)) {
        return true;
    }
    let name = without_port(host);
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    name == "localhost"
        || name.ends_with(".localhost")
        || name == own_name.to_ascii_lowercase()
        || address.parse::<IpAddr>().is_ok()
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // In an address of many colons, the last one is no port unless brackets say so.
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
    fn names_of_this_machine_and_addresses_are_its_own() {
        let allowed = ["https://chat.example".parse().unwrap(), "http://lan.example:3000".parse().unwrap()];
        let check = |host: &str, expected: bool| {
            let headers = HeaderMap::from_iter([(HOST, HeaderValue::from_str(host).unwrap())]);
            assert_eq!(is_own(&headers, "Workbench", &allowed), expected, "{host:?}");
        };
        for host in
            ["localhost", "localhost:8000", "LOCALHOST", "localhost.:80", "a.localhost:8000", "workbench:1"]
        {
            check(host, true);
        }
        for host in ["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "::1", "192.168.1.2:80", "chat.example"] {
            check(host, true);
        }
        check("lan.example:3000", true);
        for host in
            ["", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
        {
            check(host, false);
        }
        for host in ["lan.example", "chat.example:8000", "xlocalhost", "1.2.3", "[evil]:80", "a:b:c"] {
            check(host, false);
        }
        assert!(is_own(&HeaderMap::new(), "x", &[]));
        let any = ["*".parse().unwrap()];
        assert!(is_own(&HeaderMap::from_iter([(HOST, HeaderValue::from_static("x"))]), "y", &any));
    }
}
