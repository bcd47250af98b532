//! The prompts of a run, and the number of tokens that each one requests.
//!
//! Pure except for reading a file: the same seed and vocabulary give the same workload.

use std::path::Path;

use serde_json::Value;
use tinyvllm::Error;

use super::random::Random;
use super::vocabulary::Vocabulary;

/// Size limit of a file of prompts.
const MAX_FILE_BYTES: u64 = 4 << 30;
/// The most tokens of all prompts together, which are in memory before the first request is sent.
const MOST_TOKENS: usize = 1_000_000_000;

/// A prompt in the form in which it is sent.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// A request of the workload.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample {
    pub(super) prompt: Prompt,
    /// The intended length; 0 if only the server knows it.
    pub(super) num_prompt_tokens: usize,
    pub(super) output_len: usize,
}

/// The kind of prompts.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Dataset {
    /// Random tokens after a prefix that all prompts share.
    Random { prefix_len: usize, input_len: usize, output_len: usize, range_ratio: f64 },
    /// Several prefixes, each shared by equally many requests, in random order, with random suffixes.
    PrefixRepetition { prefix_len: usize, suffix_len: usize, num_prefixes: usize, output_len: usize },
}

impl Dataset {
    /// Checks that this many requests fit into memory.
    ///
    /// # Errors
    /// If their prompts have too many tokens.
    pub(super) fn check(&self, num_prompts: usize) -> tinyvllm::Result<()> {
        let num_tokens = match *self {
            Self::Random { prefix_len, input_len, range_ratio, .. } => {
                let longest = (input_len as f64 * (1.0 + range_ratio)).ceil() as usize;
                num_prompts.saturating_mul(prefix_len.saturating_add(longest))
            }
            Self::PrefixRepetition { prefix_len, suffix_len, num_prefixes, .. } => {
                let prefixes = num_prefixes.saturating_mul(prefix_len);
                num_prompts.saturating_mul(prefix_len.saturating_add(suffix_len)).saturating_add(prefixes)
            }
        };
        check_tokens(num_prompts, num_tokens)
    }

    /// Makes `num_prompts` requests.
    pub(super) fn samples(
        &self,
        num_prompts: usize,
        vocabulary: &Vocabulary,
        random: &mut Random,
    ) -> Vec<Sample> {
        let sample = |prefix: &Prompt, suffix_len: usize, output_len, random: &mut Random| {
            // The tokens of a template are part of the requested length.
            let suffix_len = suffix_len.saturating_sub(vocabulary.num_template_tokens());
            // No server accepts an empty prompt.
            let suffix_len = suffix_len.max(usize::from(prefix.len() == 0));
            let prompt = prefix.clone().followed_by(vocabulary.prompt(suffix_len, random));
            let num_prompt_tokens = prompt.len() + vocabulary.num_template_tokens();
            Sample { prompt, num_prompt_tokens, output_len }
        };
        match *self {
            Self::Random { prefix_len, input_len, output_len, range_ratio } => {
                let prefix = vocabulary.prompt(prefix_len, random);
                let draw = |len: usize, random: &mut Random| {
                    let low = (len as f64 * (1.0 - range_ratio)).floor().max(1.0) as usize;
                    let high = (len as f64 * (1.0 + range_ratio)).ceil() as usize;
                    random.between(low.min(high), high).max(1)
                };
                let lens = |random: &mut Random| (draw(input_len, random), draw(output_len, random));
                let one = |random: &mut Random| {
                    let (input_len, output_len) = lens(random);
                    sample(&prefix, input_len, output_len, random)
                };
                (0..num_prompts).map(|_| one(random)).collect()
            }
            Self::PrefixRepetition { prefix_len, suffix_len, num_prefixes, output_len } => {
                let prefixes: Vec<Prompt> =
                    (0..num_prefixes.max(1)).map(|_| vocabulary.prompt(prefix_len, random)).collect();
                let mut samples: Vec<Sample> = (0..num_prompts)
                    .map(|index| sample(&prefixes[index % prefixes.len()], suffix_len, output_len, random))
                    .collect();
                random.shuffle(&mut samples);
                samples
            }
        }
    }
}

impl Prompt {
    /// The number of tokens or words.
    fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.split_whitespace().count(),
            Self::Ids(ids) => ids.len(),
        }
    }

    fn followed_by(self, other: Self) -> Self {
        match (self, other) {
            (Self::Ids(mut ids), Self::Ids(more)) => {
                ids.extend(more);
                Self::Ids(ids)
            }
            (Self::Text(text), Self::Text(more)) if !text.is_empty() && !more.is_empty() => {
                Self::Text(format!("{text} {more}"))
            }
            (Self::Text(text), other) if text.is_empty() => other,
            (prompt, _) => prompt,
        }
    }
}

