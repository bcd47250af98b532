//! `tinyvllm chat`: a conversation on the terminal, or one question a line from a pipe.

mod command;
mod file;
mod input;
mod settings;

use std::cell::Cell;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tinyvllm::chat::{AnswerFormat, ChatOptions, Content, Conversation};
use tinyvllm::engine::{FinishReason, Request};
use tinyvllm::llm::{Llm, LlmOptions, TextStream};
use tinyvllm::sampling::{SamplingDefaults, SamplingParams};
use tinyvllm::{Error, ErrorKind};

use self::command::{Command, Entry, HELP};
use self::input::Input;
use super::answer::AnswerRender;
use super::console::{Console, print_error};
use super::flags::{AnswerArgs, EngineArgs, JsonArgs, MessageArgs, ModelArgs, PositionalModel};
use super::interrupt::Interrupt;
use super::keyboard::{self, Mode};
use super::load::{chat_options, encode_noting, llm_options, load, merge_model, note_left_out};
use super::progress::telling_prompt;
use super::render::{Finished, render_request};
use super::text_file;
use super::timings::{Summary, Timings, Usage};

#[derive(Debug, Clone, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) positional: PositionalModel,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) answers: AnswerArgs,
    #[command(flatten)]
    pub(crate) output: JsonArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) messages: MessageArgs,
}

/// Runs the command.
///
/// # Errors
/// As [`chat`].
pub(crate) fn run(args: &ChatArgs) -> anyhow::Result<ExitCode> {
    let model = merge_model(&args.positional, &args.model)?;
    let console = Console::new(args.messages);
    let options = llm_options(&args.answers, &args.engine, console)?;
    chat(&model, &options, &args.answers, args.output, console)
}

/// Chats until the user leaves.
///
/// # Errors
/// If the model cannot be loaded or has no chat template, or input or output fails. Other errors of a
/// question are reported, and the chat continues.
pub(crate) fn chat(
    model: &ModelArgs,
    options: &LlmOptions,
    args: &AnswerArgs,
    output: JsonArgs,
    console: Console,
) -> anyhow::Result<ExitCode> {
    args.sampling.params(&SamplingDefaults::default()).validate(usize::MAX)?;
    keyboard::restore_on_signals();
    let interrupt = Interrupt::install()?;
    let llm = load(model, options, console)?;
    llm.require_tokenizer()?;
    let format = llm.require_chat()?.answer_format().clone();
    let params = args.sampling.params(llm.sampling_defaults());
    let options = chat_options(&llm, args.thinking)?;
    let mut answers = Answers {
        llm: &llm,
        format,
        options,
        params,
        interrupt,
        console,
        is_json: output.json,
        has_left_out: Cell::default(),
    };
    let mut input = Input::open(console)?;
    let mut talk = Talk { conversation: Conversation::new(args.system.system.clone()), attached: Vec::new() };
    while let Some(entry) = input.next_entry()? {
        match Entry::parse(&entry) {
            Entry::Nothing => {}
            Entry::Wrong(message) => console.reply(message),
            Entry::Question(question) => {
                talk.ask(question);
                answers.answer(&mut talk.conversation)?;
            }
            Entry::Command(Command::Quit) => break,
            Entry::Command(command) => {
                // Errors are printed, and the chat continues.
                if let Err(error) = answers.obey(&command, &mut talk) {
                    print_error(&error);
                }
            }
        }
    }
    input.save_history(console);
    Ok(ExitCode::SUCCESS)
}

/// The conversation, and files for the next question.
struct Talk {
    conversation: Conversation,
    attached: Vec<String>,
}

impl Talk {
    fn ask(&mut self, question: &str) {
        let mut text = self.attached.drain(..).map(|text| text + "\n\n").collect::<String>();
        text.push_str(question);
        self.conversation.push_user(text);
    }
}

