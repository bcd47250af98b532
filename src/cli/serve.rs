//! `tinyvllm serve`: flags, keys and log lines around the library's server.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use clap::{Args, ValueEnum};
use tinyvllm::chat::{ChatConfig, FormatChoice, ReasoningFormat, ToolCallFormat};
use tinyvllm::llm::{Llm, LlmOptions};
use tinyvllm::runner::available_memory_bytes;
use tinyvllm::server::{
    AccessLog, AccessRecord, Exit, KvEventsChoice, Milestone, Origin, Server, ServerConfig,
};

use super::args::{EngineArgs, GenerationConfigArgs, MessageArgs, ModelArgs, PositionalModel, TemplateArgs};
use super::console::Console;
use super::interrupt;
use super::load::{chat_config, merge_model, resolve};
use super::value::{parse_bytes, parse_seconds, parse_value};

/// Log lines that may wait for standard error. Further ones are dropped.
const MAX_WAITING_LINES: usize = 4_096;
/// Time for the last lines to be written.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// Answers OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, and /tokenize, /detokenize,
/// /health, /version and /metrics as vLLM has them. / is a chat page for the browser.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    positional: PositionalModel,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    template: TemplateArgs,
    #[command(flatten)]
    generation: GenerationConfigArgs,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    messages: MessageArgs,
}

/// How the server behaves.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
struct ServerArgs {
    /// Address to listen on; 0.0.0.0 is every network
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port; 0 lets the system choose
    #[arg(long, default_value_t = 8_000)]
    port: u16,
    /// Name of the model in requests and answers; may be repeated, the first one is in answers
    #[arg(long, value_name = "NAME")]
    served_model_name: Vec<String>,
    /// How the model calls tools: auto (found by trying its template), none, or a name such as hermes, mistral or
    /// deepseek_v3; a wrong one is answered with all of them
    #[arg(
        long,
        default_value = "auto",
        value_parser = parse_value::<FormatChoice<ToolCallFormat>>,
        value_name = "NAME",
        hide_short_help = true
    )]
    tool_call_parser: FormatChoice<ToolCallFormat>,
    /// How the model reasons: auto (from its template), none, or a name such as qwen3 or deepseek_r1; a wrong one is
    /// answered with all of them
    #[arg(
        long,
        default_value = "auto",
        value_parser = parse_value::<FormatChoice<ReasoningFormat>>,
        value_name = "NAME",
        hide_short_help = true
    )]
    reasoning_parser: FormatChoice<ReasoningFormat>,
    /// Key that requests must have, except to /health and the chat page; may be repeated
    ///
    /// What is typed here is seen by everybody on the machine who lists processes. TINYVLLM_API_KEY and
    /// --api-key-file are not.
    #[arg(long, value_name = "KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// File with further keys, one a line; read again at SIGHUP
    ///
    /// A client is a key. Beside other clients it gets its share of what there is; with `KEY weight=2`, two. Lines
    /// that begin with # are comments.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Believe whoever sends requests for whom they are: a client is a name in the header x-client-id, or in the
    /// field user
    ///
    /// For a gateway that speaks for many. Without it, and without keys, a client is an address.
    #[arg(long, hide_short_help = true)]
    trust_client_ids: bool,
    /// Origin whose web pages may use the server, such as https://chat.example.org; may be repeated, and * is
    /// every one
    ///
    /// Without it, browsers let only the server's own page in. vLLM's form, a JSON list, is taken too.
    #[arg(long, value_name = "ORIGIN", value_parser = parse_origins)]
    allowed_origins: Vec<Origins>,
    /// Refuse requests with fields that mean nothing here, instead of ignoring them and saying so in the header
    /// x-ignored-fields
    #[arg(long, hide_short_help = true)]
    strict_fields: bool,
    /// Longest body of a request, such as 512K or 32M
    #[arg(long, default_value = "32M", value_name = "BYTES", value_parser = parse_bytes)]
    max_body_bytes: u64,
    /// Memory that all requests together may take for what they send and for the work on it, such as 512M; an eighth
    /// of what is free by default, at least 64M
    ///
    /// Requests beyond it get 429, and those that would never fit 413.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    max_request_memory: Option<u64>,
    /// Answers that may wait, beside those that run, each of `n` and of a list of prompts for itself; further
    /// requests get 429, but those of clients with few
    #[arg(long, default_value_t = 256, value_name = "N")]
    max_waiting: usize,
    /// Connections at once; on further ones only /health and /metrics are answered
    #[arg(long, default_value_t = 4_096, value_name = "N", hide_short_help = true)]
    max_connections: usize,
    /// Connections at once from one address
    #[arg(long, default_value_t = 1_024, value_name = "N", hide_short_help = true)]
    max_connections_per_address: usize,
    /// Tells routers which prefixes are cached here, over ZeroMQ: vLLM's JSON, such as {"enable_kv_cache_events": true,
    /// "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}
    ///
    /// Further fields: buffer_steps (batches that can be asked for again), max_queue_size and hwm (batches that may wait
    /// to be sent; the smaller one counts), topic. Events carry the tokens of prompts, and whoever can reach the address
    /// may listen, 256 at once and 128 from one address; requests with a cache_salt are never told of.
    #[arg(long, value_name = "JSON", hide_short_help = true)]
    kv_events_config: Option<KvEventsChoice>,
    /// Requests of which GET /v1/requests/ID tells what became of them; 0 for none
    #[arg(long, default_value_t = 1_000, value_name = "N", hide_short_help = true)]
    request_history: usize,
    /// Responses that are kept for each key, for previous_response_id and GET /v1/responses/ID; 0 for none
    ///
    /// They are kept in memory with their conversations, at most 64 MB for each key, and the oldest are forgotten
    /// first.
    #[arg(long, default_value_t = 0, value_name = "N", hide_short_help = true)]
    responses_memory: usize,
    /// Seconds for the head of a request to arrive, and for a connection to be idle
    #[arg(long, default_value = "30", value_name = "S", value_parser = parse_seconds, hide_short_help = true)]
    header_timeout: Duration,
    /// Seconds for the body of a request to arrive
    #[arg(long, default_value = "60", value_name = "S", value_parser = parse_seconds, hide_short_help = true)]
    body_timeout: Duration,
    /// Seconds that a client may take nothing of its answer before it is cut off
    #[arg(long, default_value = "30", value_name = "S", value_parser = parse_seconds, hide_short_help = true)]
    write_timeout: Duration,
    /// Seconds for running requests to end when the server is told to stop
    #[arg(long, default_value = "30", value_name = "S", value_parser = parse_seconds)]
    shutdown_timeout: Duration,
    /// Form of the log: a line of text or of JSON for each request, without prompts and keys
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    log_format: LogFormat,
    /// Log no requests
    #[arg(long, hide_short_help = true)]
    disable_access_log: bool,
}

