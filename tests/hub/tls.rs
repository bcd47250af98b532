//! Whose certificates are trusted. `fixtures/tls` has an authority that no browser knows, and a server's
//! certificate by it for `localhost`, both until the year 2120; its key was thrown away.

use std::io::Write;
use std::sync::Arc;

use super::*;

const AUTHORITY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tls/authority.pem");

/// A server without a model, under the certificate of the fixture.
fn server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let certificate = include_bytes!("../fixtures/tls/server.der").to_vec().into();
    let key = include_bytes!("../fixtures/tls/server_key.der").to_vec().try_into().unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.unwrap().with_no_client_auth().with_single_cert(vec![certificate], key).unwrap();
    let config = Arc::new(config);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let connection = rustls::ServerConnection::new(config.clone()).unwrap();
            let mut stream = rustls::StreamOwned::new(connection, stream.unwrap());
            let mut head = [0; 4096];
            // A client that does not trust it hangs up.
            if stream.read(&mut head).is_ok_and(|num_bytes| num_bytes > 0) {
                let answer =
                    "HTTP/1.1 404 Not Found\r\nx-error-code: RepoNotFound\r\nContent-Length: 0\r\n\r\n";
                stream.write_all(answer.as_bytes()).unwrap();
            }
        }
    });
    endpoint
}

/// What a process says that has `authorities` as those of the system.
fn reported_with(test: &str, authorities: &str) -> String {
    let cache = TempDir::new().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env("FAKE_HUB", server()).env("FAKE_HUB_CACHE", cache.path());
    let output = command.env("SSL_CERT_FILE", authorities).env_remove("SSL_CERT_DIR").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_authority_of_the_system_is_trusted_besides_the_built_in_ones() {
    const TEST: &str = "tls::an_authority_of_the_system_is_trusted_besides_the_built_in_ones";
    if let Some(config) = child_config() {
        for _ in 0..2 {
            println!("{:?}", get("org/name", &config).unwrap_err());
        }
        return;
    }
    let output_text = reported_with(TEST, AUTHORITY);
    assert_eq!(output_text.matches("NotFound: there is no model `org/name`").count(), 2, "{output_text}");
    // Neither a system without authorities nor one with others replaces the built-in ones.
    for authorities in ["/nowhere", "/dev/null"] {
        let output_text = reported_with(TEST, authorities);
        assert_eq!(output_text.matches("UnknownIssuer").count(), 2, "{output_text}");
        assert!(
            output_text.contains("Unavailable: cannot reach `localhost:")
                && output_text.contains("SSL_CERT_FILE"),
            "{output_text}"
        );
    }
}