/// The settings of answers.
struct Answers<'a> {
    llm: &'a Llm,
    format: AnswerFormat,
    options: ChatOptions,
    params: SamplingParams,
    interrupt: Interrupt,
    console: Console,
    /// Whether answers are JSON for programs.
    is_json: bool,
    /// Whether a message that the template leaves out was reported.
    has_left_out: Cell<bool>,
}

impl Answers<'_> {
    /// Executes a command.
    fn obey(&mut self, command: &Command<'_>, talk: &mut Talk) -> anyhow::Result<()> {
        let console = self.console;
        match *command {
            Command::Quit => {}
            Command::Help => console.reply(HELP),
            Command::Reset => {
                talk.conversation.reset();
                talk.attached.clear();
                console.reply("the conversation is empty");
            }
            Command::Show => console.reply(self.description(talk)),
            Command::Set("system", text) => self.obey(&Command::System(Some(text)), talk)?,
            Command::Set("think", value) => {
                self.set_thinking(value)?;
                console.reply(format_args!("think is {}", self.thinking()));
            }
            Command::Set(name, value) => {
                console.reply(settings::set(&mut self.params, name, value)?);
            }
            Command::System(text) => {
                talk.conversation.set_system(text.map(str::to_owned));
                console.reply(match text {
                    Some(_) => "the system prompt is changed",
                    None => "the system prompt is removed",
                });
            }
            Command::Read(path) => {
                let text = text_file::read(Path::new(path))?;
                console.reply(format_args!("{} bytes of {path} will precede the next question", text.len()));
                talk.attached.push(text);
            }
            Command::Regenerate => {
                if talk.conversation.messages().last().is_none_or(|last| last.role != "assistant") {
                    return Err(Error::invalid_request("there is no answer yet").into());
                }
                let before = talk.conversation.clone();
                talk.conversation.pop();
                // With the same seed, the answer would be the same.
                self.params.seed = self.params.seed.map(|seed| seed.wrapping_add(1));
                self.answer(&mut talk.conversation)?;
                if talk.conversation.messages().len() < before.messages().len() {
                    console.reply("the previous answer is kept");
                    talk.conversation = before;
                }
            }
            Command::Save(path) => {
                file::save(Path::new(path), self.llm.name(), talk.conversation.messages())?;
                console.reply(format_args!("saved the conversation to {path}"));
            }
            Command::Load(path) => {
                talk.conversation = file::load(Path::new(path))?;
                let num_messages = talk.conversation.messages().len();
                console.reply(format_args!("loaded {num_messages} messages from {path}"));
            }
        }
        Ok(())
    }

    /// Switches reasoning on or off, or leaves it to the template.
    fn set_thinking(&mut self, value: &str) -> anyhow::Result<()> {
        let is_wanted = match value {
            "on" | "true" | "yes" => true,
            "off" | "false" | "no" => false,
            value if settings::is_none(value) => {
                self.options.variables.clear();
                return Ok(());
            }
            _ => {
                let message = format!("think is on, off or none, not {value}");
                return Err(Error::invalid_request(message).into());
            }
        };
        let variables = self.llm.require_chat()?.reasoning_variables(is_wanted);
        self.options.variables = variables
            .map_err(|error| error.with_hint("leave it as it is, or instruct the model with /system"))?;
        Ok(())
    }

    /// Whether the model reasons before it answers, as far as the user decided it.
    fn thinking(&self) -> &'static str {
        match self.options.variables.values().next().and_then(Value::as_bool) {
            Some(true) => "on",
            Some(false) => "off",
            None => match self.llm.require_chat().and_then(|chat| chat.reasoning_variables(true)) {
                Ok(_) => "none: the chat template decides",
                Err(_) => "none: the chat template has no switch",
            },
        }
    }

    /// The model, the settings and the conversation.
    fn description(&self, talk: &Talk) -> String {
        let messages = talk.conversation.messages();
        let num_tokens = self.llm.encode_chat(messages, &self.options).map_or(0, |ids| ids.len());
        let system = match messages.first() {
            Some(first) if first.role == "system" => match &first.content {
                Content::Text(text) => text.as_str(),
                Content::Null | Content::Missing => "none",
            },
            _ => "none",
        };
        let window = self.llm.engine().config().max_model_len;
        format!(
            "model               {}\nconversation        {} messages, {num_tokens} of {window} tokens\n\
             system              {system}\nthink               {}\n{}",
            self.llm.name(),
            messages.len(),
            self.thinking(),
            settings::list(&self.params)
        )
    }

    /// Answers the last message. If that fails, removes it and reports the error.
    fn answer(&self, conversation: &mut Conversation) -> anyhow::Result<()> {
        let Self { llm, format, console, .. } = self;
        let (stream, prompt) = match self.submit(conversation) {
            Ok(request) => request,
            Err(error) => {
                conversation.pop();
                let error = match error.kind() {
                    ErrorKind::ContextLength => error.with_hint("shorten it with /reset"),
                    _ => error,
                };
                print_error(&error.into());
                return Ok(());
            }
        };
        let guard = self.interrupt.guard(vec![stream.abort_handle()]);
        // Keys that are typed now are not echoed into the answer. They are read after it.
        let quiet = Mode::enter();
        let prompt_end = llm.prompt_end(&prompt);
        let events = telling_prompt(*console, stream);
        let (outcomes, content) = match self.is_json {
            false => {
                let mut output = AnswerRender::new(io::stdout(), format.clone(), prompt_end);
                (render_request(events, 1, (0, &prompt), &mut output)?, output.into_content())
            }
            true => {
                let mut output = AnswerRender::hidden(format.clone(), prompt_end);
                let outcomes = render_request(events, 1, (0, &prompt), &mut output)?;
                write_json(&output, &outcomes)?;
                (outcomes, output.into_content())
            }
        };
        drop((guard, quiet));
        let mut summary = Summary::default();
        for finished in outcomes {
            summary.add(finished.stats);
            match finished.reason {
                FinishReason::Error => {
                    let message = finished.error.unwrap_or_default();
                    print_error(&Error::internal(format!("the answer failed: {message}")).into());
                }
                FinishReason::Length => {
                    console.note("(the answer is cut off: the token limit is reached)");
                }
                FinishReason::Abort => console.note("(stopped)"),
                FinishReason::Stop => {}
            }
            console.detail(summary.line(finished.stats.decode_time));
        }
        // A partial answer is kept, because the model said it. A question without any answer is removed,
        // because templates need alternating roles. Reasoning is not kept: models are trained without it in
        // earlier turns.
        match content {
            content if content.is_empty() => {
                conversation.pop();
            }
            content => conversation.push_assistant(content),
        }
        Ok(())
    }

    fn submit(&self, conversation: &Conversation) -> tinyvllm::Result<(TextStream, Vec<u32>)> {
        let messages = conversation.messages();
        let encode = || self.llm.encode_chat_reporting(messages, &self.options);
        let encoded = encode_noting(self.console, encode)?;
        // They are part of every later prompt, too.
        if !encoded.left_out.is_empty() && !self.has_left_out.replace(true) {
            note_left_out(self.console, messages, &encoded);
        }
        let prompt = encoded.token_ids;
        let mut params = self.params.clone();
        params.max_tokens = self.llm.max_tokens(prompt.len(), &params);
        let request = Request { prompt_progress: true, ..Request::new(prompt.clone(), params) };
        Ok((self.llm.submit_request(request, &self.format)?, prompt))
    }
}

/// Writes an answer as JSON. Fields may be added but never renamed.
fn write_json(answer: &AnswerRender<io::Sink>, outcomes: &[Finished]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    for finished in outcomes {
        let line = json!({
            "content": answer.content(),
            "reasoning": answer.reasoning(),
            "finish_reason": finished.reason.name(),
            "error": finished.error,
            "usage": Usage::from(&finished.stats),
            "timings": Timings::from(&finished.stats),
        });
        writeln!(out, "{line}")?;
    }
    Ok(out.flush()?)
}
