//! The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.
//!
//! A file has only a name, so its meaning has to be in this table. Unknown names are refused: text would be split
//! wrongly, and answers would silently be bad.

mod rules;

use self::rules::{Cut, Digits, Rule};
use super::split::Splitter;
use crate::{Error, Result};

/// The splitting of one `pre`, and the other consequences of its name.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Applied in sequence, each within the pieces of the previous one.
    pub(super) splits: Vec<Splitter>,
    /// The same, after bytes are written as characters.
    pub(super) byte_splits: Vec<Splitter>,
    /// A piece that is a token is not split further, without the merges.
    pub(super) ignore_merges: bool,
    /// The meaning of the vocabulary's characters.
    pub(super) writing: Writing,
    /// Whether a BOS token is added if the file does not decide.
    pub(super) add_bos: bool,
    /// Whether one is added even if the file has false.
    pub(super) always_adds_bos: bool,
    /// Whether the order of ids is that of the merges, so that files may be without these.
    pub(super) ranks_by_id: bool,
}

/// The conversion of pieces to the vocabulary's characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writing {
    /// A character for each byte.
    Bytes,
    /// Unchanged, with SentencePiece's mark for a blank; characters without a token as bytes (`<0x0A>`).
    Marked,
    /// Words unchanged, without the blanks between them.
    Words,
}

/// Names with the same meaning.
struct Row {
    names: &'static [&'static str],
    rule: fn() -> Rule,
    flags: &'static [Flag],
}

/// Further consequences of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flag {
    /// A piece that is a token is not split further.
    WholeTokens,
    /// Prompts begin with a BOS token, unless the file has false.
    AddBos,
    /// The same even if the file has false.
    AlwaysBos,
    /// [`Writing::Marked`].
    Marked,
    /// [`Writing::Words`].
    Words,
    /// Files may be without merges.
    RanksById,
}

use Flag::{AddBos, AlwaysBos, Marked, RanksById, WholeTokens, Words};

const fn row(names: &'static [&'static str], rule: fn() -> Rule, flags: &'static [Flag]) -> Row {
    Row { names, rule, flags }
}

/// The rule of files without a name, and of some with one.
pub(super) const DEFAULT: &str = "default";

#[rustfmt::skip]
const TABLE: &[Row] = &[
    row(&[DEFAULT], rules::unnamed, &[]),
    row(&["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "a.x-4.0", "gigachat", "exaone4",
        "granite-docling", "modern-bert", "roberta-bpe", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es",
        "jina-v2-de", "jina-v2-code"], rules::gpt2, &[]),
    row(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        rules::gpt2_digits, &[]),
    row(&["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano"], rules::llama3, &[WholeTokens, AddBos]),
    row(&["glm4", "glm5"], rules::llama3, &[WholeTokens]),
    row(&["chatglm-bpe", "smaug-bpe", "dbrx"], rules::llama3, &[]),
    row(&["qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "stablelm2", "hunyuan", "solar-open",
        "grok-2"], rules::qwen2, &[]),
    row(&["qwen35"], rules::qwen35, &[]),
    row(&["seed-coder"], rules::seed_coder, &[]),
    row(&["ufakzeka"], rules::ufakzeka, &[]),
    row(&["laguna"], rules::laguna, &[]),
    row(&["minicpm5"], rules::minicpm5, &[WholeTokens]),
    row(&["jais-2"], rules::jais2, &[]),
    row(&["bailingmoe", "bailingmoe2", "llada-moe"], rules::bailingmoe, &[]),
    row(&["exaone-moe"], rules::exaone_moe, &[]),
    row(&["tekken"], rules::tekken, &[WholeTokens, AddBos]),
    row(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], rules::gpt4o, &[]),
    row(&["granite-embed-multi-97m"], rules::gpt4o, &[WholeTokens]),
    row(&["tiny_aya", "cohere2moe"], rules::tiny_aya, &[]),
    row(&["youtu"], rules::youtu, &[WholeTokens]),
    row(&["kimi-k2"], rules::kimi_k2, &[RanksById]),
    row(&["deepseek-llm"], rules::deepseek_llm, &[]),
    row(&["deepseek-coder"], rules::deepseek_coder, &[]),
    row(&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], rules::deepseek_v3, &[]),
    row(&["spark2_5"], rules::spark, &[]),
    row(&["afmoe"], rules::afmoe, &[]),
    row(&["superbpe"], rules::superbpe, &[]),
    row(&["bloom", "poro-chat", "gpt3-finnish"], rules::bloom, &[]),
    row(&["viking"], rules::viking, &[]),
    row(&["falcon"], rules::falcon, &[]),
    row(&["chameleon"], rules::chameleon, &[AddBos]),
    row(&["gemma4", "granite-embed-multi-311m"], rules::whole, &[Marked, AddBos, AlwaysBos]),
    row(&["sarvam-moe"], rules::whole, &[Marked]),
    row(&["whitespace"], rules::whole, &[Words]),
];

impl PreTokenizer {
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] for a name that is not in the list.
    pub(super) fn from_name(name: &str) -> Result<Self> {
        let row = TABLE.iter().find(|row| row.names.contains(&name)).ok_or_else(|| {
            Error::unsupported(format!("the pre-tokenizer \"{}\" is not known", crate::shortened(name))).with_hint(format!(
                "choose one with --pre-tokenizer NAME, or give token ids instead of text; known ones are {}",
                names().collect::<Vec<_>>().join(", ")
            ))
        })?;
        let Rule { cuts, byte_cuts } = (row.rule)();
        let splitters = |cuts: Vec<Cut>| cuts.into_iter().map(splitter).collect::<Result<Vec<_>>>();
        Ok(Self {
            splits: splitters(cuts)?,
            byte_splits: splitters(byte_cuts)?,
            ignore_merges: row.flags.contains(&WholeTokens),
            writing: match (row.flags.contains(&Marked), row.flags.contains(&Words)) {
                (true, _) => Writing::Marked,
                (_, true) => Writing::Words,
                _ => Writing::Bytes,
            },
            add_bos: row.flags.contains(&AddBos),
            always_adds_bos: row.flags.contains(&AlwaysBos),
            ranks_by_id: row.flags.contains(&RanksById),
        })
    }
}

/// All known names.
fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().flat_map(|row| row.names).copied()
}

fn splitter(cut: Cut) -> Result<Splitter> {
    match cut {
        Cut::At(expression) => Splitter::at(&expression),
        Cut::Thousands(Digits::Numbers) => Splitter::thousands(r"\p{N}+", false),
        Cut::Thousands(Digits::BetweenDecimal) => Splitter::between_thousands(r"\d+"),
        Cut::Thousands(Digits::DecimalBeforeNoWord) => Splitter::thousands(r"\d+", true),
    }
}

#[cfg(test)]
mod tests;
