//! Flags of llama.cpp, vLLM and ollama, as their users type them.
//!
//! A flag with an equivalent is replaced by it. Flags that differ only in spelling are aliases where the flag
//! is defined. This file has those that clap cannot parse (`-ngl`), and those that have no effect here. The
//! latter are removed and listed in one line, so that a pasted command runs. A flag that would change the
//! result and is not supported is an error.

use std::collections::HashSet;
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue};
use tinyvllm::config::SpeculativeConfig;
use tinyvllm::quoted;

/// How a flag is translated.
#[derive(Debug, Clone, Copy)]
enum Meaning {
    /// To this flag of ours, with the same value.
    Is(&'static str),
    /// To this flag of ours, without a value.
    IsSwitch(&'static str),
    /// Removed; it has no value.
    Switch,
    /// Removed with its value.
    Value,
    /// Removed, with its value if there is one: on, off or auto.
    MaybeValue,
    /// Removed if the value is 1, otherwise an error.
    AtMostOne,
    /// Layers on a GPU: 0 means the CPU, any other number means the GPU.
    Layers,
    /// The context length; 0 is the model's own.
    Window,
    /// Whether the model reasons; the value comes after `=`.
    Think,
    /// How tokens are drafted. An unknown method is removed, since drafting never changes a token.
    Speculation,
    /// An error with this way out, because the flag would change the result.
    Not(&'static str),
}

use Meaning::{AtMostOne, Is, IsSwitch, Layers, MaybeValue, Not, Speculation, Switch, Think, Value, Window};

/// Commands of ollama that do not exist here, each with a way out.
const COMMANDS: &[(&str, &str)] = &[
    (
        "create",
        "a model is a file or a repository, and flags such as --system and --temperature replace a Modelfile",
    ),
    ("cp", "a model has the name of its file or repository; `serve --served-model-name` gives it others"),
    ("push", "models come from the Hugging Face Hub; upload them with its own program: `hf upload`"),
];

const WINDOW: &str = "--max-model-len";

const ASK_A_SERVER: &str = "structured output needs the server: `tinyvllm serve`, with response_format, \
                            structured_outputs or format";

const SAMPLING: &str = "tokens are chosen with --temperature, --top-k, --top-p, --min-p and the penalties";
const CACHE_TYPE: &str = "the type of the whole cache is --kv-cache-dtype: f32, f16, bf16, q8_0 or fp8_e4m3";
const DRAFT_MODEL: &str =
    r#"a draft model is --speculative-config '{"method": "draft_model", "model": "NAME"}'"#;
const STOP: &str = "--stop ends an answer before a text";

const FLAGS: &[(&str, Meaning)] = &[
    // llama.cpp.
    ("-hf", Is("--model")),
    ("-hfr", Is("--model")),
    ("--hf-repo", Is("--model")),
    ("-ngl", Layers),
    ("--gpu-layers", Layers),
    ("--n-gpu-layers", Layers),
    ("-c", Window),
    ("--ctx-size", Window),
    ("-sys", Is("--system")),
    ("--system-prompt", Is("--system")),
    ("-a", Is("--served-model-name")),
    ("--alias", Is("--served-model-name")),
    ("-np", Is("--max-num-seqs")),
    ("--parallel", Is("--max-num-seqs")),
    ("-no-cnv", IsSwitch("--raw")),
    ("--no-conversation", IsSwitch("--raw")),
    ("-cnv", Switch),
    ("--conversation", Switch),
    ("-fa", MaybeValue),
    ("--flash-attn", MaybeValue),
    ("-b", Value),
    ("--batch-size", Value),
    ("-ub", Value),
    ("--ubatch-size", Value),
    ("-tb", Value),
    ("--threads-batch", Value),
    ("-cb", Switch),
    ("--cont-batching", Switch),
    ("-co", Switch),
    ("--color", Switch),
    ("--jinja", Switch),
    ("--log-disable", Switch),
    ("--metrics", Switch),
    ("--mlock", Switch),
    ("--no-display-prompt", Switch),
    ("--no-mmap", Switch),
    ("--no-perf", Switch),
    ("--no-warmup", Switch),
    ("--simple-io", Switch),
    ("--slots", Switch),
    ("-hff", Not("name the file after its repository: org/name:FILE.gguf")),
    ("--hf-file", Not("name the file after its repository: org/name:FILE.gguf")),
    ("-mu", Not("name the repository, or the address on huggingface.co, with --model")),
    ("--model-url", Not("name the repository, or the address on huggingface.co, with --model")),
    ("-i", Switch),
    ("--interactive", Switch),
    ("-if", Switch),
    ("--interactive-first", Switch),
    ("-kvu", Switch),
    ("--kv-unified", Switch),
    ("-nkvo", Switch),
    ("--no-webui", Switch),
    ("--verbose-prompt", Switch),
    ("--keep", Value),
    ("--main-gpu", Value),
    ("-mg", Value),
    ("--numa", Value),
    ("--poll", Value),
    ("--prio", Value),
    ("-sm", Value),
    ("--split-mode", Value),
    ("-ts", Value),
    ("--tensor-split", Value),
    ("-e", Not("the prompt is used unchanged; let the shell write line ends, as in $'one\\ntwo'")),
    ("--escape", Not("the prompt is used unchanged; let the shell write line ends, as in $'one\\ntwo'")),
    ("-r", Not(STOP)),
    ("--reverse-prompt", Not(STOP)),
    ("-ctk", Not(CACHE_TYPE)),
    ("--cache-type-k", Not(CACHE_TYPE)),
    ("-ctv", Not(CACHE_TYPE)),
    ("--cache-type-v", Not(CACHE_TYPE)),
    ("-md", Not(DRAFT_MODEL)),
    ("--model-draft", Not(DRAFT_MODEL)),
    ("--draft", Value),
    ("--draft-max", Value),
    ("--draft-min", Value),
    ("--draft-n", Value),
    ("--draft-n-min", Value),
    ("--draft-p-min", Value),
    ("--dry-multiplier", Not(SAMPLING)),
    ("--dynatemp-range", Not(SAMPLING)),
    ("--mirostat", Not(SAMPLING)),
    ("--mirostat-ent", Not(SAMPLING)),
    ("--mirostat-lr", Not(SAMPLING)),
    ("--samplers", Not(SAMPLING)),
    ("--top-nsigma", Not(SAMPLING)),
    ("--typical", Not(SAMPLING)),
    ("--xtc-probability", Not(SAMPLING)),
    ("--grammar", Not(ASK_A_SERVER)),
    ("--grammar-file", Not(ASK_A_SERVER)),
    ("-j", Not(ASK_A_SERVER)),
    ("--json-schema", Not(ASK_A_SERVER)),
    ("--lora", Not("adapters are not supported; merge it into the model")),
    ("--mmproj", Not("only text input is supported")),
    ("--embedding", Not("only text generation is supported")),
    ("--embeddings", Not("only text generation is supported")),
    // vLLM.
    ("-tp", AtMostOne),
    ("--tensor-parallel-size", AtMostOne),
    ("-pp", AtMostOne),
    ("--pipeline-parallel-size", AtMostOne),
    ("-dp", AtMostOne),
    ("--data-parallel-size", AtMostOne),
    ("--disable-uvicorn-access-log", IsSwitch("--disable-access-log")),
    ("--async-scheduling", Switch),
    ("--disable-custom-all-reduce", Switch),
    ("--disable-log-requests", Switch),
    ("--disable-log-stats", Switch),
    ("--enable-auto-tool-choice", Switch),
    ("--enable-chunked-prefill", Switch),
    ("--enable-reasoning", Switch),
    ("--enforce-eager", Switch),
    ("--no-enable-log-requests", Switch),
    ("--trust-remote-code", Switch),
    ("--use-v2-block-manager", Switch),
    ("--compilation-config", Value),
    ("--distributed-executor-backend", Value),
    ("--guided-decoding-backend", Value),
    ("--limit-mm-per-prompt", Value),
    ("--kv-offloading-backend", Value),
    ("--kv-offloading-size", Is("--kv-offload-gb")),
    ("--load-format", Value),
    ("--max-log-len", Value),
    ("--swap-space", Value),
    ("--tokenizer-mode", Value),
    ("--uvicorn-log-level", Value),
    ("--speculative-config", Speculation),
    ("--enable-lora", Not("adapters are not supported; merge them into the model")),
    ("--ssl-certfile", Not("TLS is not supported; put a proxy with TLS in front of the server")),
    ("--ssl-keyfile", Not("TLS is not supported; put a proxy with TLS in front of the server")),
    // ollama.
    ("--insecure", Switch),
    ("--license", Switch),
    ("--modelfile", Switch),
    ("--parameters", Switch),
    ("--keepalive", Value),
    ("--nowordwrap", Switch),
    ("--think", Think),
    ("--format", Not(ASK_A_SERVER)),
    ("--hidethinking", Not("--no-thinking switches reasoning off")),
];

/// A translated command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Translated {
    pub(crate) words: Vec<OsString>,
    /// Replaced flags: as they were typed, and ours.
    pub(crate) renamed: Vec<(&'static str, &'static str)>,
    /// Removed flags, as they were typed.
    pub(crate) not_needed: Vec<String>,
}

/// Translates a command line. Its first word is the program.
///
/// # Errors
/// If a flag is not supported; with the way out.
pub(crate) fn translate(
    words: impl IntoIterator<Item = OsString>,
    command: &clap::Command,
) -> Result<Translated, String> {
    let mut taking = HashSet::new();
    collect_taking(command, &mut taking);
    let mut translated = Translated { words: Vec::new(), renamed: Vec::new(), not_needed: Vec::new() };
    let mut words = words.into_iter().peekable();
    let mut is_value = true;
    let mut is_command = false;
    let mut own = None;
    while let Some(word) = words.next() {
        // The word after a flag of ours is its value, even if it looks like a flag.
        let was_value = std::mem::replace(&mut is_value, false);
        // The first word is the program, and the second one may be a command.
        let may_be_command = std::mem::replace(&mut is_command, translated.words.is_empty());
        let Some(text) = word.to_str().filter(|_| !was_value) else {
            translated.words.push(word);
            continue;
        };
        if let Some((name, way_out)) = COMMANDS.iter().find(|(name, _)| may_be_command && *name == text) {
            return Err(format!("{name} is not supported: {way_out}"));
        }
        if text == "--" {
            translated.words.push(word);
            translated.words.extend(words);
            break;
        }
        if may_be_command {
            own = command.find_subcommand(text);
        }
        let (flag, attached) = match text.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (flag, Some(value.to_owned())),
            _ => (text, None),
        };
        // What another program means by a flag is not refused if the command has the flag.
        let is_own =
            |meaning: &Meaning| matches!(meaning, Not(_)) && own.is_some_and(|own| has_flag(own, flag));
        let Some((flag, meaning)) = FLAGS.iter().find(|(name, meaning)| *name == flag && !is_own(meaning))
        else {
            is_value = taking.contains(text);
            translated.words.push(word);
            continue;
        };
        let mut value = |is_there: bool| match &attached {
            Some(value) => Some(value.clone()),
            None if is_there => words.next().map(|word| word.to_string_lossy().into_owned()),
            None => None,
        };
        match *meaning {
            Is(own) => {
                translated.renamed.push((*flag, own));
                translated.words.push(own.into());
                translated.words.extend(value(true).map(OsString::from));
            }
            IsSwitch(own) => {
                translated.renamed.push((*flag, own));
                translated.words.push(own.into());
            }
            Switch => translated.not_needed.push((*flag).to_owned()),
            Value => {
                value(true);
                translated.not_needed.push((*flag).to_owned());
            }
            MaybeValue => {
                let is_value =
                    |word: &OsString| ["on", "off", "auto", "0", "1"].iter().any(|value| word == value);
                if attached.is_none() && words.peek().is_some_and(is_value) {
                    words.next();
                }
                translated.not_needed.push((*flag).to_owned());
            }
            AtMostOne => {
                let number = value(true).unwrap_or_default();
                if number != "1" {
                    return Err(format!(
                        "{flag} is {number:?}; this program computes on one device: omit it, or start a server for \
                         each device and divide the requests between them"
                    ));
                }
                translated.not_needed.push((*flag).to_owned());
            }
            Layers => match value(true).as_deref() {
                Some("0") => translated.words.extend(["--device", "cpu"].map(OsString::from)),
                _ => translated.not_needed.push((*flag).to_owned()),
            },
            Window => match value(true) {
                Some(number) if number == "0" => translated.not_needed.push((*flag).to_owned()),
                number => {
                    translated.renamed.push((*flag, WINDOW));
                    translated.words.push(WINDOW.into());
                    translated.words.extend(number.map(OsString::from));
                }
            },
            Speculation => {
                let (own, not_needed) = speculation(value(true).unwrap_or_default());
                translated.not_needed.extend(not_needed.map(|what| format!("{flag} with {what}")));
                translated.words.extend(own.into_iter().flat_map(|own| [(*flag).into(), own.into()]));
            }
            Not(way_out) => return Err(format!("{flag} is not supported: {way_out}")),
            Think => match value(false).as_deref() {
                None | Some("true") => translated.not_needed.push((*flag).to_owned()),
                Some("false") => translated.words.push("--no-thinking".into()),
                Some(other) => return Err(format!("--think is {other:?}; it must be true or false")),
            },
        }
    }
    Ok(translated)
}

/// Splits a configuration of speculation into the supported fields and a description of the removed ones.
fn speculation(text: String) -> (Option<String>, Option<String>) {
    let Ok(serde_json::Value::Object(mut object)) = serde_json::from_str(&text) else {
        return (Some(text), None);
    };
    let method = object.get("method").and_then(serde_json::Value::as_str);
    if let Some(method) = method.filter(|method| !SpeculativeConfig::METHODS.contains(method)) {
        return (None, Some(format!("the method {}", quoted(method))));
    }
    let keys: Vec<String> =
        object.keys().filter(|key| !SpeculativeConfig::KEYS.contains(&key.as_str())).cloned().collect();
    keys.iter().for_each(|key| drop(object.remove(key)));
    let own = serde_json::Value::Object(object).to_string();
    (Some(own), (!keys.is_empty()).then(|| keys.iter().map(|key| quoted(key)).collect::<Vec<_>>().join(", ")))
}

/// Replaces flags in an error by those that were typed.
pub(crate) fn as_typed(mut error: clap::Error, renamed: &[(&str, &str)]) -> clap::Error {
    for kind in [ContextKind::InvalidArg, ContextKind::PriorArg] {
        let Some(ContextValue::String(name)) = error.get(kind) else { continue };
        let typed = renamed.iter().find_map(|(typed, own)| {
            let rest = name.strip_prefix(own).filter(|rest| rest.is_empty() || rest.starts_with(' '))?;
            Some(format!("{typed}{rest}"))
        });
        if let Some(typed) = typed {
            error.insert(kind, ContextValue::String(typed));
        }
    }
    error
}

/// Collects all spellings of flags that take a value.
/// Whether a command has a flag of this name itself: `-r` of `bench` is not that of llama.cpp.
fn has_flag(command: &clap::Command, flag: &str) -> bool {
    command.get_arguments().any(|arg| {
        let long = arg.get_long_and_visible_aliases().into_iter().flatten();
        let short = arg.get_short_and_visible_aliases().into_iter().flatten();
        long.map(|long| format!("--{long}"))
            .chain(short.map(|short| format!("-{short}")))
            .any(|own| own == flag)
    })
}

fn collect_taking(command: &clap::Command, taking: &mut HashSet<String>) {
    for arg in command.get_arguments().filter(|arg| arg.get_action().takes_values() && !arg.is_positional()) {
        if arg.is_require_equals_set() {
            continue;
        }
        taking
            .extend(arg.get_long_and_visible_aliases().into_iter().flatten().map(|long| format!("--{long}")));
        taking.extend(
            arg.get_short_and_visible_aliases().into_iter().flatten().map(|short| format!("-{short}")),
        );
    }
    command.get_subcommands().for_each(|command| collect_taking(command, taking));
}

#[cfg(test)]
mod tests {
    use super::super::args;
    use super::*;

