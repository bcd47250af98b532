//! `/api/chat` and `/api/generate`, and the other paths that ollama's clients use.
//!
//! A request becomes the same conversation as one for chats. So it has the same template, limits and engine.
//! `conversation.rs` and `options.rs` read it, `style.rs` writes the answer, `about.rs` describes the model.

mod about;
mod conversation;
mod options;
mod style;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use serde_json::Value;

pub(in super::super) use self::about::{running, show, tags, version};
use self::style::{Kind, LineStyle};
use super::super::error::ApiError;
use super::super::json::{Fields, wrong_type};
use super::super::state::{App, Model};
use super::blocks::{BlockResponse, Blocks};
use super::completions;
use super::conversation::{Answers, Conversation, Variables, check_text_len, template_variables};
use super::options::{Options, StreamOptions, Words, says_nothing};
use super::structured::{self, StructuredOutput, json_or_schema};
use super::tools::ToolRequest;
use super::turn::TurnFormat;
use super::{Prepared, generate};
use tinyvllm::chat::Message;
use tinyvllm::engine::Request;
use tinyvllm::sampling::SamplingParams;

type Lines = Prepared<BlockResponse<LineStyle>>;

/// Fields that would change the answer and are not supported, each with an alternative.
const NOT_HERE: [(&str, &str); 5] = [
    ("context", "send the conversation to /api/chat"),
    ("logprobs", "use /v1/chat/completions"),
    ("suffix", "omit it"),
    ("template", "start the server with --chat-template"),
    ("top_logprobs", "use /v1/chat/completions"),
];

/// Answers a conversation.
pub(in super::super) async fn chat(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    generate(app, request, parse_chat).await
}

/// Answers a prompt, or continues it as it is.
pub(in super::super) async fn complete(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    generate(app, request, parse_prompt).await
}

/// Fields of both paths, in addition to the prompt.
struct Question {
    params: SamplingParams,
    options: Options,
    output: Option<StructuredOutput>,
    variables: Variables,
}

impl Question {
    fn parse(model: &Model, fields: &mut Fields) -> Result<Self, ApiError> {
        for (name, way_out) in NOT_HERE {
            if fields.take(name)?.is_some_and(|value| !says_nothing(&value)) {
                return Err(ApiError::unsupported(name, format!("{name} is not supported here; {way_out}")));
            }
        }
        // The model stays loaded as long as the server runs.
        fields.pass(&["keep_alive"]);
        let format = fields.take("format")?.map(|format| json_or_schema(format, "format")).transpose()?;
        let params = options::parse(fields, model)?;
        let variables = thinking(fields)?;
        let is_stream = fields.bool("stream")?.unwrap_or(true);
        let mut options = Options::parse(fields, &params.stop, &Words::OLLAMA)?;
        options.refuse_reports()?;
        options.stream = is_stream.then(StreamOptions::default);
        let output = structured::parse(fields, format.flatten())?;
        Ok(Self { params, options, output, variables })
    }

    /// The answer that reports the model as loaded. Options that would be refused with a prompt are refused
    /// here too.
    fn load(self, model: &Model, kind: Kind) -> Result<Lines, ApiError> {
        let checked = self.params.validate(model.llm.engine().model_limits().vocab_size);
        checked.map_err(|error| options::renamed(error.into()))?;
        Ok(lines(model, kind, None, self.options))
    }

    /// Answers a conversation.
    fn answer(self, model: &Model, kind: Kind, conversation: Conversation) -> Result<Lines, ApiError> {
        let Self { params, mut options, output, variables } = self;
        let conversation = Conversation { variables, ..conversation };
        if let Some(output) = output.as_ref().filter(|_| conversation.continue_final_message) {
            let param = output.param();
            let message = format!(
                "messages ends with a turn of the assistant, which the answer continues, and {param} sets its \
                 beginning; omit one of them"
            );
            return Err(ApiError::invalid("messages", message));
        }
        // In ollama, a limit beyond the context's end means the rest of the context.
        let answers = Answers { output, includes_reasoning: true, clamps_max_tokens: true };
        let (request, turns) =
            conversation.prepare(model, params, &mut options, answers).map_err(options::renamed)?;
        Ok(lines(model, kind, Some((request, turns)), options))
    }

