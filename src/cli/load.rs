//! Finds the files that the flags name and loads the model, with progress and notices.

use std::path::PathBuf;

use tinyvllm::Error;
use tinyvllm::chat::{ChatConfig, ChatOptions, EncodedChat, Message};
use tinyvllm::hub::{self, HubConfig, ModelSource, ResolvedModel, alias};
use tinyvllm::llm::{Llm, LlmOptions, OpenedDevice};
use tinyvllm::tokenizer::dropped_in;

use super::console::Console;
use super::flags::{AnswerArgs, EngineArgs, ModelArgs, PositionalModel, TemplateArgs, ThinkingArgs};
use super::progress::Progress;

/// Size limit of a chat template.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// The model's name, from `--model`, its variable, or the positional argument.
///
/// # Errors
/// If it was given twice.
pub(crate) fn merge_model(positional: &PositionalModel, args: &ModelArgs) -> anyhow::Result<ModelArgs> {
    let Some(word) = &positional.positional_model else { return Ok(args.clone()) };
    // An argument wins over the variable, as everywhere. Two arguments contradict each other.
    let from_variable = std::env::var("TINYVLLM_MODEL").ok().filter(|model| !model.is_empty());
    if let Some(model) = args.model.as_ref().filter(|model| Some(*model) != from_variable.as_ref()) {
        return Err(Error::invalid_request(format!("two models were given, `{word}` and --model {model}"))
            .with_hint("leave one of them out")
            .into());
    }
    Ok(ModelArgs { model: Some(word.clone()), ..args.clone() })
}

/// Finds the files of the model, and downloads them if necessary.
///
/// # Errors
/// If there is no such model, or it cannot be downloaded.
pub(crate) fn resolve(args: &ModelArgs, console: Console) -> anyhow::Result<ResolvedModel> {
    resolve_name(args.model.as_deref().unwrap_or(alias::DEMO), args.revision.revision.as_deref(), console)
}

fn resolve_name(name: &str, revision: Option<&str>, console: Console) -> anyhow::Result<ResolvedModel> {
    let source = ModelSource::parse(name, revision)?;
    let config = match &source {
        ModelSource::Hub(_) => HubConfig::from_env()?,
        // A local model needs no cache, and so no home folder.
        ModelSource::Demo | ModelSource::GgufFile(_) | ModelSource::Folder(_) => HubConfig::new(""),
    };
    let model = hub::resolve(&source, &config, &Progress::new(console))?;
    if let Some(notice) = &model.notice {
        console.note(notice);
    }
    if let Some(revision) = &model.revision {
        console.detail(format_args!("revision {revision}"));
    }
    Ok(model)
}

/// The engine's options from the flags. Downloads the draft model if they name one.
///
/// # Errors
/// If a value is out of range, there is no such model, or it cannot be downloaded.
pub(crate) fn engine_options(args: &EngineArgs, console: Console) -> anyhow::Result<LlmOptions> {
    let options = args.options()?;
    let draft = args.speculation.draft_model().map(|name| resolve_name(name, None, console));
    let prefix_store = args.prefix_store.options(console)?;
    let kv_offload = args.prefix_store.offload(console)?;
    let options = LlmOptions { draft_model: draft.transpose()?, prefix_store, kv_offload, ..options };
    if options.prefix_store.is_some() && !options.limits.enable_prefix_caching {
        return Err(Error::invalid_request("--prefix-cache-dir has no effect without the prefix cache")
            .with_hint("omit --no-enable-prefix-caching")
            .into());
    }
    Ok(options)
}

/// The same for a command that has the model answer.
///
/// # Errors
/// As [`engine_options`], and if the chat template cannot be read.
pub(crate) fn llm_options(
    answers: &AnswerArgs,
    engine: &EngineArgs,
    console: Console,
) -> anyhow::Result<LlmOptions> {
    let generation_config = answers.generation.generation_config.clone();
    let chat = chat_config(&answers.template)?;
    Ok(LlmOptions { chat, generation_config, ..engine_options(engine, console)? })
}

/// Reads the chat template that the flags name.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn chat_config(args: &TemplateArgs) -> anyhow::Result<ChatConfig> {
    let read = |path: &PathBuf| {
        tinyvllm::files::read_any_text(path, MAX_TEMPLATE_BYTES).map_err(|source| {
            let what = format!("cannot read the chat template {}", path.display());
            Error::io(what, source)
        })
    };
    let template = args.chat_template.as_ref().map(read).transpose()?;
    let template_file = args.chat_template.as_ref().map(|path| path.display().to_string());
    Ok(ChatConfig { template, template_file, ..ChatConfig::default() })
}

/// The chat options from the flags.
///
/// # Errors
/// If the model has no chat template, or its template has no such switch.
pub(crate) fn chat_options(llm: &Llm, args: ThinkingArgs) -> tinyvllm::Result<ChatOptions> {
    if !args.no_thinking {
        return Ok(ChatOptions::default());
    }
    let chat = llm
        .require_chat()
        .map_err(|error| error.with_hint("omit --no-thinking, or give a template with --chat-template"))?;
    Ok(ChatOptions { variables: chat.reasoning_variables(false)?, ..ChatOptions::default() })
}

/// Encodes text, and reports characters that are dropped because the vocabulary has no token for them.
pub(crate) fn encode_noting<T>(console: Console, encode: impl FnOnce() -> T) -> T {
    let (encoded, dropped) = dropped_in(encode);
    if !dropped.is_empty() {
        console.note(format_args!(
            "note: the vocabulary has no token for {}, which is dropped from the prompt",
            dropped.join(", ")
        ));
    }
    encoded
}

/// Reports the messages that the template leaves out.
pub(crate) fn note_left_out(console: Console, messages: &[Message], encoded: &EncodedChat) {
    for index in &encoded.left_out {
        let (number, role) = (index + 1, &messages[*index].role);
        console.note(format_args!("note: the chat template leaves out message {number}, of the role {role}"));
    }
}

/// Opens the device before the download of a model, and reports why a GPU is not used.
///
/// # Errors
/// If the device does not exist.
pub(crate) fn check_device(options: &LlmOptions, console: Console) -> anyhow::Result<()> {
    if let OpenedDevice::Cpu(Some(error)) = options.open_device()? {
        console.note(unused_gpu(&error));
    }
    Ok(())
}

/// The notice about a GPU that is not used.
pub(crate) fn unused_gpu(error: &Error) -> String {
    let hint = error.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
    format!("note: the GPU is not used: {}{hint}", error.message())
}

/// Loads the model and reports what runs on which device.
///
/// # Errors
/// If the device does not exist, or the model cannot be downloaded or loaded.
pub(crate) fn load(args: &ModelArgs, options: &LlmOptions, console: Console) -> anyhow::Result<Llm> {
    check_device(options, console)?;
    let model = resolve(args, console)?;
    let llm = Llm::load(&model, options, &Progress::new(console))?;
    console.note(llm.summary());
    llm.notices().iter().for_each(|notice| console.note(format_args!("note: {notice}")));
    if let Some(line) = llm.expert_summary() {
        console.note(line);
    }
    Ok(llm)
}
