//! `tinyvllm` and `tinyvllm generate`: read the prompts and generate.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::Args;
use clap::error::ErrorKind;
use tinyvllm::chat::{AnswerFormat, ChatOptions, Message};
use tinyvllm::demo;
use tinyvllm::engine::{FinishReason, Request};
use tinyvllm::llm::{Llm, TextStream};
use tinyvllm::sampling::{SamplingDefaults, SamplingParams};

use super::console::{Console, Style, paint};
use super::flags::{AnswerArgs, EngineArgs, JsonArgs, MessageArgs, ModelArgs};
use super::interrupt::{self, Interrupt};
use super::progress::telling_prompt;
use super::render::{JsonRender, Render, TextRender, render_request};
use super::timings::Summary;
use super::value::TokenIds;
use super::{chat, load, text_file, usage_error};

/// Token limit and seed of a run without arguments: the same story for all users, with a good end.
const DEMO_MAX_TOKENS: usize = 400;
const DEMO_SEED: u64 = 2;

/// After this time without input, a message says that the program waits for standard input.
const STDIN_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    #[command(flatten)]
    pub(crate) answers: AnswerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) messages: MessageArgs,
}

/// What to generate from.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Prompt")]
pub(crate) struct PromptArgs {
    /// Text to answer or continue; several run as one batch
    ///
    /// A model with a chat template answers; any other model continues the text. Without --prompt and --prompt-ids
    /// the text comes from standard input.
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Vec<String>,
    /// File with a text to answer or continue; may be repeated
    #[arg(long, short, value_name = "FILE")]
    pub(crate) file: Vec<PathBuf>,
    /// Token ids such as 5,6,7 instead of text; several run as one batch
    #[arg(long, value_name = "IDS", conflicts_with_all = ["prompt", "file", "raw", "system", "no_thinking"])]
    pub(crate) prompt_ids: Vec<TokenIds>,
    /// Continue the text as it is, without the chat template
    #[arg(long, conflicts_with_all = ["system", "no_thinking"])]
    pub(crate) raw: bool,
}

/// The format of the output.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    #[command(flatten)]
    pub(crate) format: JsonArgs,
    /// Sequences for each prompt
    #[arg(long = "n", value_name = "N", default_value_t = 1)]
    pub(crate) num_sequences: usize,
    /// Report the log-probability of each token, and of this many alternatives
    #[arg(long, value_name = "N", requires = "json", hide_short_help = true)]
    pub(crate) logprobs: Option<usize>,
}

/// The command that was typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    /// `tinyvllm` alone, which may also chat or run the demo.
    NoCommand,
    /// `tinyvllm generate`, which only generates.
    Command,
}

/// The task, decided before a model is loaded.
#[derive(Debug, PartialEq)]
enum Task {
    Prompts(Vec<Prompt>),
    /// The built-in prompt for the built-in model.
    Demo,
    Chat,
}

#[derive(Debug, Clone, PartialEq)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Prompt {
    /// Appends standard input to the text.
    fn append(&mut self, input: &str) {
        if let Self::Text(text) = self
            && !input.is_empty()
        {
            *text = format!("{text}\n\n{input}");
        }
    }
}

/// Generates for every prompt.
///
/// # Errors
/// If there is no prompt, the model cannot be loaded, a request is not valid, or output fails.
pub(crate) fn run(args: &GenerateArgs, caller: Caller) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let params_for = |defaults: &SamplingDefaults| SamplingParams {
        n: args.output.num_sequences,
        logprobs: args.output.logprobs,
        ..args.answers.sampling.params(defaults)
    };
    // Everything but token ids can be checked before the model is loaded.
    params_for(&SamplingDefaults::default()).validate(usize::MAX)?;
    let task = choose_task(args, caller, console)?;
    let options = load::llm_options(&args.answers, &args.engine, console)?;
    if task == Task::Chat {
        return chat::chat(&args.model, &options, &args.answers, args.output.format, console);
    }
    let interrupt = Interrupt::install()?;
    let llm = load::load(&args.model, &options, console)?;
    let mut params = params_for(llm.sampling_defaults());
    let is_demo = task == Task::Demo;
    let prompts = match task {
        Task::Prompts(prompts) => prompts,
        Task::Demo | Task::Chat => vec![Prompt::Text(demo::PROMPT.to_owned())],
    };
    let encoded = load::encode_noting(console, || encode(&llm, &prompts, args, is_demo, console))?;
    if is_demo {
        let num_prompt = encoded.first().map_or(0, Vec::len);
        let left = llm.engine().config().max_model_len.saturating_sub(num_prompt);
        params.max_tokens = params.max_tokens.or(Some(DEMO_MAX_TOKENS.min(left)));
        params.seed = params.seed.or(Some(DEMO_SEED));
    }
    let mut output = new_output(args, &llm, &prompts);
    if is_demo && !args.output.format.json {
        write!(io::stdout(), "{}", paint(demo::PROMPT, Style::Bold, &io::stdout()))?;
    }
    generate(&llm, &encoded, &params, output.as_mut(), &interrupt, console)
}