    /// Continues a prompt without a template.
    fn continuation(self, model: &Model, prompt: &str) -> Result<Lines, ApiError> {
        let Self { mut params, options, output, variables } = self;
        variables.report_all();
        check_text_len(model, "prompt", prompt.len())?;
        let prompt_token_ids = completions::encode(model, prompt, true)?;
        let engine = model.llm.engine();
        let left = engine.config().max_model_len.saturating_sub(prompt_token_ids.len()).max(1);
        let wanted = model.llm.max_tokens(prompt_token_ids.len(), &params);
        params.max_tokens = wanted.map(|wanted| wanted.min(left));
        let mut request = Request::new(prompt_token_ids, params);
        request.cache_salt.clone_from(&options.cache_salt);
        request.constraint = output.map(|output| output.compile(model)).transpose()?;
        let checked = request.validate(engine.model_limits(), engine.config());
        checked.map_err(|error| options::renamed(ApiError::from(error).or_param("prompt")))?;
        Ok(lines(model, Kind::Prompt, Some((request, TurnFormat::default())), options))
    }
}

fn parse_chat(model: &Model, mut fields: Fields) -> Result<Lines, ApiError> {
    // A request that only loads the model has no messages.
    let are_none = |messages: &Value| messages.as_array().map_or(messages.is_null(), Vec::is_empty);
    if fields.look("messages", are_none)?.unwrap_or(true) {
        fields.pass(&["messages"]);
        ToolRequest::parse(&mut fields)?;
        return Question::parse(model, &mut fields)?.load(model, Kind::Chat);
    }
    let turns = conversation::parse(&mut fields)?;
    let tools = ToolRequest::parse(&mut fields)?;
    let question = Question::parse(model, &mut fields)?;
    let conversation = Conversation {
        param: "messages",
        messages: turns.messages,
        has_paths: true,
        about_tools: turns.about_tools,
        tools,
        add_generation_prompt: !turns.is_begun,
        continue_final_message: turns.is_begun,
        variables: Variables::default(),
    };
    question.answer(model, Kind::Chat, conversation)
}

fn parse_prompt(model: &Model, mut fields: Fields) -> Result<Lines, ApiError> {
    conversation::refuse_images(&mut fields)?;
    let prompt = fields.string("prompt")?.unwrap_or_default();
    let system = fields.string("system")?.filter(|system| !system.is_empty());
    let is_raw = fields.bool("raw")?.unwrap_or(false);
    let question = Question::parse(model, &mut fields)?;
    if prompt.is_empty() {
        return question.load(model, Kind::Prompt);
    }
    if is_raw && system.is_some() {
        let message = "system is set, and raw sends the prompt unchanged; omit one of them";
        return Err(ApiError::invalid("system", message));
    }
    if is_raw || (system.is_none() && !model.llm.has_chat_template()) {
        return question.continuation(model, &prompt);
    }
    let system = system.map(|text| Message::new("system", text));
    let conversation = Conversation {
        param: "prompt",
        messages: system.into_iter().chain([Message::new("user", prompt)]).collect(),
        has_paths: false,
        about_tools: None,
        tools: ToolRequest::default(),
        add_generation_prompt: true,
        continue_final_message: false,
        variables: Variables::default(),
    };
    question.answer(model, Kind::Prompt, conversation)
}

/// The request with the style of its answer. `asked` is `None` if the request only loads the model.
fn lines(model: &Model, kind: Kind, asked: Option<(Request, TurnFormat)>, options: Options) -> Lines {
    let style = LineStyle::new(&model.names[0], kind, asked.is_none());
    let (requests, turns) = match asked {
        Some((request, turns)) => (vec![request], turns),
        None => (Vec::new(), TurnFormat::default()),
    };
    let nothing = Request::default();
    let blocks = Blocks::new(requests.first().unwrap_or(&nothing), turns);
    Prepared { requests, options, shape: BlockResponse { blocks, style } }
}

/// Sets the template's reasoning switch and effort, if requested.
fn thinking(fields: &mut Fields) -> Result<Variables, ApiError> {
    const EXPECTED: &str = "true, false, \"low\", \"medium\" or \"high\"";
    let (is_wanted, effort) = match fields.take("think")? {
        None => (None, None),
        Some(Value::Bool(is_wanted)) => (Some(is_wanted), None),
        Some(Value::String(effort)) if ["low", "medium", "high"].contains(&effort.as_str()) => {
            (Some(true), Some(("think", effort)))
        }
        Some(other) => return Err(wrong_type(fields.path("think"), &other, EXPECTED)),
    };
    let mut variables = template_variables(fields, effort)?;
    if let Some(is_wanted) = is_wanted {
        variables.switch_thinking_by("think", is_wanted);
    }
    Ok(variables)
}