    fn run(line: &str) -> Result<(String, String), String> {
        let words = line.split_whitespace().map(OsString::from);
        let translated = translate(words, &args::command())?;
        let words: Vec<&str> = translated.words.iter().map(|word| word.to_str().unwrap()).collect();
        Ok((words.join(" "), translated.not_needed.join(" ")))
    }

    #[test]
    fn what_others_type_becomes_ours() {
        let check = |line: &str, words: &str, not_needed: &str| {
            assert_eq!(run(line).unwrap(), (words.to_owned(), not_needed.to_owned()), "{line}");
        };
        check("x -m a.gguf -p Hi -n 5 -t 4 --temp 0", "x -m a.gguf -p Hi -n 5 -t 4 --temp 0", "");
        check("x -hf org/name:Q4_0 -ngl 99 -c 0 -fa", "x --model org/name:Q4_0", "-ngl -c -fa");
        check("x -ngl 0 -c 4096 -fa on -p x", "x --device cpu --max-model-len 4096 -p x", "-fa");
        check("x -m m -sys Kind -no-cnv", "x -m m --system Kind --raw", "");
        check(
            "x serve m --alias a -np 4 --jinja",
            "x serve m --served-model-name a --max-num-seqs 4",
            "--jinja",
        );
        check(
            "x serve m --tensor-parallel-size 1 --enforce-eager --swap-space=4 --trust-remote-code",
            "x serve m",
            "--tensor-parallel-size --enforce-eager --swap-space --trust-remote-code",
        );
        check("x serve m --kv-offloading-size 8", "x serve m --kv-offload-gb 8", "");
        check("x -m m --draft-max 8 -p x", "x -m m -p x", "--draft-max");
        // A flag of the command itself.
        check("x bench -r 1", "x bench -r 1", "");
        check("x run m --think=false --keepalive 5m hello", "x run m --no-thinking hello", "--keepalive");
        // Values of our flags are not translated, nor is anything after `--`.
        check("x -p -hf --stop --mlock", "x -p -hf --stop --mlock", "");
        check("x run m -- -ngl 1", "x run m -- -ngl 1", "");
        check("x -m m -i --keep 5 --numa=isolate", "x -m m", "-i --keep --numa");
        check("x show m --modelfile", "x show m", "--modelfile");
        check(
            r#"x --speculative-config={"method":"ngram","disable_padded_drafter_batch":true}"#,
            r#"x --speculative-config {"method":"ngram"}"#,
            r#"--speculative-config with "disable_padded_drafter_batch""#,
        );
        check(
            r#"x --speculative-config {"method":"eagle3","model":"a"} -m b"#,
            "x -m b",
            r#"--speculative-config with the method "eagle3""#,
        );
        check("x --speculative-config 3", "x --speculative-config 3", "");
        check("x -hf", "x --model", "");
        check("x run create cp", "x run create cp", "");
    }

