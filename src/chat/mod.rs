//! Conversations: from messages to the token ids of a prompt.
//!
//! Invariant: only a chat template produces special tokens. A message that spells one is encoded as its letters. There
//! is no built-in template: a model without one is an error, because a guessed format gives answers that are subtly
//! bad. This module does not depend on the engine.

mod answer;
mod jinja;
mod left_out;
mod mask;
mod message;
mod probe;
mod template;

use std::sync::{Mutex, PoisonError};

use serde_json::{Map, Value, json};

use self::answer::Detected;
use self::jinja::{Limits, Spent};
use self::mask::Mask;
use self::probe::Probe;
use crate::tokenizer::{SpecialTokens, Tokenizer};
use crate::{Error, ErrorKind, Result};

pub use self::answer::{
    AnswerEvent, AnswerFormat, AnswerParser, FormatChoice, Passage, Passages, PromptEnd, ReasoningFormat,
    Tool, ToolCallFormat,
};
pub use self::jinja::{Account, format_time, on_account};
pub use self::message::{Content, Message};
pub use self::template::ChatTemplate;

/// The variables that templates have for reasoning, true if the model may: Qwen's, GLM's and Youtu's, and that of
/// later DeepSeek models and Granite.
pub const REASONING_SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// The name of the template for requests with tools.
const TOOL_USE: &str = "tool_use";

/// How a conversation is made into a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatOptions {
    /// Whether the prompt ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// End the prompt where the last message ends, so that the model continues it.
    pub continue_final_message: bool,
    /// Descriptions of the tools that the model may call: a list of objects.
    pub tools: Option<Value>,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            continue_final_message: false,
            tools: None,
            variables: Map::new(),
        }
    }
}

/// A conversation as a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedChat {
    /// The prompt.
    pub token_ids: Vec<u32>,
    /// The indices of messages that the template leaves out.
    pub left_out: Vec<usize>,
}

/// Appended to the last message while a prompt that ends there is rendered. The last one in the text counts, so
/// messages may have it too.
const MESSAGE_END: char = '\u{10FFFD}';

/// The user's overrides of a model's chat format.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ChatConfig {
    /// The source of a template, instead of the model's own.
    pub template: Option<String>,
    /// The file that it is from, for errors.
    pub template_file: Option<String>,
    /// The format in which the model calls tools.
    pub tool_calls: FormatChoice<ToolCallFormat>,
    /// The format in which it reasons.
    pub reasoning: FormatChoice<ReasoningFormat>,
}

/// A model's chat format.
#[derive(Debug)]
pub struct Chat {
    answers: AnswerFormat,
    detected: Detected,
    /// No tool-call format was found or chosen.
    lacks_syntax: bool,
    template: ChatTemplate,
    /// The template for requests with tools, where the model has a separate one, or why that one is of no use.
    tool_use: Option<std::result::Result<ChatTemplate, String>>,
    /// The special tokens that templates know by name.
    tokens: Map<String, Value>,
    probe: Probe,
    /// The cost of trying the template, during the trial.
    trials: Option<Mutex<Spent>>,
}