fn check_tokens(num_prompts: usize, num_tokens: usize) -> tinyvllm::Result<()> {
    if num_tokens <= MOST_TOKENS {
        return Ok(());
    }
    let message = format!(
        "{num_prompts} prompts have up to {num_tokens} tokens together; they can have at most {MOST_TOKENS}, because \
         they are made before the first one is sent"
    );
    Err(Error::invalid_request(message).with_hint("lower --num-prompts or the length of the prompts"))
}

/// Reads the prompts of a file. Each line is a JSON value: a text, or an object with `prompt` (text or token
/// ids) or ShareGPT's `conversations`, and optionally `output_tokens`. If there are fewer than `num_prompts`,
/// they are repeated.
///
/// # Errors
/// If the file cannot be read, has no prompt, or has an invalid line.
pub(super) fn read_file(
    path: &Path,
    num_prompts: usize,
    output_len: usize,
    allow_ids: bool,
) -> anyhow::Result<Vec<Sample>> {
    let text = tinyvllm::files::read_any_text(path, MAX_FILE_BYTES)
        .map_err(|source| Error::io(format_args!("cannot read {}", path.display()), source))?;
    let mut samples = Vec::new();
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    for (index, line) in lines.take(num_prompts) {
        let sample = parse_line(line, output_len, allow_ids).map_err(|reason| {
            Error::invalid_request(format!("{}:{}: {reason}", path.display(), index + 1))
                .with_hint(r#"write a line as {"prompt": "…", "output_tokens": 100}"#)
        })?;
        samples.push(sample);
    }
    if samples.is_empty() {
        return Err(Error::invalid_request(format!("{} has no prompts", path.display())).into());
    }
    // A text has no more tokens than bytes.
    let size = |sample: &Sample| match &sample.prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Ids(ids) => ids.len(),
    };
    let num_tokens = samples.iter().map(size).sum::<usize>();
    let num_repetitions = num_prompts.div_ceil(samples.len());
    check_tokens(num_prompts, num_tokens.saturating_mul(num_repetitions))?;
    Ok(samples.iter().cycle().take(num_prompts).cloned().collect())
}