/// What one flag names.
type Origins = Vec<Origin>;

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// For people
    Text,
    /// For programs
    Json,
}

/// Serves until told to stop.
///
/// # Errors
/// If the port is in use, the model cannot be had or loaded, or the engine fails.
pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let model = merge_model(&args.positional, &args.model)?;
    let chat = ChatConfig {
        tool_calls: args.server.tool_call_parser.clone(),
        reasoning: args.server.reasoning_parser.clone(),
        ..chat_config(&args.template)?
    };
    let generation_config = args.generation.generation_config.clone();
    let options = LlmOptions { chat, generation_config, ..args.engine.options() };
    let server = Server::bind(config(&args.server)?)?;
    // Before gigabytes are downloaded for a device that is not there.
    options.open_device()?;
    let address = server.address();
    console.note(format_args!("listening on http://{address}, loading the model"));
    if server.is_open_to_others() {
        console.note(
            "warning: there are no API keys, so everybody who can reach this address may use the server \
             (--api-key-file)",
        );
    }
    if let Some(KvEventsChoice(Some(events))) = &args.server.kv_events_config {
        for endpoint in events.open_endpoints() {
            console.note(format_args!(
                "warning: KV events carry the tokens of prompts and need no key, so everybody who can reach \
                 {endpoint} may read them (--kv-events-config)"
            ));
        }
    }
    let files = resolve(&model, console)?;
    let log = Arc::new(LineLog::start(&args.server, console)?);
    let mut on_milestone = |milestone: Milestone<'_>| match milestone {
        Milestone::Ready(summary) => {
            console.note(summary);
            console.note(format_args!("ready: http://{address}/v1"));
        }
        Milestone::Draining => {
            console.note("stopping: running requests may end; once more to stop at once");
        }
        Milestone::KeysRead(num_keys) => {
            console.note(format_args!("keys were read again: there are {num_keys}"));
        }
        Milestone::KeysKept(error) => {
            console.note(format_args!("keys stay as they were: {error}"));
        }
    };
    let load =
        Box::new(move |progress: &dyn tinyvllm::llm::LoadProgress| Llm::load(&files, &options, progress));
    let exit = server.run(load, log.clone(), &mut on_milestone);
    log.flush();
    match exit? {
        Exit::Drained => Ok(ExitCode::SUCCESS),
        Exit::AtOnce => interrupt::exit_now(),
    }
}

fn config(args: &ServerArgs) -> anyhow::Result<ServerConfig> {
    Ok(ServerConfig {
        host: args.host.clone(),
        port: args.port,
        served_model_names: args.served_model_name.clone(),
        api_keys: args.api_key.clone(),
        api_key_file: args.api_key_file.clone(),
        trust_client_ids: args.trust_client_ids,
        allowed_origins: args.allowed_origins.concat(),
        strict_fields: args.strict_fields,
        max_body_bytes: usize::try_from(args.max_body_bytes)?,
        max_request_memory: match args.max_request_memory {
            Some(given) => usize::try_from(given)?,
            None => ServerConfig::usual_request_memory(available_memory_bytes()),
        },
        max_waiting: args.max_waiting,
        max_connections: args.max_connections,
        max_connections_per_address: args.max_connections_per_address,
        kv_events: args.kv_events_config.clone().and_then(|KvEventsChoice(config)| config),
        request_history: args.request_history,
        responses_memory: args.responses_memory,
        header_timeout: args.header_timeout,
        body_timeout: args.body_timeout,
        write_timeout: args.write_timeout,
        shutdown_timeout: args.shutdown_timeout,
    })
}

