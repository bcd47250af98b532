//! `tinyvllm verify`: compares the engine's logits and greedy tokens with a reference file.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use safetensors::{Dtype, SafeTensors};
use tinyvllm::engine::{Event, FinishReason, Request, RequestStream};
use tinyvllm::llm::{KvCacheChoice, Llm};
use tinyvllm::ops::KvCacheDType;
use tinyvllm::sampling::SamplingParams;
use tinyvllm::{Error, Result};

use super::console::Console;
use super::flags::{EngineArgs, MessageArgs, ModelArgs, PositionalModel};
use super::interrupt::Interrupt;
use super::load::{load, merge_model};

/// Size limit of a reference file.
const MAX_FILE_BYTES: u64 = 8 << 30;

/// The file contains `ids` (i64, n tokens), `logits` (f32, n × vocabulary: the expected logits after each id)
/// and optionally `greedy` (i64: a prompt and its greedy continuation). The prompt is the common prefix of
/// `greedy` and `ids`, at least one token. Keys and values are stored in f32 unless --kv-cache-dtype says
/// otherwise. The exit status is 1 if a logit differs by more than the tolerance or a greedy token differs.
#[derive(Debug, Clone, Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pub(crate) positional: PositionalModel,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The safetensors file to compare with
    #[arg(long, value_name = "FILE")]
    pub(crate) reference: PathBuf,
    /// Largest accepted difference of a logit
    #[arg(long, default_value_t = 1e-3, value_name = "X")]
    pub(crate) tolerance: f32,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) messages: MessageArgs,
}

/// Compares, prints the numbers in the last line, and fails above the tolerance.
///
/// # Errors
/// If the model or the reference cannot be read, or they do not match.
pub(crate) fn run(args: &VerifyArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    if !(0.0..=f32::MAX).contains(&args.tolerance) {
        let message = format!("--tolerance is {}; it must be at least 0 and finite", args.tolerance);
        return Err(Error::invalid_request(message).into());
    }
    let reference = Reference::read(&args.reference)?;
    let mut options = args.engine.options()?;
    // With half precision, rounding would exceed every other difference.
    options.kv_cache_dtype = args.engine.kv_cache_dtype.unwrap_or(KvCacheChoice::Fixed(KvCacheDType::F32));
    let interrupt = Interrupt::install()?;
    let llm = load(&merge_model(&args.positional, &args.model)?, &options, console)?;

    let logits = prompt_logits(&llm, &reference.ids, &interrupt)?;
    let difference = compare(&logits, &reference.logits, reference.ids.len())?;
    let greedy_match = match &reference.greedy {
        Some(greedy) => Some(generates(&llm, &reference.ids, greedy, &interrupt, console)?),
        None => None,
    };
    writeln!(
        io::stdout(),
        "max_abs_diff={:.3e} rms_diff={:.3e} argmax_agreement={:.4} greedy_match={}",
        difference.max_abs,
        difference.rms,
        difference.argmax_agreement,
        greedy_match.map_or("none".to_owned(), |matches| matches.to_string())
    )?;
    // In this form, NaN fails.
    let is_close = difference.max_abs <= f64::from(args.tolerance);
    Ok(if is_close && greedy_match != Some(false) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The contents of the reference file.
#[derive(Debug)]
struct Reference {
    ids: Vec<u32>,
    logits: Vec<f32>,
    greedy: Option<Vec<u32>>,
}

impl Reference {
    fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let bytes = tinyvllm::files::read(path, MAX_FILE_BYTES)
            .map_err(|source| Error::io(format_args!("cannot read `{name}`"), source))?;
        Self::parse(&bytes).map_err(|error| error.context(format_args!("`{name}`")))
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let tensors = SafeTensors::deserialize(bytes)
            .map_err(|source| Error::invalid_model(format!("not a safetensors file: {source}")))?;
        let (ids_shape, ids) = tensor(&tensors, "ids", Dtype::I64)?;
        let (logits_shape, logits) = tensor(&tensors, "logits", Dtype::F32)?;
        let ids = token_ids(ids, "ids")?;
        if ids_shape.len() != 1 || logits_shape.len() != 2 || logits_shape[0] != ids.len() || ids.is_empty() {
            return Err(Error::invalid_model(format!(
                "`ids` has the shape {ids_shape:?} and `logits` {logits_shape:?}; they must be [n] and \
                 [n, vocabulary]"
            )));
        }
        let (logits, _) = logits.as_chunks();
        let logits = logits.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let greedy = match tensors.tensor("greedy") {
            Ok(_) => Some(token_ids(tensor(&tensors, "greedy", Dtype::I64)?.1, "greedy")?),
            Err(_) => None,
        };
        Ok(Self { ids, logits, greedy })
    }
}

fn tensor<'a>(tensors: &'a SafeTensors<'_>, name: &str, dtype: Dtype) -> Result<(Vec<usize>, &'a [u8])> {
    let view =
        tensors.tensor(name).map_err(|_| Error::invalid_model(format!("there is no tensor `{name}`")))?;
    if view.dtype() != dtype {
        let found = view.dtype();
        return Err(Error::invalid_model(format!("`{name}` is {found:?}; it must be {dtype:?}")));
    }
    Ok((view.shape().to_vec(), view.data()))
}

