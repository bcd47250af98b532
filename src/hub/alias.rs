//! Short names for models: one table from the word that a user types to the repository on the Hub.
//!
//! The table holds names only. What a repository contains is asked of the Hub, never written here.

/// The word that stands for the model inside the binary.
pub const DEMO: &str = "demo";

/// A short name and the repository it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alias {
    /// What the user types, lower case.
    pub name: &'static str,
    /// `org/name` on the Hub.
    pub repo: &'static str,
}

/// All aliases, ordered by family and size. `demo` is not among them: it names no repository.
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
    alias("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
    alias("mistral-nemo", "mistralai/Mistral-Nemo-Instruct-2407"),
    alias("youtu-llm-2b", "tencent/Youtu-LLM-2B"),
    alias("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    alias("glm-4.7-flash", "zai-org/GLM-4.7-Flash"),
];

const fn alias(name: &'static str, repo: &'static str) -> Alias {
    Alias { name, repo }
}

/// The alias of that name; upper and lower case are the same.
#[must_use]
pub fn find(word: &str) -> Option<&'static Alias> {
    ALIASES.iter().find(|alias| alias.name.eq_ignore_ascii_case(word))
}

/// At most three names (aliases and `demo`) close to `word`, the closest first. Close means: a few
/// typing mistakes away, or one begins with the other (`llama-3.2` is close to both sizes of it).
#[must_use]
pub fn nearest(word: &str) -> Vec<&'static str> {
    let word = word.to_ascii_lowercase();
    let mut near: Vec<(usize, &'static str)> = ALIASES
        .iter()
        .map(|alias| alias.name)
        .chain([DEMO])
        .filter_map(|name| {
            let distance = edit_distance(&word, name);
            let is_prefix = word.len() >= 3 && (name.starts_with(&word) || word.starts_with(name));
            (is_prefix || distance <= name.len().min(word.len()) / 3).then_some((distance, name))
        })
        .collect();
    near.sort_unstable();
    near.into_iter().map(|(_, name)| name).take(3).collect()
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
        for (i, alias) in ALIASES.iter().enumerate() {
            assert_eq!(alias.name, alias.name.to_ascii_lowercase());
            assert!(
                !alias.name.contains(['/', ':', '\\']),
                "{} would be read as a path or repository",
                alias.name
            );
            assert_ne!(alias.name, DEMO);
            assert!(RepoId::parse(alias.repo).is_ok(), "{}", alias.repo);
            assert!(ALIASES[..i].iter().all(|earlier| earlier.name != alias.name), "{} twice", alias.name);
        }
    }

    #[test]
    fn nearest_finds_typing_mistakes_and_beginnings() {
        let check = |word: &str, expected: &[&str]| assert_eq!(nearest(word), expected, "{word}");
        check("tinylama", &["tinyllama"]);
        check("TinyLlama-1.1B", &["tinyllama"]);
        check("llama-3.2", &["llama-3.2-1b", "llama-3.2-3b"]);
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
