//! `--kv-events-config`: vLLM's JSON.

use std::net::IpAddr;
use std::str::FromStr;

use serde::Deserialize;

use tinyvllm::{Error, Result};

/// Most batches that can be replayed.
const MAX_KEPT: usize = 100_000;
/// Most batches that wait, for one subscriber or in the queue.
const MAX_BATCHES: usize = 1_000_000;
/// Longest topic.
const MAX_TOPIC_BYTES: usize = 256;

/// How events of the prefix cache are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Where batches are published, as `tcp://host:port`.
    pub endpoint: String,
    /// The endpoint for replays, if there is one.
    pub replay_endpoint: Option<String>,
    /// Number of batches that can be replayed.
    pub buffer_steps: usize,
    /// Number of batches that may wait, for one subscriber or in the queue. Further ones are lost.
    pub max_queue_size: usize,
    /// The first frame of each message, by which subscribers filter.
    pub topic: String,
}

impl KvEventsConfig {
    /// The addresses that other machines can reach.
    pub fn open_endpoints(&self) -> impl Iterator<Item = &str> {
        let endpoints = std::iter::once(&self.endpoint).chain(&self.replay_endpoint);
        endpoints.map(String::as_str).filter(|endpoint| !is_on_loopback(endpoint))
    }
}

fn is_on_loopback(endpoint: &str) -> bool {
    let address = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
    address.is_some_and(|(host, _)| {
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    })
}

/// The JSON object. `null` is the same as an absent field.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    enable_kv_cache_events: Option<bool>,
    publisher: Option<String>,
    endpoint: Option<String>,
    replay_endpoint: Option<String>,
    buffer_steps: Option<usize>,
    hwm: Option<usize>,
    max_queue_size: Option<usize>,
    topic: Option<String>,
}

/// The value of the flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventsChoice(pub Option<KvEventsConfig>);

impl FromStr for KvEventsChoice {
    type Err = Error;

    /// Parses vLLM's JSON. Without `"enable_kv_cache_events": true`, or with the publisher `null`, nothing is
    /// published.
    fn from_str(json: &str) -> Result<Self> {
        let fields: Fields =
            serde_json::from_str(json).map_err(|error| invalid(format!("{json:?} is not valid: {error}")))?;
        let publisher = fields.publisher.as_deref().unwrap_or("zmq");
        if !matches!(publisher, "zmq" | "null") {
            return Err(invalid(format!("publisher is {publisher:?}; it must be \"zmq\" or \"null\"")));
        }
        let is_on = fields.enable_kv_cache_events.unwrap_or(false) && publisher == "zmq";
        let buffer_steps = fields.buffer_steps.unwrap_or(10_000);
        let max_queue_size = fields.max_queue_size.unwrap_or(100_000);
        for (name, value, max) in
            [("buffer_steps", buffer_steps, MAX_KEPT), ("max_queue_size", max_queue_size, MAX_BATCHES)]
        {
            if !(1..=max).contains(&value) {
                return Err(invalid(format!("{name} is {value}; it must be from 1 to {max}")));
            }
        }
        // 0 means no limit.
        let high_water_mark = fields.hwm.filter(|hwm| *hwm > 0).unwrap_or(MAX_BATCHES);
        let topic = fields.topic.unwrap_or_default();
        if topic.len() > MAX_TOPIC_BYTES {
            let length = topic.len();
            return Err(invalid(format!("topic has {length} bytes; it must have at most {MAX_TOPIC_BYTES}")));
        }
        let config = KvEventsConfig {
            // vLLM's default is every address of the machine; but events contain prompts.
            endpoint: tcp("endpoint", fields.endpoint.as_deref().unwrap_or("tcp://127.0.0.1:5557"))?,
            replay_endpoint: fields
                .replay_endpoint
                .map(|address| tcp("replay_endpoint", &address))
                .transpose()?,
            buffer_steps,
            max_queue_size: max_queue_size.min(high_water_mark),
            topic,
        };
        Ok(Self(is_on.then_some(config)))
    }
}

/// An address to listen on. ZeroMQ's `*` means every address of this machine.
fn tcp(name: &str, endpoint: &str) -> Result<String> {
    let address = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
    match address {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
            let host = if host == "*" { "0.0.0.0" } else { host };
            Ok(format!("tcp://{host}:{port}"))
        }
        _ => Err(invalid(format!("{name} is {endpoint:?}; it must be tcp://HOST:PORT"))),
    }
}