fn token_ids(data: &[u8], name: &str) -> Result<Vec<u32>> {
    let (values, _) = data.as_chunks();
    let convert = |bytes: &[u8; 8]| {
        let value = i64::from_le_bytes(*bytes);
        u32::try_from(value)
            .map_err(|_| Error::invalid_model(format!("`{name}` has {value}, which is not a token id")))
    };
    values.iter().map(convert).collect()
}

/// The logits after each of the ids, row by row.
fn prompt_logits(llm: &Llm, ids: &[u32], interrupt: &Interrupt) -> Result<Vec<f32>> {
    let params = SamplingParams { max_tokens: Some(1), ignore_eos: true, ..SamplingParams::greedy() };
    let request = Request { prompt_logits: true, ..Request::new(ids.to_vec(), params) };
    let stream = llm.engine().submit(request)?;
    let mut rows = Vec::new();
    for_each_event(stream, interrupt, |event| {
        if let Event::PromptLogits { logits } = event {
            rows.extend(logits);
        }
    })?;
    Ok(rows)
}

/// Whether the model generates the rest of `greedy` after its prompt.
fn generates(
    llm: &Llm,
    ids: &[u32],
    greedy: &[u32],
    interrupt: &Interrupt,
    console: Console,
) -> Result<bool> {
    let (prompt, expected) = greedy.split_at(num_prompt_tokens(ids, greedy));
    if expected.is_empty() {
        return Err(Error::invalid_model("`greedy` has a prompt and no output"));
    }
    let params =
        SamplingParams { max_tokens: Some(expected.len()), ignore_eos: true, ..SamplingParams::greedy() };
    let stream = llm.engine().submit(Request::new(prompt.to_vec(), params))?;
    let mut generated = Vec::new();
    for_each_event(stream, interrupt, |event| {
        if let Event::Token { token_id, .. } = event {
            generated.push(token_id);
        }
    })?;
    if let Some(position) = generated.iter().zip(expected).position(|(found, wanted)| found != wanted) {
        console.note(format_args!(
            "greedy token {position} after a prompt of {} is {}, not {}",
            prompt.len(),
            generated[position],
            expected[position]
        ));
    }
    Ok(generated == expected)
}

fn for_each_event(stream: RequestStream, interrupt: &Interrupt, mut handle: impl FnMut(Event)) -> Result<()> {
    let _guard = interrupt.guard(vec![stream.abort_handle()]);
    let mut outcome = Err(Error::internal("the engine stopped"));
    for event in stream {
        match event {
            Event::Finished { reason: FinishReason::Error, error, .. } => {
                outcome = Err(Error::internal(error.unwrap_or_default()));
            }
            Event::Finished { reason: FinishReason::Abort, .. } => {
                outcome = Err(Error::internal("interrupted"));
            }
            Event::Finished { .. } => outcome = Ok(()),
            event => handle(event),
        }
    }
    outcome
}

/// The length of the common prefix of `greedy` and `ids`: at least one token, and not all of `greedy`.
fn num_prompt_tokens(ids: &[u32], greedy: &[u32]) -> usize {
    let num_common = ids.iter().zip(greedy).take_while(|(id, token)| id == token).count();
    num_common.min(greedy.len().saturating_sub(1)).max(1).min(greedy.len())
}

#[derive(Debug, PartialEq)]
struct Difference {
    max_abs: f64,
    rms: f64,
    /// Fraction of the positions at which the most likely token is the same.
    argmax_agreement: f64,
}