/// An origin, or a JSON list of them.
fn parse_origins(text: &str) -> Result<Origins, tinyvllm::Error> {
    let names = match text.trim_start().starts_with('[') {
        true => serde_json::from_str(text).map_err(|error| {
            tinyvllm::Error::invalid_request(format!("{text:?} is not a JSON list of strings: {error}"))
        })?,
        false => vec![text.to_owned()],
    };
    names.iter().map(|name| name.parse()).collect()
}

/// What the thread that writes the log is told.
enum LogCommand {
    Write(String),
    /// Everything before this has been written when the sender is dropped.
    Flush(SyncSender<()>),
}

/// A log that hands its lines to a thread, so that nobody waits for standard error.
struct LineLog {
    format: LogFormat,
    /// None if nothing is to be logged.
    commands: Option<SyncSender<LogCommand>>,
}

impl AccessLog for LineLog {
    fn record(&self, record: AccessRecord) {
        let Some(commands) = &self.commands else { return };
        let line = match self.format {
            LogFormat::Text => text_line(&record),
            // The record has string keys and no failing parts.
            LogFormat::Json => serde_json::to_string(&record).unwrap_or_default(),
        };
        // A log that nobody reads must not stop the server.
        let _ = commands.try_send(LogCommand::Write(line));
    }

    fn notice(&self, message: &str) {
        let Some(commands) = &self.commands else { return };
        let line = match self.format {
            LogFormat::Text => format!("note: {message}"),
            LogFormat::Json => serde_json::json!({"notice": message}).to_string(),
        };
        let _ = commands.try_send(LogCommand::Write(line));
    }
}

impl LineLog {
    fn start(args: &ServerArgs, console: Console) -> anyhow::Result<Self> {
        if args.disable_access_log || console.is_quiet() {
            return Ok(Self { format: args.log_format, commands: None });
        }
        let (commands, receiver) = sync_channel(MAX_WAITING_LINES);
        std::thread::Builder::new().name("tinyvllm-log".to_owned()).spawn(move || write_lines(&receiver))?;
        Ok(Self { format: args.log_format, commands: Some(commands) })
    }

    /// Waits until everything is written, or nobody seems to read it.
    fn flush(&self) {
        let (done, written) = sync_channel(1);
        let command = LogCommand::Flush(done);
        if self.commands.as_ref().is_some_and(|commands| commands.try_send(command).is_ok()) {
            // The sender is dropped, which is an error too.
            let _ = written.recv_timeout(FLUSH_TIME);
        }
    }
}

fn write_lines(commands: &Receiver<LogCommand>) {
    for command in commands {
        match command {
            // Whoever closed standard error does not want to hear that it is closed.
            LogCommand::Write(line) => drop(writeln!(io::stderr().lock(), "{line}")),
            LogCommand::Flush(done) => drop(done),
        }
    }
}

fn text_line(record: &AccessRecord) -> String {
    let AccessRecord { request_id, method, path, status, duration_ms, tokens, cut, .. } = record;
    let cut = cut.as_ref().map_or_else(String::new, |reason| format!(" · cut: {reason}"));
    let tokens = tokens.map_or_else(String::new, |tokens| {
        format!(
            " · prompt {} ({} cached) · output {}",
            tokens.prompt_tokens, tokens.cached_tokens, tokens.completion_tokens
        )
    });
    format!("{status} {method} {path} · {duration_ms:.1} ms{tokens}{cut} · {request_id}")
}

#[cfg(test)]
mod tests {
    use tinyvllm::server::TokenCounts;

    use super::*;

    #[test]
    fn origins() {
        let check = |text: &str, expected: Option<usize>| {
            assert_eq!(parse_origins(text).ok().map(|origins| origins.len()), expected, "{text}");
        };
        check("https://a.example", Some(1));
        check("*", Some(1));
        check(r#"["https://a.example", "http://localhost:3000"]"#, Some(2));
        check("[]", Some(0));
        check("[1]", None);
        check("a.example", None);
    }

    #[test]
    fn lines() {
        let mut record = AccessRecord {
            time: 1.5,
            request_id: "abc".to_owned(),
            method: "GET".to_owned(),
            path: "/health".to_owned(),
            status: 200,
            duration_ms: 0.25,
            cut: None,
            tokens: None,
        };
        assert_eq!(text_line(&record), "200 GET /health · 0.2 ms · abc");
        record.tokens = Some(TokenCounts { prompt_tokens: 5, cached_tokens: 2, completion_tokens: 7 });
        assert!(text_line(&record).contains("prompt 5 (2 cached) · output 7"));
        record.cut = Some("the client left".to_owned());
        assert!(text_line(&record).contains(" · cut: the client left · abc"));
        let json: serde_json::Value = serde_json::to_value(&record).unwrap();
        assert_eq!((json["status"].as_u64(), json["completion_tokens"].as_u64()), (Some(200), Some(7)));
    }
}
