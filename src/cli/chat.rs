//! `tinyvllm chat`: a conversation on the terminal, or one question a line from a pipe.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Behavior, Config, Editor};
use tinyvllm::chat::{AnswerFormat, ChatOptions, Conversation};
use tinyvllm::engine::FinishReason;
use tinyvllm::llm::{Llm, LlmOptions, TextStream};
use tinyvllm::sampling::{SamplingDefaults, SamplingParams};
use tinyvllm::{Error, ErrorKind};

use super::answer::AnswerRender;
use super::args::{ChatArgs, ModelArgs, SamplingArgs, SystemArgs, ThinkingArgs};
use super::console::{Console, print_error};
use super::interrupt::Interrupt;
use super::load::{chat_config, chat_options, encode_noting, load, merge_model};
use super::render::render_request;
use super::timings::Summary;

const HELP: &str = "\
/reset   forget the conversation
/quit    leave (also /exit or Ctrl-D)
/help    show this
Ctrl-C   stop the answer";

/// Runs the command.
///
/// # Errors
/// As [`chat`].
pub(crate) fn run(args: &ChatArgs) -> anyhow::Result<ExitCode> {
    let model = merge_model(&args.positional, &args.model)?;
    let options = LlmOptions {
        chat: chat_config(&args.template)?,
        generation_config: args.generation.generation_config.clone(),
        ..args.engine.options()
    };
    chat(&model, &options, &args.sampling, &args.system, args.thinking, Console::new(args.messages))
}

/// Chats until the user leaves.
///
/// # Errors
/// If the model cannot be loaded or has no chat template, or reading or writing fails. A question that
/// cannot be answered is reported, and the chat goes on.
pub(crate) fn chat(
    model: &ModelArgs,
    options: &LlmOptions,
    sampling: &SamplingArgs,
    system: &SystemArgs,
    thinking: ThinkingArgs,
    console: Console,
) -> anyhow::Result<ExitCode> {
    sampling.params(&SamplingDefaults::default()).validate(usize::MAX)?;
    let interrupt = Interrupt::install()?;
    let llm = load(model, options, console)?;
    llm.require_tokenizer()?;
    let format = llm.require_chat()?.answer_format().clone();
    let params = sampling.params(llm.sampling_defaults());
    let answers =
        Answers { llm: &llm, format, options: chat_options(&llm, thinking)?, params, interrupt, console };
    let mut input = Input::open(console)?;
    let mut conversation = Conversation::new(system.system.clone());
    while let Some(line) = input.next_line()? {
        match Entry::parse(&line) {
            Entry::Nothing => {}
            Entry::Quit => break,
            Entry::Help => console.reply(HELP),
            Entry::Reset => {
                conversation.reset();
                console.reply("the conversation is forgotten");
            }
            Entry::Unknown(command) => {
                console.reply(format_args!("there is no command {command}; /help lists them"));
            }
            Entry::Question(question) => {
                conversation.push_user(question);
                answers.answer(&mut conversation)?;
            }
        }
    }
    input.save_history(console);
    Ok(ExitCode::SUCCESS)
}

/// What answers are made with.
struct Answers<'a> {
    llm: &'a Llm,
    format: AnswerFormat,
    options: ChatOptions,
    params: SamplingParams,
    interrupt: Interrupt,
    console: Console,
}

impl Answers<'_> {
    /// Answers the last message, or takes it back and says why it could not be answered.
    fn answer(&self, conversation: &mut Conversation) -> anyhow::Result<()> {
        let Self { llm, format, console, .. } = self;
        let (stream, prompt) = match self.submit(conversation) {
            Ok(request) => request,
            Err(error) => {
                conversation.pop();
                let error = match error.kind() {
                    ErrorKind::ContextLength => error.with_hint("make room with /reset"),
                    _ => error,
                };
                print_error(&error.into());
                return Ok(());
            }
        };
        let guard = self.interrupt.guard(vec![stream.abort_handle()]);
        let mut output = AnswerRender::new(io::stdout(), format.clone(), llm.prompt_end(&prompt));
        let outcomes = render_request(stream, 1, (0, &prompt), &mut output)?;
        drop(guard);
        let mut summary = Summary::default();
        for finished in outcomes {
            summary.add(finished.stats);
            match finished.reason {
                FinishReason::Error => {
                    let message = finished.error.unwrap_or_default();
                    print_error(&Error::internal(format!("the answer failed: {message}")).into());
                }
                FinishReason::Length => {
                    console.note("(the answer ends here: its limit of tokens is reached)");
                }
                FinishReason::Abort => console.note("(stopped)"),
                FinishReason::Stop => {}
            }
            console.detail(summary.line(finished.stats.decode_time));
        }
        // Half an answer is still what the model said; a question without any answer is taken back, because
        // templates want the roles to alternate. What was reasoned is not repeated: models are trained without it.
        match output.into_content() {
            content if content.is_empty() => {
                conversation.pop();
            }
            content => conversation.push_assistant(content),
        }
        Ok(())
    }

    fn submit(&self, conversation: &Conversation) -> tinyvllm::Result<(TextStream, Vec<u32>)> {
        let encode = || self.llm.encode_chat(conversation.messages(), &self.options);
        let prompt = encode_noting(self.console, encode)?;
        let mut params = self.params.clone();
        params.max_tokens = self.llm.max_tokens(prompt.len(), &params);
        Ok((self.llm.submit_with(prompt.clone(), params, &self.format)?, prompt))
    }
}

