//! Conversations. Every interface converts its request into a conversation with tools and constraints on the
//! answer. From here on, all of them are handled alike.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::super::account::{self, on_text};
use super::super::error::ApiError;
use super::super::ignored::Ignored;
use super::super::json::{Fields, NO_LIMIT, wrong_type};
use super::super::state::Model;
use super::super::values::charge_copies;
use super::messages;
use super::options::Options;
use super::structured::{self, StructuredOutput};
use super::tools::{ToolChoice, ToolRequest};
use super::turn::TurnFormat;
use tinyvllm::chat::{
    self, AnswerFormat, Chat, ChatOptions, EncodedChat, Message, REASONING_SWITCHES, Tool, ToolCallFormat,
    on_account,
};
use tinyvllm::engine::Request;
use tinyvllm::grammar::GrammarSpec;
use tinyvllm::sampling::{Constraint, SamplingParams};

/// Template variables that other fields of the request set.
const RESERVED_VARIABLES: [&str; 4] =
    ["add_generation_prompt", "continue_final_message", "messages", "tools"];

/// The reasoning efforts that a request can name. A template knows some of them.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Charges the values of a template that take much more memory than its conversation.
const ACCOUNT: chat::Account =
    chat::Account { take: |num_bytes| account::charge(num_bytes).is_ok(), give_back: account::give_back };

/// A conversation for the template.
pub(super) struct Conversation {
    /// The field with the messages.
    pub(super) param: &'static str,
    pub(super) messages: Vec<Message>,
    /// Whether the messages are those of the body, with the same indices.
    pub(super) has_paths: bool,
    /// The first path in the messages that has tools.
    pub(super) about_tools: Option<String>,
    pub(super) tools: ToolRequest,
    pub(super) add_generation_prompt: bool,
    /// Whether the answer continues the last message.
    pub(super) continue_final_message: bool,
    /// The template variables of a request, in addition to its messages.
    pub(super) variables: Variables,
}