impl Chat {
    /// The chat format that came with the tokenizer.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model has no chat template; [`ErrorKind::InvalidModel`] if the
    /// template has a syntax error or is no text.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self> {
        Self::with_config(tokenizer, &ChatConfig::default())
    }

    /// The same, changed by `config`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_config(tokenizer: &Tokenizer, config: &ChatConfig) -> Result<Self> {
        let own = tokenizer.chat_template();
        let source = config.template.as_deref().or(own).ok_or_else(|| {
            match tokenizer.default_chat_template_problem() {
                Some(problem) => Error::invalid_model(problem),
                None => Error::new(ErrorKind::Unsupported, "the model has no chat template"),
            }
            .with_hint("send the prompt as it is, with --raw, or give a template with --chat-template")
        })?;
        let name = match (&config.template, &config.template_file) {
            (None, _) => "the model's chat template".to_owned(),
            (Some(_), None) => "the chat template".to_owned(),
            (Some(_), Some(file)) => format!("the chat template {file}"),
        };
        // A given template replaces all of the model's.
        let tool_use = match (&config.template, tokenizer.named_chat_template(TOOL_USE)) {
            (Some(_), _) => None,
            (None, Some(source)) => {
                Some(ChatTemplate::named(source, &name).map_err(|error| error.message().to_owned()))
            }
            (None, None) => tokenizer.chat_template_problem(TOOL_USE).map(Err),
        };
        let of_tools = tool_use.as_ref().and_then(|template| template.as_ref().ok());
        let sources = [source, of_tools.map_or("", ChatTemplate::source)].concat();
        let mut chat = Self {
            answers: AnswerFormat::default(),
            detected: Detected::Nothing,
            lacks_syntax: false,
            template: ChatTemplate::named(source, &name)?,
            tool_use,
            tokens: tokenizer.template_tokens(),
            probe: Probe::default(),
            trials: Some(Mutex::default()),
        };
        chat.probe = probe::probe(&mut chat);
        chat.detected = ToolCallFormat::detect(&chat, &sources, tokenizer);
        chat.lacks_syntax = config.tool_calls == FormatChoice::Auto && chat.detected.syntax().is_none();
        chat.answers = AnswerFormat {
            tool_calls: match &config.tool_calls {
                FormatChoice::Auto => chat.detected.syntax(),
                FormatChoice::None => None,
                FormatChoice::Named(format) => Some(format.clone().fitting(&sources, tokenizer)),
            },
            reasoning: match &config.reasoning {
                FormatChoice::Auto => ReasoningFormat::detect(&chat, &sources, tokenizer),
                FormatChoice::None => None,
                FormatChoice::Named(format) => Some(format.clone()),
            },
        };
        chat.trials = None;
        Ok(chat)
    }

    /// The defect of an unusable template: it fails, or omits the user's text.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        self.probe.problem.as_deref()
    }

    /// The conversations that the template does not accept, in a line.
    #[must_use]
    pub fn notice(&self) -> Option<String> {
        let mut notices = Vec::new();
        if !self.probe.refused.is_empty() {
            notices.push(format!("the chat template does not accept {}", self.probe.refused.join(", ")));
        }
        if let Err(error) = self.template_for_tools() {
            notices.push(format!(
                "{}; requests with tools are refused until --chat-template names another template",
                error.message()
            ));
            return Some(notices.join("; "));
        }
        let unknown = match self.detected {
            _ if !self.lacks_syntax => None,
            Detected::Unread => Some("writes calls in an unknown format"),
            _ => self.uses_tools().then_some("lists tools and not the format of calls"),
        };
        notices.extend(unknown.map(|why| {
            format!("the chat template {why}, so tools cannot be called (--tool-call-parser names a format)")
        }));
        (!notices.is_empty()).then(|| notices.join("; "))
    }

    /// The formats of the model's answers.
    #[must_use]
    pub fn answer_format(&self) -> &AnswerFormat {
        &self.answers
    }

    /// Whether the template writes calls of tools that were made.
    #[must_use]
    pub fn writes_calls(&self) -> bool {
        matches!(self.detected, Detected::Read(_) | Detected::Unread)
    }

    /// How the model calls tools and how it reasons, in a line.
    #[must_use]
    pub fn formats(&self) -> String {
        format!("tool calls {}, reasoning {}", self.answers.tool_calls_line(), self.answers.reasoning_line())
    }

    /// The source of the template, as its authors or the operator wrote it.
    #[must_use]
    pub fn template_source(&self) -> &str {
        self.template.source()
    }

    /// Whether the template writes tools.
    #[must_use]
    pub fn uses_tools(&self) -> bool {
        self.tool_use.is_some() || self.template.uses("tools")
    }

    /// Whether the template writes the `name` of a message of the user or the assistant.
    #[must_use]
    pub fn writes_names(&self) -> bool {
        self.probe.writes_names
    }

    /// Whether the template reads this variable.
    #[must_use]
    pub fn reads(&self, variable: &str) -> bool {
        [Some(&self.template), self.tool_use.as_ref().and_then(|template| template.as_ref().ok())]
            .into_iter()
            .flatten()
            .any(|template| template.uses(variable))
    }

    /// The variables of the template with which the model reasons before its answer, or does not.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the template renders the same prompt with and without each switch that templates
    /// are known to have.
    pub fn reasoning_variables(&self, is_wanted: bool) -> Result<Map<String, Value>> {
        let render = |name: &str, value: bool| {
            let variables = Map::from_iter([(name.to_owned(), value.into())]);
            self.render(&[Message::new("user", "?")], &ChatOptions { variables, ..ChatOptions::default() })
        };
        let mut found = Map::new();
        for name in REASONING_SWITCHES {
            if render(name, true)? != render(name, false)? {
                found.insert(name.to_owned(), is_wanted.into());
            }
        }
        if !found.is_empty() {
            return Ok(found);
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "the chat template has no switch for reasoning: it writes the same prompt with and without {}",
                REASONING_SWITCHES.join(" and ")
            ),
        )
        .with_hint("omit --no-thinking, or give the instruction of the model's authors with --system"))
    }

    /// The prompt as text, for people to read. In this text a message that spells a special token cannot
    /// be distinguished from the template's own tokens; [`Self::encode`] keeps them apart.
    ///
    /// # Errors
    /// If the template refuses the messages, fails, runs too long or writes too much.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String> {
        self.render_json(Value::Object(self.context(messages, options)), options)
    }

    /// The token ids of the prompt, with the tokens that the model expects at the beginning exactly once.
    ///
    /// # Errors
    /// As [`Self::render`], and [`Tokenizer::encode`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<Vec<u32>> {
        Ok(self.encode_reporting(tokenizer, messages, options)?.token_ids)
    }

    /// The same, with the messages that the template leaves out.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_reporting(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<EncodedChat> {
        self.encode_within(tokenizer, messages, options, (usize::MAX, usize::MAX))
    }

    /// The same if the prompt has at most this many bytes, the maximum for a context of this many tokens.
    pub(crate) fn encode_within(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &ChatOptions,
        (max_bytes, max_tokens): (usize, usize),
    ) -> Result<EncodedChat> {
        let mut context = self.context(messages, options);
        let mut mask = Mask::new(tokenizer, [self.template(options)?.source()]);
        for name in ["messages", "tools"].into_iter().chain(options.variables.keys().map(String::as_str)) {
            if let Some(value) = context.get_mut(name) {
                mask.hide(value)?;
            }
        }
        let json = Value::Object(context);
        let input_bytes = template::num_bytes(&json);
        let rendered = self.render_json(json, options)?;
        if rendered.len() > max_bytes {
            return Err(Error::new(
                ErrorKind::ContextLength,
                format!(
                    "This model's maximum context length is {max_tokens} tokens. However, the chat template makes a \
                     prompt of {} bytes, which certainly are more tokens. Please reduce the length of the messages",
                    rendered.len()
                ),
            )
            .with_hint(template::WAY_OUT));
        }
        // Memory beyond the conversation is not charged to an account yet.
        let (ids, left_out) = jinja::charged_for_text(rendered.len().saturating_sub(input_bytes), || {
            if mask.is_empty() {
                let ids = tokenizer.encode(&rendered, SpecialTokens::Parse)?;
                return Ok((ids, self.left_out(messages, options, &rendered)));
            }
            let (text, protected) = mask.restore(&rendered);
            let ids = tokenizer.encode_protected(&text, &protected)?;
            Ok((ids, self.left_out(messages, options, &text)))
        })?;
        Ok(EncodedChat { token_ids: tokenizer.with_prefix(ids), left_out })
    }

    fn template(&self, options: &ChatOptions) -> Result<&ChatTemplate> {
        if options.tools.is_some() { self.template_for_tools() } else { Ok(&self.template) }
    }

    fn template_for_tools(&self) -> Result<&ChatTemplate> {
        match &self.tool_use {
            None => Ok(&self.template),
            Some(Ok(template)) => Ok(template),
            Some(Err(why)) => Err(Error::new(
                ErrorKind::Unsupported,
                format!("the model's template for tools, {TOOL_USE}, is of no use: {why}"),
            )
            .with_hint("omit the tools, or replace the templates with --chat-template FILE")),
        }
    }

    /// All tries together have the budget of one rendering; during the trial of the template, all renderings do.
    fn render_json(&self, json: Value, options: &ChatOptions) -> Result<String> {
        match &self.trials {
            Some(spent) => {
                let mut spent = spent.lock().unwrap_or_else(PoisonError::into_inner);
                self.render_within(json, options, &Limits::for_trials(), &mut spent)
            }
            None => {
                let limits = template::limits_for(&json);
                self.render_within(json, options, &limits, &mut Spent::default())
            }
        }
    }

    fn render_within(
        &self,
        mut json: Value,
        options: &ChatOptions,
        limits: &Limits,
        spent: &mut Spent,
    ) -> Result<String> {
        let template = self.template(options)?;
        let is_call = |message: &Value| message.get("tool_calls").is_some_and(Value::is_array);
        let has_calls =
            json.get("messages").and_then(Value::as_array).is_some_and(|all| all.iter().any(is_call));
        let mut rendered = template.render_within(&json, limits, spent);
        // An expensive template will not become cheaper.
        let mut try_again = |rendered: Result<String>, json: &Value| match spent.over() {
            Some(_) => rendered,
            None => template.render_within(json, limits, spent).or(rendered),
        };
        // Calls may be written only where there is no content, so their arguments are tried first.
        if rendered.is_err() && has_calls {
            let mut with_text = json.clone();
            if write_arguments_as_text(&mut with_text) {
                rendered = try_again(rendered, &with_text);
            }
        }
        // A template without support for turns without content gets the text that others render in the same way.
        let empty = self.content(String::new());
        for fill in [Value::Null, empty] {
            if rendered.is_err() && fill_contents(&mut json, &fill) {
                rendered = try_again(rendered, &json);
            }
        }
        // Arguments of calls are objects, as most templates expect. Some insert them into a text unchanged.
        if rendered.is_err() && has_calls && write_arguments_as_text(&mut json) {
            rendered = try_again(rendered, &json);
        }
        let mut rendered = rendered?;
        if options.continue_final_message {
            let end = rendered.rfind(MESSAGE_END).ok_or_else(|| {
                Error::new(
                    ErrorKind::Unsupported,
                    "the chat template changes the text of the last message, so it cannot be continued",
                )
            })?;
            rendered.truncate(end);
        }
        Ok(rendered)
    }

    /// A text in the template's format.
    fn content(&self, text: String) -> Value {
        if self.probe.wants_content_parts { json!([{"type": "text", "text": text}]) } else { text.into() }
    }

    fn context(&self, messages: &[Message], options: &ChatOptions) -> Map<String, Value> {
        let last = messages.len().saturating_sub(1);
        let messages = messages.iter().enumerate().map(|(index, message)| {
            let mut fields = Map::new();
            fields.insert("role".to_owned(), message.role.clone().into());
            let mut content = message.content.clone();
            if options.continue_final_message && index == last {
                content.text_mut().push(MESSAGE_END);
            }
            let wants_null =
                self.probe.wants_null && content.is_empty() && message.extra.contains_key("tool_calls");
            let content = match content {
                _ if wants_null => Some(Value::Null),
                Content::Text(text) => Some(self.content(text)),
                Content::Null => Some(Value::Null),
                Content::Missing => None,
            };
            fields.extend(content.map(|content| ("content".to_owned(), content)));
            fields.extend(message.extra.clone());
            Value::Object(fields)
        });
        // Values of the request take precedence, as in transformers.
        let mut context = self.tokens.clone();
        context.extend(options.variables.clone());
        context.insert("messages".to_owned(), messages.collect());
        context.insert("tools".to_owned(), options.tools.clone().unwrap_or(Value::Null));
        context.entry("documents").or_insert(Value::Null);
        context.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        context
    }
}