fn compare(logits: &[f32], reference: &[f32], num_tokens: usize) -> Result<Difference> {
    if logits.len() != reference.len() {
        return Err(Error::invalid_request(format!(
            "the reference has logits for {} tokens of vocabulary, but the model gives {}",
            reference.len() / num_tokens.max(1),
            logits.len() / num_tokens.max(1)
        ))
        .with_hint("the reference belongs to another model"));
    }
    let (mut max_abs, mut sum_of_squares) = (0.0f64, 0.0f64);
    for (&found, &wanted) in logits.iter().zip(reference) {
        let difference = (f64::from(found) - f64::from(wanted)).abs();
        // `max` would ignore NaN.
        max_abs = if difference > max_abs || difference.is_nan() { difference } else { max_abs };
        sum_of_squares += difference * difference;
    }
    let vocab_size = logits.len() / num_tokens.max(1);
    let rows = logits.chunks_exact(vocab_size.max(1)).zip(reference.chunks_exact(vocab_size.max(1)));
    let num_agreeing = rows.filter(|(found, wanted)| argmax(found) == argmax(wanted)).count();
    Ok(Difference {
        max_abs,
        rms: (sum_of_squares / logits.len().max(1) as f64).sqrt(),
        argmax_agreement: num_agreeing as f64 / num_tokens.max(1) as f64,
    })
}

fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (index, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_is_the_common_beginning() {
        let check =
            |ids: &[u32], greedy: &[u32], expected| assert_eq!(num_prompt_tokens(ids, greedy), expected);
        check(&[1, 2, 3, 4], &[1, 2, 7, 8], 2);
        check(&[1, 2], &[1, 2, 3], 2);
        check(&[5], &[1, 2], 1);
        check(&[1, 2, 3], &[1, 2, 3], 2);
        check(&[1], &[], 0);
    }

    #[test]
    fn differences() {
        let difference = compare(&[1.0, 2.0, 3.0, 4.0], &[1.0, 2.5, 4.0, 3.0], 2).unwrap();
        assert_eq!(difference.max_abs, 1.0);
        assert_eq!(difference.rms, (2.25f64 / 4.0).sqrt());
        assert_eq!(difference.argmax_agreement, 0.5);
        assert!(compare(&[1.0], &[1.0, 2.0], 1).is_err());
    }

    #[test]
    fn a_nan_is_no_small_difference() {
        for logits in [[f32::NAN, 1.0], [1.0, f32::NAN], [f32::NAN, f32::NAN]] {
            let max_abs = compare(&logits, &[1.0, 1.0], 1).unwrap().max_abs;
            assert!(max_abs.is_nan(), "{logits:?}: {max_abs}");
        }
    }

    #[test]
    fn damaged_references_are_errors() {
        use safetensors::tensor::{TensorView, serialize};
        let ids: Vec<u8> = [1i64, 2].iter().flat_map(|id| id.to_le_bytes()).collect();
        let bad: Vec<u8> = [-1i64, 2].iter().flat_map(|id| id.to_le_bytes()).collect();
        let logits = vec![0u8; 2 * 3 * 4];
        let file = |tensors: Vec<(&str, Dtype, Vec<usize>, &[u8])>| {
            let views = tensors
                .into_iter()
                .map(|(name, dtype, shape, data)| (name, TensorView::new(dtype, shape, data).unwrap()));
            serialize(views, None).unwrap()
        };
        let good =
            file(vec![("ids", Dtype::I64, vec![2], &ids), ("logits", Dtype::F32, vec![2, 3], &logits)]);
        let reference = Reference::parse(&good).unwrap();
        assert_eq!((reference.ids, reference.logits.len(), reference.greedy), (vec![1, 2], 6, None));
        let check = |bytes: Vec<u8>, wanted: &str| {
            let message = Reference::parse(&bytes).unwrap_err().to_string();
            assert!(message.contains(wanted), "{message} should say {wanted}");
        };
        check(b"nonsense".to_vec(), "not a safetensors file");
        check(good[..good.len() - 1].to_vec(), "not a safetensors file");
        check(file(vec![("logits", Dtype::F32, vec![2, 3], &logits)]), "`ids`");
        check(file(vec![("ids", Dtype::I64, vec![2], &ids)]), "`logits`");
        check(
            file(vec![("ids", Dtype::F64, vec![2], &ids), ("logits", Dtype::F32, vec![2, 3], &logits)]),
            "must be I64",
        );
        check(
            file(vec![("ids", Dtype::I64, vec![2], &ids), ("logits", Dtype::F32, vec![3, 2], &logits)]),
            "[n, vocabulary]",
        );
        check(
            file(vec![("ids", Dtype::I64, vec![2], &bad), ("logits", Dtype::F32, vec![2, 3], &logits)]),
            "-1",
        );
    }
}