    #[test]
    fn what_cannot_be_is_an_error() {
        for (line, words) in [
            ("x serve -tp 2", "-tp is \"2\"; this program computes on one device"),
            ("x serve --pipeline-parallel-size=4", "\"4\""),
            ("x serve --tensor-parallel-size", "\"\""),
            ("x run m --think=high", "true or false"),
            ("x create m -f Modelfile", "create is not supported"),
            ("x run m --format json", "needs the server"),
            ("x -m a --lora=b", "merge it"),
            ("x -m a --mirostat 2", "--min-p and the penalties"),
            ("x -m a -ctk q8_0", "--kv-cache-dtype"),
            ("x -m a -md b.gguf", "draft_model"),
            ("x -m a -r User:", "--stop"),
        ] {
            let error = run(line).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn errors_name_what_was_typed() {
        for (line, words) in [
            ("x -m a -c 4x", "'4x' for '-c <"),
            ("x -m a -np 4 -c", "for '-c <"),
            ("x -m a --max-model-len 4x", "'4x' for '--max-model-len <"),
            ("x -m a -c 4 --max-model-len 4", "'-c <N>' cannot be used multiple times"),
            ("x serve -np no", "'no' for '-np <"),
        ] {
            let translated = translate(line.split(' ').map(OsString::from), &args::command()).unwrap();
            let error = args::command().try_get_matches_from(&translated.words).unwrap_err();
            let error = as_typed(error, &translated.renamed).to_string();
            assert!(error.contains(words), "{line}: {error}");
        }
    }

    #[test]
    fn none_of_them_is_ours() {
        fn own(command: &clap::Command, found: &mut HashSet<String>) {
            for arg in command.get_arguments() {
                found.extend(arg.get_long().map(|long| format!("--{long}")));
            }
            command.get_subcommands().for_each(|command| own(command, found));
        }
        let mut found = HashSet::new();
        own(&args::command(), &mut found);
        for (flag, meaning) in FLAGS {
            // Only for this one, values are translated.
            assert_eq!(found.contains(*flag), matches!(meaning, Speculation), "{flag} is a flag of ours");
            if let Is(own) | IsSwitch(own) = meaning {
                assert!(found.contains(*own), "{own} is not a flag of ours");
            }
        }
    }
}