fn parse_line(line: &str, output_len: usize, allow_ids: bool) -> Result<Sample, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("not JSON: {error}"))?;
    let first_turn = || value["conversations"].get(0).map(|turn| &turn["value"]);
    let prompt = match &value {
        Value::String(_) => Some(&value),
        _ => value.get("prompt").or_else(first_turn),
    };
    let prompt = match prompt {
        Some(Value::String(text)) => Prompt::Text(text.clone()),
        Some(Value::Array(ids)) if allow_ids => {
            let ids = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect::<Option<_>>();
            Prompt::Ids(ids.ok_or("the prompt has numbers that are not token ids")?)
        }
        Some(Value::Array(_)) => return Err("token ids are for /v1/completions".to_owned()),
        _ => return Err("there is no prompt".to_owned()),
    };
    let num_prompt_tokens = match &prompt {
        Prompt::Text(_) => 0,
        Prompt::Ids(ids) => ids.len(),
    };
    let output_len = match value.get("output_tokens") {
        None | Some(Value::Null) => output_len,
        Some(given) => given
            .as_u64()
            .and_then(|len| usize::try_from(len).ok())
            .filter(|len| *len > 0)
            .ok_or_else(|| format!("output_tokens is {given}; it must be at least 1"))?,
    };
    Ok(Sample { prompt, num_prompt_tokens, output_len })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io::Write as _;

    use super::*;

    fn ids(sample: &Sample) -> &[u32] {
        match &sample.prompt {
            Prompt::Ids(ids) => ids,
            Prompt::Text(text) => panic!("{text} is not a list of ids"),
        }
    }

    #[test]
    fn random_lengths_are_in_their_range_and_the_prefix_is_shared() {
        let vocabulary = Vocabulary::Ids((0..1_000).collect());
        let dataset = Dataset::Random { prefix_len: 10, input_len: 100, output_len: 20, range_ratio: 0.5 };
        let samples = dataset.samples(500, &vocabulary, &mut Random::new(1));
        let lens: Vec<usize> = samples.iter().map(|sample| ids(sample).len()).collect();
        assert_eq!((lens.iter().min(), lens.iter().max()), (Some(&60), Some(&160)));
        let outputs: Vec<usize> = samples.iter().map(|sample| sample.output_len).collect();
        assert_eq!((outputs.iter().min(), outputs.iter().max()), (Some(&10), Some(&30)));
        for sample in &samples {
            assert_eq!(ids(sample)[..10], ids(&samples[0])[..10]);
            assert_eq!(sample.num_prompt_tokens, ids(sample).len());
        }
        assert_ne!(ids(&samples[0])[10..40], ids(&samples[1])[10..40]);
        assert_eq!(samples, dataset.samples(500, &vocabulary, &mut Random::new(1)));
        assert_ne!(samples, dataset.samples(500, &vocabulary, &mut Random::new(2)));
    }

    #[test]
    fn more_tokens_than_fit_are_refused() {
        let random = |prefix_len, input_len, range_ratio| Dataset::Random {
            prefix_len,
            input_len,
            output_len: 1,
            range_ratio,
        };
        let repetition = |prefix_len, num_prefixes| Dataset::PrefixRepetition {
            prefix_len,
            suffix_len: 8,
            num_prefixes,
            output_len: 1,
        };
        assert!(random(0, 1_000, 0.0).check(1_000_000).is_ok() && repetition(1_000, 9).check(10_000).is_ok());
        for (dataset, num_prompts) in [
            (random(0, 1_000, 0.1), 1_000_000),
            (random(1, 1_000, 0.0), 1_000_000),
            (random(0, usize::MAX, 0.9), usize::MAX),
            (repetition(1_000, 1_000_000), 1),
        ] {
            let error = dataset.check(num_prompts).unwrap_err().to_string();
            assert!(error.contains("at most 1000000000"), "{error}");
        }
    }

    #[test]
    fn without_a_range_every_length_is_the_given_one() {
        let vocabulary = Vocabulary::Ids((0..1_000).collect());
        let dataset = Dataset::Random { prefix_len: 0, input_len: 7, output_len: 3, range_ratio: 0.0 };
        for sample in dataset.samples(50, &vocabulary, &mut Random::new(1)) {
            assert_eq!((ids(&sample).len(), sample.output_len), (7, 3));
        }
    }

    #[test]
    fn each_prefix_is_shared_by_as_many() {
        let vocabulary = Vocabulary::Ids((0..1_000).collect());
        let dataset =
            Dataset::PrefixRepetition { prefix_len: 32, suffix_len: 8, num_prefixes: 4, output_len: 5 };
        let samples = dataset.samples(20, &vocabulary, &mut Random::new(1));
        let mut counts = HashMap::new();
        for sample in &samples {
            assert_eq!(ids(sample).len(), 40);
            *counts.entry(ids(sample)[..32].to_vec()).or_insert(0) += 1;
        }
        assert_eq!(counts.into_values().collect::<Vec<_>>(), [5; 4]);
    }

    #[test]
    fn a_template_is_a_part_of_the_length() {
        let words = ["a", "b", "c"].map(str::to_owned).to_vec();
        let vocabulary = Vocabulary::Words { words, num_template_tokens: 6 };
        let check = |prefix_len, input_len, num_words: usize| {
            let dataset = Dataset::Random { prefix_len, input_len, output_len: 1, range_ratio: 0.0 };
            let sample = &dataset.samples(1, &vocabulary, &mut Random::new(1))[0];
            assert_eq!((sample.prompt.len(), sample.num_prompt_tokens), (num_words, num_words + 6));
        };
        check(0, 20, 14);
        check(4, 20, 18);
        check(4, 3, 4);
        check(0, 3, 1);
    }

    #[test]
    fn lines_of_a_file() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let lines = r#"
            "just text"
            {"prompt": "p", "output_tokens": 3}

            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
            {"prompt": [5, 6]}"#;
        file.write_all(lines.as_bytes()).unwrap();
        let samples = read_file(file.path(), 6, 9, true).unwrap();
        let text = |text: &str| Prompt::Text(text.to_owned());
        let wanted = [
            (text("just text"), 9),
            (text("p"), 3),
            (text("Hi"), 9),
            (Prompt::Ids(vec![5, 6]), 9),
            (text("just text"), 9),
            (text("p"), 3),
        ];
        let found: Vec<_> = samples.iter().map(|sample| (sample.prompt.clone(), sample.output_len)).collect();
        assert_eq!(found, wanted);
        assert_eq!(read_file(file.path(), 2, 9, true).unwrap().len(), 2);
        let error = read_file(file.path(), 6, 9, false).unwrap_err().to_string();
        assert!(error.contains(":6: ") && error.contains("/v1/completions"), "{error}");
    }

    #[test]
    fn lines_that_are_none() {
        for (line, word) in [
            ("{", "JSON"),
            ("5", "no prompt"),
            (r#"{"text": "x"}"#, "no prompt"),
            (r#"{"prompt": ["a"]}"#, "token ids"),
            (r#"{"prompt": [-1]}"#, "token ids"),
            (r#"{"prompt": "a", "output_tokens": 0}"#, "at least 1"),
            (r#"{"conversations": []}"#, "no prompt"),
        ] {
            let error = parse_line(line, 1, true).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
