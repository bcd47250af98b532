//! `tinyvllm serve`: flags, keys and messages of the library's server.

mod browser;
mod log;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use tinyvllm::chat::{ChatConfig, FormatChoice, ReasoningFormat, ToolCallFormat};
use tinyvllm::hub::ModelSource;
use tinyvllm::llm::{Llm, LlmOptions};
use tinyvllm::runner::{available_memory_bytes, check_addresses};
use tinyvllm_server::{Exit, KvEventsChoice, Milestone, Origin, Server, ServerConfig};

use self::log::{LineLog, LogFormat};
use super::console::Console;
use super::flags::{EngineArgs, GenerationConfigArgs, MessageArgs, ModelArgs, PositionalModel, TemplateArgs};
use super::interrupt;
use super::load::{chat_config, engine_options, merge_model, resolve};
use super::servers::{self, Record};
use super::value::{parse_bytes, parse_seconds, parse_value};

/// Implements OpenAI's API (/v1/chat/completions, /v1/completions, /v1/models), vLLM's /tokenize,
/// /detokenize, /health, /version and /metrics, Anthropic's /v1/messages, and ollama's /api/chat,
/// /api/generate, /api/tags and /api/show. / is a chat page for the browser.
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

/// The server's settings.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
struct ServerArgs {
    /// Address to listen on; 0.0.0.0 listens on every network
    #[arg(long, default_value = "127.0.0.1", value_parser = NonEmptyStringValueParser::new())]
    host: String,
    /// Port; 0 lets the system choose; ollama's clients expect 11434
    #[arg(long, default_value_t = 8_000)]
    port: u16,
    /// Open the chat page in the browser when the model is loaded
    #[arg(long)]
    open: bool,
    /// Name of the model in requests; may be repeated; answers use the first one
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    served_model_name: Vec<String>,
    /// Format of the model's tool calls: auto (detected from its template), none, or a name such as hermes,
    /// mistral or deepseek_v3; the error for an unknown name lists them all
    #[arg(
        long,
        default_value = "auto",
        value_parser = parse_value::<FormatChoice<ToolCallFormat>>,
        value_name = "NAME",
        hide_short_help = true
    )]
    tool_call_parser: FormatChoice<ToolCallFormat>,
    /// Format of the model's reasoning: auto (detected from its template), none, or a name such as qwen3 or
    /// deepseek_r1; the error for an unknown name lists them all
    #[arg(
        long,
        default_value = "auto",
        value_parser = parse_value::<FormatChoice<ReasoningFormat>>,
        value_name = "NAME",
        hide_short_help = true
    )]
    reasoning_parser: FormatChoice<ReasoningFormat>,
    /// API key that requests need, except for /health and the chat page; may be repeated
    ///
    /// Every user of this machine can see a key that is typed here in the list of processes. TINYVLLM_API_KEY and
    /// --api-key-file keep it hidden.
    #[arg(long, value_name = "KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// File with further keys, one a line; reloaded on SIGHUP
    ///
    /// Each key is a client, and clients share the machine fairly. `KEY weight=2` gives a key two shares.
    /// A word that begins with # begins a comment, so no key can.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Trust the client names in requests: a client is a name in the header x-client-id or in the field user
    ///
    /// Use it behind a gateway. Without it a client is a key, or an address if there are no keys.
    #[arg(long, hide_short_help = true)]
    trust_client_ids: bool,
    /// Origin whose web pages may use the server, such as https://chat.example.org; may be repeated; * allows every
    /// origin
    ///
    /// By default only the server's own page has access. A JSON list, as in vLLM, works too.
    #[arg(long, value_name = "ORIGIN", value_parser = parse_origins)]
    allowed_origins: Vec<Origins>,
    /// Refuse requests with unknown fields, instead of ignoring them and naming them in the header x-ignored-fields
    #[arg(long, hide_short_help = true)]
    strict_fields: bool,
    /// Maximum size of a request body, such as 512K or 32M
    #[arg(long, default_value = "32M", value_name = "BYTES", value_parser = parse_bytes)]
    max_body_bytes: u64,
    /// Memory of all requests together, for their bodies and the work on them, such as 512M [default: an eighth of the
    /// free memory, at least 64M]
    ///
    /// Requests beyond it get 429. A request that can never fit gets 413.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    max_request_memory: Option<u64>,
    /// Maximum number of waiting answers; further requests get 429, except from clients below their fair
    /// share
    ///
    /// Each of the `n` answers to each prompt counts.
    #[arg(long, default_value_t = 256, value_name = "N")]
    max_waiting: usize,
    /// Maximum number of connections; further ones can only get /health and /metrics
    #[arg(long, default_value_t = 4_096, value_name = "N", hide_short_help = true)]
    max_connections: usize,
    /// Maximum number of connections from one address
    #[arg(long, default_value_t = 1_024, value_name = "N", hide_short_help = true)]
    max_connections_per_address: usize,
    /// Publish events of the prefix cache over ZeroMQ, for routers: vLLM's JSON, such as {"enable_kv_cache_events": true,
    /// "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}
    ///
    /// Further fields: buffer_steps (batches that can be replayed), max_queue_size and hwm (batches that wait
    /// to be sent; the smaller value counts), topic. Events contain the tokens of prompts. Every peer that
    /// reaches the address can read them, up to 256 peers and 128 from one address. Requests with a
    /// cache_salt are never published.
    #[arg(long, value_name = "JSON", hide_short_help = true)]
    kv_events_config: Option<KvEventsChoice>,
    /// Number of requests that GET /v1/requests/ID can report on; 0 for none
    #[arg(long, default_value_t = 1_000, value_name = "N", hide_short_help = true)]
    request_history: usize,
    /// Number of responses to keep for each key, for previous_response_id and GET /v1/responses/ID; 0 for none
    ///
    /// The server keeps them in memory with their conversations, at most 64 MB for each key. It drops the oldest first.
    #[arg(long, default_value_t = 0, value_name = "N", hide_short_help = true)]
    responses_memory: usize,
    /// Timeout in seconds for the head of a request, and for an idle connection
    #[arg(long, default_value = "30", value_name = "S", value_parser = parse_seconds, hide_short_help = true)]
    header_timeout: Duration,
    /// Timeout in seconds for the body of a request
    #[arg(long, default_value = "60", value_name = "S", value_parser = parse_seconds, hide_short_help = true)]
    body_timeout: Duration,
    /// Timeout in seconds for a client that reads nothing of its answer
    #[arg(long, default_value = "30", value_name = "S", value_parser = parse_seconds, hide_short_help = true)]
    write_timeout: Duration,
    /// Seconds for running requests to end after SIGTERM or Ctrl-C
    #[arg(long, default_value = "30", value_name = "S", value_parser = parse_seconds)]
    shutdown_timeout: Duration,
    /// Format of the log: a line of text or JSON for each request, without prompts and keys; requests for
    /// /health and /metrics appear with --verbose only
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    log_format: LogFormat,
    /// Log no requests
    #[arg(long, hide_short_help = true)]
    disable_access_log: bool,
}