/// Sets this content for all messages that have none, and returns whether there were any. Those without the field are
/// tried first, and get `null`.
fn fill_contents(context: &mut Value, content: &Value) -> bool {
    let messages = context.get_mut("messages").and_then(Value::as_array_mut);
    let mut found = false;
    for message in messages.into_iter().flatten().filter_map(Value::as_object_mut) {
        let is_empty = message.get("content").is_none_or(|old| old.is_null() && !content.is_null());
        if is_empty {
            message.insert("content".to_owned(), content.clone());
            found = true;
        }
    }
    found
}

/// Converts the arguments of all calls to texts, and returns whether there were any.
fn write_arguments_as_text(context: &mut Value) -> bool {
    let messages = context.get_mut("messages").and_then(Value::as_array_mut);
    let calls =
        messages.into_iter().flatten().filter_map(|message| message.get_mut("tool_calls")?.as_array_mut());
    let mut found = false;
    for call in calls.flatten() {
        if let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments"))
            && arguments.is_object()
        {
            *arguments = jinja::json_text(arguments).into();
            found = true;
        }
    }
    found
}

/// The history of an interactive chat.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    system: Option<String>,
    messages: Vec<Message>,
}

impl Conversation {
    /// An empty conversation, or one that begins with a system message.
    #[must_use]
    pub fn new(system: Option<String>) -> Self {
        let mut conversation = Self { system, messages: Vec::new() };
        conversation.reset();
        conversation
    }

    /// Forgets everything but the system message.
    pub fn reset(&mut self) {
        self.messages = self.system.iter().map(|text| Message::new("system", text)).collect();
    }

    /// Changes the system message, or goes without one from here on.
    pub fn set_system(&mut self, system: Option<String>) {
        let num_kept = usize::from(self.system.is_some());
        let first = system.iter().map(|text| Message::new("system", text));
        self.messages.splice(..num_kept, first);
        self.system = system;
    }

    /// Adds a user message.
    pub fn push_user(&mut self, content: impl Into<String>) {
        self.messages.push(Message::new("user", content));
    }

    /// Adds a model's answer.
    pub fn push_assistant(&mut self, content: impl Into<String>) {
        self.messages.push(Message::new("assistant", content));
    }

    /// Takes the last turn back, for instance a question that could not be answered. The system message
    /// stays.
    pub fn pop(&mut self) -> Option<Message> {
        let num_kept = usize::from(self.system.is_some());
        if self.messages.len() > num_kept { self.messages.pop() } else { None }
    }

    /// All messages, oldest first.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod tests;