/// Template variables.
#[derive(Debug, Default)]
pub(super) struct Variables {
    pub(super) values: Map<String, Value>,
    /// The paths in the body that set variables, each with the names of these, and the receiver of the paths of which
    /// the template reads nothing.
    given: Vec<(String, Vec<String>)>,
    /// The path in the body that switches reasoning, and whether it is wanted.
    switched: Option<(&'static str, bool)>,
    /// A path in the body that marks a message, and the field of the message with which templates read it.
    mark: Option<(String, &'static str)>,
    ignored: Option<Ignored>,
}

impl Variables {
    /// Sets the template's reasoning switch. Variables that the request sets itself take precedence.
    pub(super) fn switch_thinking(&mut self, is_wanted: bool) {
        for name in REASONING_SWITCHES {
            self.values.entry(name).or_insert(is_wanted.into());
        }
    }

    /// The same for the field at this path in the body.
    pub(super) fn switch_thinking_by(&mut self, path: &'static str, is_wanted: bool) {
        self.switched = Some((path, is_wanted));
        self.switch_thinking(is_wanted);
    }

    /// Sets the template's limit on reasoning.
    pub(super) fn limit_thinking(&mut self, path: String, num_tokens: usize) {
        const NAME: &str = "thinking_budget";
        self.given.push((path, vec![NAME.to_owned()]));
        self.values.entry(NAME).or_insert_with(|| num_tokens.into());
    }

    /// Notes the path of a field of a message, which is reported unless the template has this name.
    pub(super) fn mark_messages(&mut self, path: String, name: &'static str) {
        self.mark = Some((path, name));
    }

    /// Reports all fields that set variables: no template reads them.
    pub(super) fn report_all(&self) {
        let Some(ignored) = &self.ignored else { return };
        self.given.iter().for_each(|(path, _)| ignored.add(path));
        self.switched.iter().for_each(|(path, _)| ignored.add(path));
    }

    /// The fields of the body that have no effect with this template.
    fn unread(&self, chat: &Chat) -> impl Iterator<Item = &str> {
        let is_unread = |names: &[String]| !names.iter().any(|name| chat.reads(name));
        let given =
            self.given.iter().filter(move |(_, names)| is_unread(names)).map(|(path, _)| path.as_str());
        // Without a switch, a model reasons always or never.
        let has_switch = REASONING_SWITCHES.iter().any(|name| chat.reads(name));
        let reasons = chat.answer_format().reasoning.is_some();
        let switched = self.switched.filter(|(_, is_wanted)| !has_switch && *is_wanted != reasons);
        let mark = self.mark.iter().filter(|(_, name)| !chat.template_source().contains(name));
        given.chain(switched.map(|(path, _)| path)).chain(mark.map(|(path, _)| path.as_str()))
    }
}

/// The options of an answer, in addition to its sampling.
pub(super) struct Answers {
    pub(super) output: Option<StructuredOutput>,
    pub(super) includes_reasoning: bool,
    /// Whether a limit beyond the context's end means the rest of the context.
    pub(super) clamps_max_tokens: bool,
}

impl Conversation {
    /// The token ids of the prompt.
    pub(super) fn encode(&self, model: &Model) -> Result<Vec<u32>, ApiError> {
        let none = ToolRequest::default();
        self.encode_with(model, self.known_tools(model, &none)?)
    }

    /// The tools, or `none` if the template does not write them. The model sees no tools then; they are
    /// reported as ignored, and a required call is an error.
    fn known_tools<'t>(&'t self, model: &Model, none: &'t ToolRequest) -> Result<&'t ToolRequest, ApiError> {
        let about_tools = self.tools.source.as_ref().map(|_| "tools").or(self.about_tools.as_deref());
        // Earlier calls are part of the prompt, even if the format does not allow new ones to be parsed.
        let writes_calls = model.llm.chat_format().is_some_and(Chat::writes_calls);
        let about_tools = about_tools.filter(|_| self.tools.source.is_some() || !writes_calls);
        let Some(path) = about_tools.filter(|_| !model.llm.chat_format().is_none_or(Chat::uses_tools)) else {
            return Ok(&self.tools);
        };
        if called_tools(&self.tools).is_some() {
            let message = format!(
                "tool_choice requires a call, and the chat template of {} does not write tools; start the server \
                 with one that does (--chat-template)",
                model.llm.name()
            );
            return Err(ApiError::unsupported("tool_choice", message));
        }
        if let Some(ignored) = &self.variables.ignored {
            ignored.add(path);
        }
        // The messages may describe the tools, so the model may still write calls.
        let is_read = model.llm.chat_format().is_some_and(|chat| chat.answer_format().tool_calls.is_some());
        Ok(if writes_calls && is_read { &self.tools } else { none })
    }

    fn encode_with(&self, model: &Model, tools: &ToolRequest) -> Result<Vec<u32>, ApiError> {
        let Self { param, messages, .. } = self;
        let num_tool_bytes = tools.source.as_ref().map_or(0, messages::value_bytes);
        check_text_len(model, "tools", num_tool_bytes)?;
        let num_message_bytes = messages::num_bytes(messages);
        check_text_len(model, param, num_message_bytes)?;
        let num_bytes = self.variables.values.values().map(messages::value_bytes).sum();
        check_text_len(model, "chat_template_kwargs", num_bytes)?;
        self.report_unread(model);
        charge_copies(tools.source.iter().chain(self.variables.values.values()))?;
        on_text(num_tool_bytes + num_message_bytes + num_bytes, || {
            let options = ChatOptions {
                add_generation_prompt: self.add_generation_prompt,
                continue_final_message: self.continue_final_message,
                tools: tools.source.clone(),
                variables: self.variables.values.clone(),
            };
            let rendered = on_account(ACCOUNT, || model.llm.encode_chat_reporting(messages, &options));
            let EncodedChat { token_ids, left_out } = rendered.map_err(|error| {
                account::refusal().unwrap_or_else(|| ApiError::from(error).or_param(param))
            })?;
            self.report_left_out(&left_out);
            Ok(token_ids)
        })
    }

    /// Reports messages that the template leaves out, by their path or their role.
    fn report_left_out(&self, indices: &[usize]) {
        let Some(ignored) = &self.variables.ignored else { return };
        for index in indices {
            match self.has_paths {
                true => ignored.add(&format!("{}[{index}].content", self.param)),
                false => ignored.add(&format!("{}.{}", self.param, self.messages[*index].role)),
            }
        }
    }

    /// Reports the fields of the body that the template does not read.
    fn report_unread(&self, model: &Model) {
        let (Some(ignored), Some(chat)) = (&self.variables.ignored, model.llm.chat_format()) else { return };
        self.variables.unread(chat).for_each(|path| ignored.add(path));
        // The name of a tool's result is that of its call, which says it already.
        let is_named = |message: &Message| message.role != "tool" && message.extra.contains_key("name");
        if let Some(index) = self.messages.iter().position(is_named).filter(|_| !chat.writes_names()) {
            ignored.add(&format!("{}[{index}].name", self.param));
        }
    }

    /// The request for the engine, and the parser of its answers.
    pub(super) fn prepare(
        &self,
        model: &Model,
        mut params: SamplingParams,
        options: &mut Options,
        answers: Answers,
    ) -> Result<(Request, TurnFormat), ApiError> {
        let none = ToolRequest::default();
        let tools = self.known_tools(model, &none)?;
        let prompt_token_ids = self.encode_with(model, tools)?;
        let mut turns = turn_format(model, &prompt_token_ids, tools, answers.includes_reasoning)?;
        let calls = self.messages.iter().filter_map(|message| message.extra.get("tool_calls")?.as_array());
        turns.num_earlier_calls = calls.map(Vec::len).sum();
        options.text.visible_special = model.llm.visible_special(&turns.answers);
        let reasoning = turns.answers.reasoning.clone().filter(|_| !options.stops_in_reasoning);
        options.text.reasoning = reasoning.map(|format| (format, turns.prompt_end));
        let engine = model.llm.engine();
        params.max_tokens =
            params.max_tokens.or_else(|| model.llm.default_max_tokens(prompt_token_ids.len(), &params));
        if answers.clamps_max_tokens || params.max_tokens == Some(NO_LIMIT) {
            let left = engine.config().max_model_len.saturating_sub(prompt_token_ids.len());
            params.max_tokens = params.max_tokens.map(|wanted| wanted.min(left.max(1)));
        }
        let mut request = Request::new(prompt_token_ids, params);
        request.cache_salt.clone_from(&options.cache_salt);
        request.prompt_logprobs = options.prompt_logprobs;
        request.constraint = constraint(model, answers.output, tools, &turns)?;
        request
            .validate(engine.model_limits(), engine.config())
            .map_err(|error| ApiError::from(error).or_param(self.param))?;
        Ok((request, turns))
    }
}

/// The parser of answers.
fn turn_format(
    model: &Model,
    prompt_token_ids: &[u32],
    tools: &ToolRequest,
    includes_reasoning: bool,
) -> Result<TurnFormat, ApiError> {
    let known = model.llm.chat_format().map(Chat::answer_format).cloned().unwrap_or_default();
    let tool_calls = known.tool_calls.filter(|_| tools.may_call());
    if tool_calls.is_none() && tools.may_call() {
        let message = format!(
            "tools cannot be called, because the tool-call format of {} is unknown; start the server with \
             --tool-call-parser and one of {}, or send tool_choice \"none\"",
            model.llm.name(),
            ToolCallFormat::names().join(", ")
        );
        return Err(ApiError::unsupported("tools", message));
    }
    Ok(TurnFormat {
        answers: AnswerFormat { tool_calls, reasoning: known.reasoning },
        prompt_end: model.llm.prompt_end(prompt_token_ids),
        tools: Arc::clone(&tools.tools),
        includes_reasoning,
        requires_call: called_tools(tools).is_some(),
        max_calls: (!tools.is_parallel).then_some(1),
        num_earlier_calls: 0,
    })
}

/// The constraint on the answer after the reasoning: required calls, structured output, or either if calls
/// are optional.
fn constraint(
    model: &Model,
    output: Option<StructuredOutput>,
    tools: &ToolRequest,
    turns: &TurnFormat,
) -> Result<Option<Arc<dyn Constraint>>, ApiError> {
    let called = called_tools(tools);
    // A call has no text, and a text format applies to text only.
    let is_empty = |output: &StructuredOutput| called.is_some() && output.is_for_text();
    let output = output.filter(|output| !is_empty(output));
    let calls = |called: &[Tool], is_parallel: bool| {
        let tokenizer = model.llm.tokenizer();
        tokenizer
            .and_then(|tokenizer| turns.answers.call_grammar(tokenizer, called, is_parallel).transpose())
            .transpose()
            .map_err(|error| tools.schema_error(error))?
            .ok_or_else(|| ApiError::unsupported("tools", "tools need a tokenizer, and the model has none"))
    };
    let (constraint, param) = match (output, called) {
        (None, None) => return Ok(None),
        (Some(output), Some(_)) => {
            let param = output.param();
            let message = format!(
                "{param} and tool_choice exclude each other, because a required call does not match it; omit one of \
                 them, or send tool_choice \"auto\" for an answer that is either"
            );
            return Err(ApiError::unsupported(param, message));
        }
        (Some(output), None) => {
            let param = output.param();
            let output = match tools.may_call() {
                true => output.or_calls(&calls(&tools.tools, tools.is_parallel)?)?,
                false => output,
            };
            (output.compile(model)?, param)
        }
        (None, Some((called, is_parallel))) => {
            let grammar = GrammarSpec::Lark(calls(&called, is_parallel)?);
            let grammar: Arc<dyn Constraint> = structured::compile(model, &grammar, "tools")?;
            (grammar, "tool_choice")
        }
    };
    let constraint =
        model.llm.after_reasoning(constraint, turns.answers.reasoning.as_ref(), turns.prompt_end);
    Ok(Some(constraint.map_err(|error| ApiError::from(error).or_param(param))?))
}

/// The tools of which at least one must be called, and whether several calls are allowed.
fn called_tools(tools: &ToolRequest) -> Option<(Vec<Tool>, bool)> {
    match &tools.choice {
        ToolChoice::None | ToolChoice::Auto => None,
        ToolChoice::Required => Some((tools.tools.to_vec(), tools.is_parallel)),
        // A named tool is called exactly once.
        ToolChoice::Named(name) => {
            Some((tools.tools.iter().filter(|tool| tool.name == *name).cloned().collect(), false))
        }
    }
}

/// Refuses a text that is certainly too long before any work on it.
pub(super) fn check_text_len(model: &Model, param: &'static str, num_bytes: usize) -> Result<(), ApiError> {
    if num_bytes <= model.max_text_bytes {
        return Ok(());
    }
    let message = format!(
        "This model's maximum context length is {} tokens. However, {param} has {num_bytes} bytes of text, which is \
         more than that. Please reduce the length of the input messages",
        model.llm.engine().config().max_model_len
    );
    Err(ApiError::from(tinyvllm::Error::new(tinyvllm::ErrorKind::ContextLength, message)).or_param(param))
}

/// The variables in `chat_template_kwargs`, the documents, and the reasoning effort with the field that gives
/// it. `None` if no effort is given.
pub(super) fn template_variables(
    fields: &mut Fields,
    effort: Option<(&'static str, String)>,
) -> Result<Variables, ApiError> {
    let mut variables = Variables { ignored: fields.ignored().cloned(), ..Variables::default() };
    if let Some(given) = fields.object("chat_template_kwargs")? {
        variables.values = given.into_map()?;
        variables.values.retain(|_, value| !value.is_null());
        let path = |name: &String| (format!("chat_template_kwargs.{name}"), vec![name.clone()]);
        variables.given = variables.values.keys().map(path).collect();
    }
    if let Some(name) = RESERVED_VARIABLES.iter().find(|name| variables.values.contains_key(**name)) {
        let param = format!("chat_template_kwargs.{name}");
        let message = format!("{param} is not supported here; use the field {name}");
        return Err(ApiError::unsupported(param, message));
    }
    if let Some(documents) = fields.take("documents")? {
        if !documents.is_array() {
            return Err(wrong_type("documents".to_owned(), &documents, "a list of documents"));
        }
        if variables.values.get("documents").is_some_and(|other| *other != documents) {
            let message = "documents and chat_template_kwargs.documents differ; give one of them";
            return Err(ApiError::invalid("documents", message));
        }
        if documents.as_array().is_some_and(|documents| !documents.is_empty()) {
            variables.given.push(("documents".to_owned(), vec!["documents".to_owned()]));
        }
        variables.values.entry("documents").or_insert(documents);
    }
    let Some((param, effort)) = effort else { return Ok(variables) };
    if !EFFORTS.contains(&effort.as_str()) {
        let [others @ .., last] = EFFORTS;
        let expected = format!("{} or {last}", others.join(", "));
        return Err(wrong_type(param.to_owned(), &effort.into(), &expected));
    }
    let other = variables.values.get("reasoning_effort");
    if other.is_some_and(|other| *other != effort) {
        let message = format!("{param} and chat_template_kwargs.reasoning_effort differ; give one of them");
        return Err(ApiError::invalid(param, message));
    }
    let mut names = vec!["reasoning_effort".to_owned()];
    if effort == "none" {
        variables.switch_thinking(false);
        names.extend(REASONING_SWITCHES.map(str::to_owned));
    }
    variables.given.push((param.to_owned(), names));
    variables.values.insert("reasoning_effort".to_owned(), effort.into());
    Ok(variables)
}