fn invalid(message: impl std::fmt::Display) -> Error {
    Error::invalid_request(format!("--kv-events-config: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Option<KvEventsConfig>> {
        json.parse().map(|KvEventsChoice(config)| config)
    }

    #[test]
    fn vllms_json_is_read() {
        assert_eq!(read("{}").unwrap(), None);
        assert_eq!(read(r#"{"enable_kv_cache_events": true, "publisher": "null"}"#).unwrap(), None);
        let config = read(r#"{"enable_kv_cache_events": true}"#).unwrap().unwrap();
        assert_eq!(config.endpoint, "tcp://127.0.0.1:5557", "on this machine only");
        assert_eq!((config.replay_endpoint, config.buffer_steps, &*config.topic), (None, 10_000, ""));
        let config = read(
            r#"{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
                "replay_endpoint": "tcp://*:5558", "buffer_steps": 5, "hwm": 100000, "topic": "kv@pod@demo"}"#,
        );
        let config = config.unwrap().unwrap();
        assert_eq!(config.endpoint, "tcp://0.0.0.0:5557");
        assert_eq!(config.replay_endpoint.as_deref(), Some("tcp://0.0.0.0:5558"));
        assert_eq!((config.buffer_steps, &*config.topic), (5, "kv@pod@demo"));
    }

    #[test]
    fn null_is_the_default() {
        let fields =
            ["publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic"];
        let nulls: String = fields.iter().map(|name| format!(r#", "{name}": null"#)).collect();
        let on = r#"{"enable_kv_cache_events": true"#;
        let config = read(&format!("{on}{nulls}}}")).unwrap();
        assert!(config.is_some());
        assert_eq!(config, read(&format!("{on}}}")).unwrap());
        assert_eq!(read(r#"{"enable_kv_cache_events": null}"#).unwrap(), None);
    }

    #[test]
    fn the_high_water_mark_bounds_what_waits() {
        let check = |limits: &str, expected: usize| {
            let json = format!(r#"{{"enable_kv_cache_events": true, {limits}}}"#);
            assert_eq!(read(&json).unwrap().unwrap().max_queue_size, expected, "{limits}");
        };
        check(r#""hwm": 100000"#, 100_000);
        check(r#""hwm": 500"#, 500);
        check(r#""hwm": 0"#, 100_000);
        check(r#""hwm": 5000000"#, 100_000);
        check(r#""hwm": 0, "max_queue_size": 7"#, 7);
        check(r#""hwm": 500, "max_queue_size": 7"#, 7);
    }

    #[test]
    fn addresses_that_other_machines_reach_are_reported() {
        let check = |endpoint: &str, is_open: bool| {
            let json = format!(
                r#"{{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "{endpoint}"}}"#
            );
            let config = read(&json).unwrap().unwrap();
            assert_eq!(config.open_endpoints().count(), usize::from(is_open), "{endpoint}");
        };
        for endpoint in ["tcp://localhost:1", "tcp://127.0.0.1:1", "tcp://127.1.2.3:1", "tcp://[::1]:1"] {
            check(endpoint, false);
        }
        for endpoint in ["tcp://*:1", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://10.0.0.1:1", "tcp://worker:1"]
        {
            check(endpoint, true);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |json: &str, words: &str| {
            let message = read(json).unwrap_err().to_string();
            assert!(message.contains(words) && message.contains("--kv-events-config"), "{message}");
        };
        check("", "EOF");
        check(r#"{"enable": true}"#, "unknown field `enable`");
        check(r#"{"publisher": "kafka"}"#, "\"kafka\"; it must be \"zmq\" or \"null\"");
        check(r#"{"endpoint": "ipc://kv"}"#, "tcp://HOST:PORT");
        check(r#"{"endpoint": "tcp://127.0.0.1"}"#, "tcp://HOST:PORT");
        check(r#"{"endpoint": "tcp://:5557"}"#, "tcp://HOST:PORT");
        check(r#"{"replay_endpoint": "tcp://*:99999"}"#, "replay_endpoint");
        check(r#"{"buffer_steps": 0}"#, "buffer_steps is 0; it must be from 1");
        check(r#"{"buffer_steps": 100001}"#, "it must be from 1 to 100000");
        check(r#"{"max_queue_size": 100000000}"#, "max_queue_size is 100000000");
        check(r#"{"hwm": -1}"#, "invalid value: integer `-1`");
        check(&format!(r#"{{"topic": "{}"}}"#, "x".repeat(300)), "300 bytes");
    }
}
