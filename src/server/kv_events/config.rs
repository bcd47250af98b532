//! `--kv-events-config`: vLLM's JSON.

use std::str::FromStr;

use serde::Deserialize;

use crate::{Error, Result};

/// Most batches that wait for one subscriber, or for one that asked for those that it missed. The library of the sockets
/// has this number and no setting for it.
const HIGH_WATER_MARK: usize = 100_000;
/// Most batches that wait to be sent.
const MAX_BATCHES: usize = 1_000_000;
/// Longest topic.
const MAX_TOPIC_BYTES: usize = 256;

/// How routers are told of the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Where batches are published, as `tcp://host:port`.
    pub endpoint: String,
    /// Where those that missed batches ask for them again; nowhere if there is none.
    pub replay_endpoint: Option<String>,
    /// Batches that are kept for them.
    pub buffer_steps: usize,
    /// Batches that may wait to be sent. Further ones are lost.
    pub max_queue_size: usize,
    /// The first part of each message, by which subscribers choose.
    pub topic: String,
}

/// The JSON object.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Fields {
    enable_kv_cache_events: bool,
    publisher: String,
    endpoint: String,
    replay_endpoint: Option<String>,
    buffer_steps: usize,
    hwm: usize,
    max_queue_size: usize,
    topic: String,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: "zmq".to_owned(),
            // vLLM's is every address of the machine; but events carry prompts.
            endpoint: "tcp://127.0.0.1:5557".to_owned(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: HIGH_WATER_MARK,
            max_queue_size: 100_000,
            topic: String::new(),
        }
    }
}

/// What the flag says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventsChoice(pub Option<KvEventsConfig>);

impl FromStr for KvEventsChoice {
    type Err = Error;

    /// Reads vLLM's JSON. Without `"enable_kv_cache_events": true`, or with the publisher `null`, there are no events.
    fn from_str(json: &str) -> Result<Self> {
        let fields: Fields = serde_json::from_str(json)
            .map_err(|error| invalid(format!("{json:?} is not what it should be: {error}")))?;
        if !matches!(&*fields.publisher, "zmq" | "null") {
            return Err(invalid(format!(
                "publisher is {:?}; it must be \"zmq\" or \"null\"",
                fields.publisher
            )));
        }
        if fields.hwm != HIGH_WATER_MARK {
            return Err(invalid(format!(
                "hwm is {}; at most {HIGH_WATER_MARK} batches wait for a subscriber, which cannot be changed here; \
                 leave it out, and set max_queue_size for what may wait to be sent to all",
                fields.hwm
            )));
        }
        for (name, value, max) in [
            ("buffer_steps", fields.buffer_steps, HIGH_WATER_MARK),
            ("max_queue_size", fields.max_queue_size, MAX_BATCHES),
        ] {
            if !(1..=max).contains(&value) {
                return Err(invalid(format!("{name} is {value}; it must be from 1 to {max}")));
            }
        }
        if fields.topic.len() > MAX_TOPIC_BYTES {
            let length = fields.topic.len();
            return Err(invalid(format!("topic has {length} bytes; it must have at most {MAX_TOPIC_BYTES}")));
        }
        let config = KvEventsConfig {
            endpoint: tcp("endpoint", &fields.endpoint)?,
            replay_endpoint: fields
                .replay_endpoint
                .map(|place| tcp("replay_endpoint", &place))
                .transpose()?,
            buffer_steps: fields.buffer_steps,
            max_queue_size: fields.max_queue_size,
            topic: fields.topic,
        };
        Ok(Self((fields.enable_kv_cache_events && fields.publisher == "zmq").then_some(config)))
    }
}

/// An address to listen on. ZeroMQ's `*` is every address of this machine.
fn tcp(name: &str, endpoint: &str) -> Result<String> {
    let place = endpoint.strip_prefix("tcp://").and_then(|place| place.rsplit_once(':'));
    match place {
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
        check(
            r#"{"hwm": 5}"#,
            "hwm is 5; at most 100000 batches wait for a subscriber, which cannot be changed",
        );
        check(&format!(r#"{{"topic": "{}"}}"#, "x".repeat(300)), "300 bytes");
    }
}
