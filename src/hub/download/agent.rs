//! Sends single requests: timeouts, proxy, and whose certificates are trusted.
//!
//! The program includes the certificate authorities that browsers trust, so it works on a system that has none. If a
//! company's proxy decrypts traffic, only the system knows its authority: a host that fails with the built-in ones is
//! tried again with the system's.

use std::sync::atomic::{AtomicBool, Ordering};

use ureq::http::Response;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::hub::config::HubConfig;

/// Two agents that differ in whom they trust.
#[derive(Debug)]
pub(super) struct Agents {
    built_in: Agent,
    system: Agent,
    /// Whether the system trusted a host that the built-in authorities did not, so that it is tried first from then on.
    prefers_system: AtomicBool,
}

impl Agents {
    pub(super) fn new(config: &HubConfig) -> Self {
        Self {
            built_in: agent(config, RootCerts::WebPki),
            system: agent(config, RootCerts::PlatformVerifier),
            prefers_system: AtomicBool::new(false),
        }
    }

    /// Sends the request that `call` makes with an agent.
    pub(super) fn send(
        &self,
        call: impl Fn(&Agent) -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>, ureq::Error> {
        let prefers_system = self.prefers_system.load(Ordering::Relaxed);
        let (first, second) =
            if prefers_system { (&self.system, &self.built_in) } else { (&self.built_in, &self.system) };
        match call(first) {
            Err(error) if is_untrusted(&error) => match call(second) {
                // Neither trusts it: the first error is reported.
                Err(second) if is_tls(&second) => Err(error),
                answer => {
                    self.prefers_system.store(!prefers_system, Ordering::Relaxed);
                    answer
                }
            },
            answer => answer,
        }
    }
}

/// Whether the server showed a certificate that is not trusted.
pub(super) fn is_untrusted(error: &ureq::Error) -> bool {
    matches!(tls_error(error), Some(rustls::Error::InvalidCertificate(_)))
}

/// Whether a secure connection failed, also because the system has no authorities.
fn is_tls(error: &ureq::Error) -> bool {
    tls_error(error).is_some()
}

fn tls_error(error: &ureq::Error) -> Option<&rustls::Error> {
    match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref()?.downcast_ref(),
        _ => None,
    }
}

fn agent(config: &HubConfig, roots: RootCerts) -> Agent {
    let mut agent = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(concat!("tinyvllm/", env!("CARGO_PKG_VERSION")))
        .max_idle_connections_per_host(config.max_connections)
        .max_idle_connections(2 * config.max_connections)
        .timeout_resolve(Some(config.connect_timeout))
        .timeout_connect(Some(config.connect_timeout))
        .timeout_send_request(Some(config.read_timeout))
        .timeout_recv_response(Some(config.read_timeout))
        .timeout_per_read(Some(config.read_timeout))
        .tls_config(TlsConfig::builder().root_certs(roots).build());
    if !config.proxy_from_env {
        agent = agent.proxy(None);
    }
    agent.build().new_agent()
}