impl ServeArgs {
    /// Whether each line on standard error is a JSON object.
    pub(crate) fn logs_json(&self) -> bool {
        self.server.log_format == LogFormat::Json
    }
}

/// The values of one flag.
type Origins = Vec<Origin>;

/// Serves until it is stopped.
///
/// # Errors
/// If the port is in use, the model cannot be downloaded or loaded, or the engine fails.
pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages).in_json(args.logs_json());
    check_addresses()?;
    let model = merge_model(&args.positional, &args.model)?;
    let chat = ChatConfig {
        tool_calls: args.server.tool_call_parser.clone(),
        reasoning: args.server.reasoning_parser.clone(),
        ..chat_config(&args.template)?
    };
    let generation_config = args.generation.generation_config.clone();
    let options = LlmOptions { chat, generation_config, ..engine_options(&args.engine, console)? };
    let mut server = Server::bind(config(&args.server)?)?;
    // Before a download of gigabytes for a device that does not exist.
    options.open_device()?;
    let address = server.address();
    let files = resolve(&model, console)?;
    let names = names(&args.server.served_model_name, model.model.as_deref(), &files.display_name);
    console.note(format_args!("listening on http://{address}, loading the model"));
    if server.is_open_to_others() {
        console.note(
            "warning: there are no API keys, so every client that reaches this address can use the server \
             (--api-key-file)",
        );
    }
    if let Some(notice) = server.notice() {
        console.note(format_args!("note: {notice}"));
    }
    if let Some(KvEventsChoice(Some(events))) = &args.server.kv_events_config {
        for endpoint in events.open_endpoints() {
            console.note(format_args!(
                "warning: KV events contain the tokens of prompts and need no key, so every client that reaches \
                 {endpoint} can read them (--kv-events-config)"
            ));
        }
    }
    let log = LineLog::start(args.server.log_format, !args.server.disable_access_log, console)?;
    let log = Arc::new(log);
    // For `ps` and `stop`. The server works without the entry.
    let entry = servers::enter(&Record::own(address, names.clone()));
    if let Err(error) = &entry {
        console.detail(format_args!("`tinyvllm ps` cannot list this server: {error}"));
    }
    server.set_names(names);
    let page = format!("http://{}/", servers::reachable(address));
    let opens_page = args.server.open;
    let mut on_milestone = |milestone: Milestone<'_>| match milestone {
        Milestone::Ready(summary) => {
            console.note(summary);
            console.note(format_args!("ready: http://{address}/v1"));
            console.note(format_args!("chat {page} · API {page}v1"));
            if opens_page {
                browser::open(&page, console);
            }
        }
        Milestone::Draining => {
            console.note("stopping: waiting for running requests; a second signal stops at once");
        }
        Milestone::KeysRead(num_keys) => {
            console.note(format_args!("reloaded {num_keys} keys"));
        }
        Milestone::KeysKept(error) => {
            console.note(format_args!("keeping the previous keys: {error}"));
        }
        Milestone::PrefixesLost => {
            console.note("prefixes that were not written yet are lost: writing is too slow");
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

/// Names of the model in requests and answers. They include the name that was typed, because programs use it
/// too.
fn names(given: &[String], typed: Option<&str>, own: &str) -> Vec<String> {
    if !given.is_empty() {
        return given.to_vec();
    }
    let mut names = vec![own.to_owned()];
    if let Some(typed) = typed.filter(|typed| *typed != own)
        && matches!(ModelSource::parse(typed, None), Ok(ModelSource::Hub(_)))
    {
        names.push(typed.to_owned());
    }
    names
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_typed_is_a_name_of_a_model_of_the_hub() {
        let check = |given: &[&str], typed: Option<&str>, own: &str, expected: &[&str]| {
            let given: Vec<String> = given.iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(names(&given, typed, own), expected, "{typed:?}");
        };
        check(&[], None, "demo", &["demo"]);
        check(&[], Some("llama3.2"), "org/name:Q4_K_M", &["org/name:Q4_K_M", "llama3.2"]);
        check(&[], Some("org/name"), "org/name", &["org/name"]);
        check(&["a", "b"], Some("llama3.2"), "org/name", &["a", "b"]);
        // A path is nothing that clients know.
        check(&[], Some(env!("CARGO_MANIFEST_DIR")), "cli", &["cli"]);
        // Cargo runs tests in the package's folder.
        check(&[], Some("serve"), "serve", &["serve"]);
        check(&[], Some("bench/serve"), "serve", &["serve"]);
    }

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
}
