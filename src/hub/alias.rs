//! Short names for models: from the word that a user types to the repository on the Hub.
//!
//! The tables hold names only. The Hub lists the contents of a repository; they are never written here.

/// The name of the model inside the binary.
pub const DEMO: &str = "demo";

/// A short name and its repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alias {
    /// The user's input, lower case.
    pub name: &'static str,
    /// `org/name` on the Hub.
    pub repo: &'static str,
    /// Type of the GGUF file, if the alias has one.
    pub gguf: Option<&'static str>,
}

/// Our own aliases, ordered by family and size. `demo` is not among them: it names no repository.
pub const ALIASES: &[Alias] = &[
    alias("tinyllama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    alias("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct"),
    alias("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct"),
    alias("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
    alias("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct"),
    alias("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct"),
    alias("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
    alias("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
    alias("qwen3-1.7b", "Qwen/Qwen3-1.7B"),
    alias("qwen3-4b", "Qwen/Qwen3-4B"),
    alias("qwen3-8b", "Qwen/Qwen3-8B"),
    alias("gemma-3-270m", "google/gemma-3-270m-it"),
    alias("gemma-3-1b", "google/gemma-3-1b-it"),
    alias("gemma-3-4b", "google/gemma-3-4b-it"),
    alias("gemma-3-12b", "google/gemma-3-12b-it"),
    alias("gemma-3-27b", "google/gemma-3-27b-it"),
    alias("smollm3-3b", "HuggingFaceTB/SmolLM3-3B"),
    alias("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct"),
    alias("granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct"),
    alias("granite-4.0-micro", "ibm-granite/granite-4.0-micro"),
    alias("phi-3.5-mini", "microsoft/Phi-3.5-mini-instruct"),
    alias("phi-4-mini", "microsoft/Phi-4-mini-instruct"),
    alias("phi-4", "microsoft/phi-4"),
    alias("seed-oss-36b", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    alias("olmo-2-1b", "allenai/OLMo-2-0425-1B-Instruct"),
    alias("olmo-2-7b", "allenai/OLMo-2-1124-7B-Instruct"),
    alias("olmo-3-7b", "allenai/Olmo-3-7B-Instruct"),
    alias("glm-4-9b", "zai-org/GLM-4-9B-0414"),
    alias("gpt-oss-20b", "openai/gpt-oss-20b"),
    alias("gpt-oss-120b", "openai/gpt-oss-120b"),
    alias("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
    alias("mistral-nemo", "mistralai/Mistral-Nemo-Instruct-2407"),
    alias("ministral-3-3b", "mistralai/Ministral-3-3B-Instruct-2512-BF16"),
    alias("ministral-3-8b", "mistralai/Ministral-3-8B-Instruct-2512-BF16"),
    alias("ministral-3-14b", "mistralai/Ministral-3-14B-Instruct-2512-BF16"),
    alias("youtu-llm-2b", "tencent/Youtu-LLM-2B"),
    alias("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    alias("glm-4.7-flash", "zai-org/GLM-4.7-Flash"),
];

/// Names that ollama has for models of the families that run here: GGUF files with about four bits for a weight, in
/// public repositories. A name without a size means the size that it means there.
pub const OLLAMA_NAMES: &[Alias] = &[
    four_bits("llama3", "bartowski/Meta-Llama-3-8B-Instruct-GGUF"),
    four_bits("llama3:8b", "bartowski/Meta-Llama-3-8B-Instruct-GGUF"),
    four_bits("llama3.1", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"),
    four_bits("llama3.1:8b", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"),
    four_bits("llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF"),
    four_bits("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF"),
    four_bits("llama3.2:3b", "bartowski/Llama-3.2-3B-Instruct-GGUF"),
    four_bits("qwen2.5", "bartowski/Qwen2.5-7B-Instruct-GGUF"),
    four_bits("qwen2.5:0.5b", "bartowski/Qwen2.5-0.5B-Instruct-GGUF"),
    four_bits("qwen2.5:1.5b", "bartowski/Qwen2.5-1.5B-Instruct-GGUF"),
    four_bits("qwen2.5:3b", "bartowski/Qwen2.5-3B-Instruct-GGUF"),
    four_bits("qwen2.5:7b", "bartowski/Qwen2.5-7B-Instruct-GGUF"),
    four_bits("qwen2.5:14b", "bartowski/Qwen2.5-14B-Instruct-GGUF"),
    four_bits("qwen2.5:32b", "bartowski/Qwen2.5-32B-Instruct-GGUF"),
    four_bits("gemma3", "bartowski/google_gemma-3-4b-it-GGUF"),
    four_bits("gemma3:1b", "bartowski/google_gemma-3-1b-it-GGUF"),
    four_bits("gemma3:4b", "bartowski/google_gemma-3-4b-it-GGUF"),
    four_bits("gemma3:12b", "bartowski/google_gemma-3-12b-it-GGUF"),
    four_bits("gemma3:27b", "bartowski/google_gemma-3-27b-it-GGUF"),
    four_bits("qwen3", "bartowski/Qwen_Qwen3-8B-GGUF"),
    four_bits("qwen3:0.6b", "bartowski/Qwen_Qwen3-0.6B-GGUF"),
    four_bits("qwen3:1.7b", "bartowski/Qwen_Qwen3-1.7B-GGUF"),
    four_bits("qwen3:4b", "bartowski/Qwen_Qwen3-4B-GGUF"),
    four_bits("qwen3:8b", "bartowski/Qwen_Qwen3-8B-GGUF"),
    four_bits("qwen3:14b", "bartowski/Qwen_Qwen3-14B-GGUF"),
    four_bits("qwen3:32b", "bartowski/Qwen_Qwen3-32B-GGUF"),
    four_bits("qwen3:30b", "bartowski/Qwen_Qwen3-30B-A3B-GGUF"),
    four_bits("phi3.5", "bartowski/Phi-3.5-mini-instruct-GGUF"),
    four_bits("phi4", "bartowski/phi-4-GGUF"),
    four_bits("phi4-mini", "bartowski/microsoft_Phi-4-mini-instruct-GGUF"),
    four_bits("granite3.3", "bartowski/ibm-granite_granite-3.3-8b-instruct-GGUF"),
    four_bits("granite3.3:2b", "bartowski/ibm-granite_granite-3.3-2b-instruct-GGUF"),
    four_bits("granite3.3:8b", "bartowski/ibm-granite_granite-3.3-8b-instruct-GGUF"),
    four_bits("mistral", "bartowski/Mistral-7B-Instruct-v0.3-GGUF"),
    four_bits("mistral:7b", "bartowski/Mistral-7B-Instruct-v0.3-GGUF"),
    four_bits("smollm2", "bartowski/SmolLM2-1.7B-Instruct-GGUF"),
    four_bits("smollm2:135m", "bartowski/SmolLM2-135M-Instruct-GGUF"),
    four_bits("smollm2:360m", "bartowski/SmolLM2-360M-Instruct-GGUF"),
    four_bits("smollm2:1.7b", "bartowski/SmolLM2-1.7B-Instruct-GGUF"),
    four_bits("deepseek-r1:1.5b", "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF"),
    four_bits("deepseek-r1:7b", "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF"),
    four_bits("deepseek-r1:14b", "bartowski/DeepSeek-R1-Distill-Qwen-14B-GGUF"),
    four_bits("deepseek-r1:32b", "bartowski/DeepSeek-R1-Distill-Qwen-32B-GGUF"),
];

const fn alias(name: &'static str, repo: &'static str) -> Alias {
    Alias { name, repo, gguf: None }
}

const fn four_bits(name: &'static str, repo: &'static str) -> Alias {
    Alias { name, repo, gguf: Some("Q4_K_M") }
}

fn all() -> impl Iterator<Item = &'static Alias> {
    ALIASES.iter().chain(OLLAMA_NAMES)
}

/// The alias of that name; upper and lower case are the same.
#[must_use]
pub fn find(word: &str) -> Option<&'static Alias> {
    all().find(|alias| alias.name.eq_ignore_ascii_case(word))
}

/// The alias and the type in a name of ollama's with both, such as `llama3.2:1b-instruct-q8_0`.
#[must_use]
pub fn find_typed(word: &str) -> Option<(&'static Alias, Option<String>)> {
    let word = word.to_ascii_lowercase();
    let (name, tag) = word.split_once(':')?;
    let (size, rest) = tag.split_once('-')?;
    let alias = find(&format!("{name}:{size}"))?;
    let kind = ["instruct", "chat"].iter().find_map(|tuned| rest.strip_prefix(tuned)).unwrap_or(rest);
    match kind.trim_start_matches('-') {
        "" => Some((alias, alias.gguf.map(str::to_owned))),
        "fp16" => Some((alias, Some("f16".to_owned()))),
        // Another tuning, or none.
        kind if kind.contains('-') || !kind.starts_with(['q', 'i', 'f', 'b']) => None,
        kind => Some((alias, Some(kind.to_owned()))),
    }
}

/// The names of a family of ollama's with their sizes, if `name` is one.
pub(super) fn sizes(name: &str) -> Vec<&'static str> {
    let name = name.to_ascii_lowercase();
    let names = OLLAMA_NAMES.iter().map(|alias| alias.name);
    names.filter(|other| other.split_once(':').is_some_and(|(family, _)| family == name)).collect()
}

/// At most three names (aliases and `demo`) close to `word`, those that begin with it and
/// then the closest first. Close means: a few
/// typing mistakes away, or one begins with the other (`llama-3.2` is close to both sizes of it).
#[must_use]
pub fn nearest(word: &str) -> Vec<&'static str> {
    let word = word.to_ascii_lowercase();
    let mut near: Vec<(bool, usize, &'static str)> = all()
        .map(|alias| alias.name)
        .chain([DEMO])
        .filter_map(|name| {
            let distance = edit_distance(&word, name);
            let is_prefix = word.len() >= 3 && (name.starts_with(&word) || word.starts_with(name));
            (is_prefix || distance <= name.len().min(word.len()) / 3).then_some((
                !name.starts_with(&word),
                distance,
                name,
            ))
        })
        .collect();
    near.sort_unstable();
    near.into_iter().map(|(.., name)| name).take(3).collect()
}

/// The least number of inserted, removed and replaced characters between two words.
fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, l) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, r) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(l != *r);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::source::RepoId;

    #[test]
    fn every_alias_is_lower_case_unique_and_names_a_valid_repository() {
        let all: Vec<_> = all().collect();
        for (i, alias) in all.iter().enumerate() {
            assert_eq!(alias.name, alias.name.to_ascii_lowercase());
            assert!(
                !alias.name.contains(['/', '\\']) && (alias.gguf.is_some() || !alias.name.contains(':')),
                "{} would be read as a path or repository",
                alias.name
            );
            assert_ne!(alias.name, DEMO);
            assert!(RepoId::parse(alias.repo).is_ok(), "{}", alias.repo);
            assert!(all[..i].iter().all(|earlier| earlier.name != alias.name), "{} twice", alias.name);
        }
    }

    #[test]
    fn nearest_finds_typing_mistakes_and_beginnings() {
        let check = |word: &str, expected: &[&str]| assert_eq!(nearest(word), expected, "{word}");
        check("tinylama", &["tinyllama"]);
        check("TinyLlama-1.1B", &["tinyllama"]);
        check("llama-3.2", &["llama-3.2-1b", "llama-3.2-3b", "llama3.2"]);
        check("dmo", &["demo"]);
        check("qwen3-06b", &["qwen3-0.6b", "qwen3-4b", "qwen3-8b"]);
        check("gpt2", &[]);
        check("", &[]);
    }

    #[test]
    fn edit_distance_counts_single_changes() {
        for (left, right, expected) in [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3)]
        {
            assert_eq!(edit_distance(left, right), expected, "{left} {right}");
        }
    }
}