/// What a line means.
#[derive(Debug, PartialEq, Eq)]
enum Entry<'a> {
    Nothing,
    Quit,
    Help,
    Reset,
    Unknown(&'a str),
    Question(&'a str),
}

impl<'a> Entry<'a> {
    fn parse(line: &'a str) -> Self {
        let line = line.trim();
        // A question may begin with a path; commands are single words.
        let is_command = line.starts_with('/') && line[1..].chars().all(char::is_alphabetic);
        match line {
            "" => Self::Nothing,
            "/quit" | "/exit" => Self::Quit,
            "/help" | "/" => Self::Help,
            "/reset" => Self::Reset,
            command if is_command => Self::Unknown(command),
            question => Self::Question(question),
        }
    }
}

/// Where questions come from.
enum Input {
    Terminal { editor: Box<Editor<(), FileHistory>>, history: Option<PathBuf>, console: Console },
    Pipe(io::Lines<io::StdinLock<'static>>),
}

impl Input {
    fn open(console: Console) -> anyhow::Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Pipe(io::stdin().lines()));
        }
        // With standard output going to a file the prompt belongs on the terminal all the same.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().behavior(behavior).auto_add_history(true).build();
        let mut editor = Editor::with_config(config).context("cannot use the terminal")?;
        let history = history_path();
        if let Some(path) = &history {
            // There is none before the first chat.
            let _ = editor.load_history(path);
        }
        console.note("/help lists the commands, Ctrl-D leaves");
        Ok(Self::Terminal { editor: Box::new(editor), history, console })
    }

    /// The next line; `None` when the user leaves.
    fn next_line(&mut self) -> anyhow::Result<Option<String>> {
        match self {
            Self::Pipe(lines) => lines.next().transpose().context("cannot read standard input"),
            Self::Terminal { editor, console, .. } => loop {
                match editor.readline("> ") {
                    Ok(line) => return Ok(Some(line)),
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(ReadlineError::Interrupted) => console.note("(Ctrl-D or /quit leaves)"),
                    Err(error) => return Err(error).context("cannot read from the terminal"),
                }
            },
        }
    }

    fn save_history(&mut self, console: Console) {
        let Self::Terminal { editor, history: Some(path), .. } = self else { return };
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        if let Err(error) = folder.map_err(ReadlineError::from).and_then(|()| editor.save_history(path)) {
            console.detail(format_args!("cannot save the history in `{}`: {error}", path.display()));
        }
    }
}

/// `$XDG_DATA_HOME/tinyvllm/chat_history`, by default in `~/.local/share`.
fn history_path() -> Option<PathBuf> {
    let data = std::env::var_os("XDG_DATA_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    let data = data.or_else(|| std::env::home_dir().map(|home| home.join(".local").join("share")))?;
    Some(data.join("tinyvllm").join("chat_history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_questions() {
        let check = |line: &str, expected: Entry<'_>| assert_eq!(Entry::parse(line), expected, "{line:?}");
        check("  ", Entry::Nothing);
        check("/quit", Entry::Quit);
        check(" /exit ", Entry::Quit);
        check("/help", Entry::Help);
        check("/reset", Entry::Reset);
        check("/foo", Entry::Unknown("/foo"));
        check("/etc/hosts is what?", Entry::Question("/etc/hosts is what?"));
        check("/quit now", Entry::Question("/quit now"));
        check(" Why? ", Entry::Question("Why?"));
    }
}