fn generate(
    llm: &Llm,
    prompts: &[Vec<u32>],
    params: &SamplingParams,
    output: &mut dyn Render,
    interrupt: &Interrupt,
    console: Console,
) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    // All requests are submitted before the first token is read. So they run as one batch, and an invalid one
    // stops the run before there is output.
    let submit = |(index, prompt): (usize, &Vec<u32>)| {
        let mut params = params.clone();
        params.max_tokens = llm.max_tokens(prompt.len(), &params);
        let request = Request { prompt_progress: true, ..Request::new(prompt.clone(), params) };
        let stream = llm.submit_request(request, &AnswerFormat::default());
        stream.map_err(
            |error| if prompts.len() > 1 { error.context(format!("prompt {}", index + 1)) } else { error },
        )
    };
    let streams: Vec<TextStream> = prompts.iter().enumerate().map(submit).collect::<Result<_, _>>()?;
    let guard = interrupt.guard(streams.iter().map(TextStream::abort_handle).collect());
    let num_tokens: usize = prompts.iter().map(Vec::len).sum();
    console.detail(format_args!("generating from {num_tokens} tokens in {} prompts", prompts.len()));

    let mut summary = Summary::default();
    let (mut failure, mut num_cut) = (None, 0);
    for (index, stream) in streams.into_iter().enumerate() {
        let events = telling_prompt(console, stream);
        for finished in render_request(events, params.n, (index, &prompts[index]), output)? {
            summary.add(finished.stats);
            match finished.reason {
                FinishReason::Error => failure = failure.or(Some(finished.error.unwrap_or_default())),
                FinishReason::Length => num_cut += 1,
                FinishReason::Stop | FinishReason::Abort => {}
            }
        }
    }
    if num_cut > 0 {
        console.note(cut_note(num_cut, params.max_tokens.is_some()));
    }
    console.note(paint(&summary.line(start.elapsed()), Style::Dim, &io::stderr()));
    if let Some(message) = failure {
        return Err(tinyvllm::Error::internal(format!("generation failed: {message}")).into());
    }
    Ok(if guard.is_interrupted() { ExitCode::from(interrupt::EXIT_CODE) } else { ExitCode::SUCCESS })
}

/// The note about outputs that were cut off.
fn cut_note(num_cut: usize, has_limit: bool) -> String {
    let what = if num_cut == 1 { "the output ends" } else { "outputs end" };
    let limit = if has_limit { "the token limit is reached (--max-tokens)" } else { "the context is full" };
    format!("({what} here: {limit})")
}

fn choose_task(args: &GenerateArgs, caller: Caller, console: Console) -> anyhow::Result<Task> {
    let texts = args.prompt.prompt.iter().cloned().map(Prompt::Text);
    let ids = args.prompt.prompt_ids.iter().map(|ids| Prompt::Ids(ids.0.clone()));
    let mut prompts: Vec<_> = texts.chain(ids).collect();
    for path in &args.prompt.file {
        prompts.push(Prompt::Text(without_line_end(text_file::read(path)?)));
    }
    if !prompts.is_empty() {
        // `cat file | tinyvllm -p "Summarise this"`.
        if args.prompt.prompt_ids.is_empty() && has_input() {
            let input = read_stdin(
                console,
                "waiting for the end of standard input, which is appended to the prompt (</dev/null for none)",
            )?;
            prompts.iter_mut().for_each(|prompt| prompt.append(&input));
        }
        return Ok(Task::Prompts(prompts));
    }
    let wants_nothing = caller == Caller::NoCommand && args.model.model.is_none();
    if !io::stdin().is_terminal() {
        let text = read_stdin(
            console,
            "waiting for the prompt on standard input (use --prompt TEXT to give it here)",
        )?;
        return match text.is_empty() {
            false => Ok(Task::Prompts(vec![Prompt::Text(text)])),
            true if wants_nothing => Ok(Task::Demo),
            true => Err(tinyvllm::Error::invalid_request("standard input has no text to generate from")
                .with_hint("give the prompt with --prompt TEXT")
                .into()),
        };
    }
    if wants_nothing && !args.prompt.raw && args.answers.system.system.is_none() {
        return Ok(Task::Demo);
    }
    let is_chat = caller == Caller::NoCommand
        && !args.prompt.raw
        && !args.output.format.json
        && args.output.num_sequences == 1;
    if is_chat {
        return Ok(Task::Chat);
    }
    let message =
        "there is no prompt: give --prompt TEXT, --file FILE, --prompt-ids IDS, or text on standard input";
    Err(usage_error(ErrorKind::MissingRequiredArgument, message))
}

/// Whether standard input is a file or a pipe. It is not one on a terminal or for services without input.
fn has_input() -> bool {
    #[cfg(unix)]
    {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileTypeExt;
        let input = io::stdin().as_fd().try_clone_to_owned().map(std::fs::File::from);
        let kind = input.and_then(|input| input.metadata()).map(|metadata| metadata.file_type());
        kind.is_ok_and(|kind| kind.is_file() || kind.is_fifo())
    }
    #[cfg(not(unix))]
    !io::stdin().is_terminal()
}

/// Reads all of standard input.
fn read_stdin(console: Console, waiting: &str) -> anyhow::Result<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        // The receiver is dropped only when the program ends.
        let _ = sender.send(text_file::read_stdin());
    });
    let text = match receiver.recv_timeout(STDIN_TIMEOUT) {
        Err(RecvTimeoutError::Timeout) => {
            console.note(waiting);
            receiver.recv()?
        }
        result => result?,
    };
    Ok(without_line_end(text?))
}

/// The text without the line break that `echo` and editors append.
fn without_line_end(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

fn encode(
    llm: &Llm,
    prompts: &[Prompt],
    args: &GenerateArgs,
    is_raw: bool,
    console: Console,
) -> tinyvllm::Result<Vec<Vec<u32>>> {
    let system = args.answers.system.system.as_deref();
    let is_raw = is_raw || args.prompt.raw;
    let has_text = prompts.iter().any(|prompt| matches!(prompt, Prompt::Text(_)));
    // A system message without a template is an error of `encode_chat`; a prompt alone is not.
    let uses_template =
        !is_raw && (llm.has_chat_template() || system.is_some() || args.answers.thinking.no_thinking);
    if has_text && !is_raw && !uses_template && llm.tokenizer().is_some() {
        console.note("the model has no chat template: it continues the prompt as it is");
    }
    let options =
        if uses_template { load::chat_options(llm, args.answers.thinking)? } else { ChatOptions::default() };
    let encode = |prompt: &Prompt| match prompt {
        Prompt::Ids(ids) => Ok(ids.clone()),
        Prompt::Text(text) if uses_template => {
            let system = system.map(|text| Message::new("system", text));
            let messages: Vec<_> = system.into_iter().chain([Message::new("user", text)]).collect();
            let encoded = llm.encode_chat_reporting(&messages, &options)?;
            load::note_left_out(console, &messages, &encoded);
            Ok(encoded.token_ids)
        }
        Prompt::Text(text) => llm.encode_raw(text),
    };
    prompts.iter().map(encode).collect()
}

fn new_output<'a>(args: &GenerateArgs, llm: &'a Llm, prompts: &[Prompt]) -> Box<dyn Render + 'a> {
    if args.output.format.json {
        return Box::new(JsonRender::new(io::stdout(), llm.tokenizer(), args.output.logprobs.is_some()));
    }
    let is_single = prompts.len() == 1 && args.output.num_sequences == 1;
    let labels = if is_single { Vec::new() } else { prompts.iter().map(label).collect() };
    Box::new(TextRender::new(io::stdout(), labels, llm.tokenizer().is_some()))
}

/// The start of a prompt, on one line.
fn label(prompt: &Prompt) -> String {
    const MAX_CHARS: usize = 60;
    let text = match prompt {
        Prompt::Text(text) => text.split_whitespace().collect::<Vec<_>>().join(" "),
        Prompt::Ids(ids) => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
    };
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_short_and_on_one_line() {
        let check = |prompt: Prompt, expected: &str| assert_eq!(label(&prompt), expected);
        check(Prompt::Text("two\n lines".to_owned()), "two lines");
        check(Prompt::Ids(vec![5, 6]), "5,6");
        check(Prompt::Text("ü".repeat(61)), &format!("{}…", "ü".repeat(60)));
        check(Prompt::Text("ü".repeat(60)), &"ü".repeat(60));
    }
}
