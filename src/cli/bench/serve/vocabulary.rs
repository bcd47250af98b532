//! The vocabulary of prompts, so that they have the requested length.
//!
//! The length is in tokens of a tokenizer that only the server has. There are three ways, tried in this
//! order:
//!
//! 1. The server has `/tokenize`, as vLLM and this program do. It tokenizes a list of English words. For
//!    completions, prompts are lists of the resulting ids. That is exact: nothing is added to token ids, and
//!    none of them is a special token. For chats, prompts are words of one token each, and the tokens of the
//!    chat template are subtracted.
//! 2. The size of the vocabulary was given. Prompts are ids from its middle, because special tokens are at
//!    its ends. That is exact for completions.
//! 3. Each word counts as one token, so the length is approximate. Results always count the tokens that the
//!    server reports.

use serde_json::{Value, json};

use super::random::Random;
use super::request::Api;
use super::workload::Prompt;
use crate::http::HttpClient;

/// Size limit of the answer of `/tokenize`.
const MAX_ANSWER_BYTES: usize = 4 << 20;
/// With fewer distinct tokens, prompts would be too similar.
const MIN_TOKENS: usize = 16;

/// Words that most vocabularies have.
const WORDS: &str = "\
    the and that have for not with you this but his from they say her she will one all would there their what out \
    about who get which when make can like time just him know take people into year your good some could them see \
    other than then now look only come its over think also back after use two how our work first well way even new \
    want because any these give day most us great man world life still hand part child eye woman place case week \
    company system program question government number night point home water room mother area money story fact \
    month lot right study book job word business issue side kind head house service friend father power hour game \
    line end member law car city name president team minute idea body information back parent face others level \
    office door health person art war history party result change morning reason research girl guy moment air \
    teacher force education foot boy age policy music market sense nation plan college interest death experience \
    effect class control field development role effort rate heart drug show leader light voice wife police mind \
    price report decision son view relationship town road arm difference value building action season society tax \
    director position player record paper space ground form event official matter center couple site project \
    activity star table need court oil situation cost industry figure street image phone data picture practice \
    piece land product doctor wall patient worker news test movie north love support technology";

/// The material of prompts.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Vocabulary {
    /// Token ids.
    Ids(Vec<u32>),
    /// Words, and the number of tokens that a chat template adds.
    Words { words: Vec<String>, num_template_tokens: usize },
}

/// A vocabulary, and how exact its lengths are.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) vocabulary: Vocabulary,
    /// Whether prompts have exactly the requested length.
    pub(super) is_exact: bool,
    /// Whether the server's tokenizer was used.
    pub(super) by_server: bool,
}

impl Vocabulary {
    /// Finds the best vocabulary for the server.
    pub(super) async fn find(client: &HttpClient, api: Api, model: &str, vocab_size: Option<u32>) -> Found {
        let body = json!({"model": model, "prompt": words().collect::<Vec<_>>().join(" "),
            "add_special_tokens": false, "return_token_strs": true});
        let answer = client.post_json("/tokenize", &body, MAX_ANSWER_BYTES).await.ok();
        let by_server = answer.is_some();
        let fallback = Self::Words { words: words().map(str::to_owned).collect(), num_template_tokens: 0 };
        let found = |vocabulary, is_exact, by_server| Found { vocabulary, is_exact, by_server };
        match (api, answer, vocab_size) {
            (Api::Completions, Some(answer), _) => match Self::of_ids(&answer) {
                Some(vocabulary) => found(vocabulary, true, true),
                None => found(fallback, false, by_server),
            },
            (Api::Completions, None, Some(size)) => found(Self::of_size(size), true, false),
            (Api::Chat, Some(answer), _) => match Self::of_words(client, model, &answer).await {
                Some((vocabulary, is_exact)) => found(vocabulary, is_exact, true),
                None => found(fallback, false, by_server),
            },
            (_, None, _) => found(fallback, false, false),
        }
    }

    fn of_ids(answer: &Value) -> Option<Self> {
        let ids = answer["tokens"].as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok());
        let mut ids = ids.collect::<Option<Vec<_>>>()?;
        ids.sort_unstable();
        ids.dedup();
        (ids.len() >= MIN_TOKENS).then_some(Self::Ids(ids))
    }

    fn of_size(size: u32) -> Self {
        let quarter = size / 4;
        Self::Ids((quarter..(size - quarter).max(quarter + 1)).collect())
    }

    /// Words of one token each, and whether a chat with more of them has exactly as many more tokens.
    async fn of_words(client: &HttpClient, model: &str, answer: &Value) -> Option<(Self, bool)> {
        let words = single_token_words(answer);
        if words.len() < MIN_TOKENS {
            return None;
        }
        let text = |num_words: usize| {
            let text: Vec<&str> = (0..num_words).map(|index| words[index % words.len()].as_str()).collect();
            text.join(" ")
        };
        let count = async |num_words: usize| {
            let messages = json!([{"role": "user", "content": text(num_words)}]);
            let body = json!({"model": model, "messages": messages, "add_generation_prompt": true});
            let answer = client.post_json("/tokenize", &body, MAX_ANSWER_BYTES).await.ok()?;
            answer["count"].as_u64().and_then(|count| usize::try_from(count).ok())
        };
        let (few, many) = (count(MIN_TOKENS).await?, count(3 * MIN_TOKENS).await?);
        let num_template_tokens = few.saturating_sub(MIN_TOKENS);
        let is_exact = many.checked_sub(few) == Some(2 * MIN_TOKENS);
        Some((Self::Words { words, num_template_tokens }, is_exact))
    }

    /// A prompt of `num_tokens` tokens.
    pub(super) fn prompt(&self, num_tokens: usize, random: &mut Random) -> Prompt {
        match self {
            Self::Ids(ids) => {
                Prompt::Ids((0..num_tokens).filter_map(|_| random.pick(ids).copied()).collect())
            }
            Self::Words { words, .. } => {
                // The first word has no space before it, so its tokens may differ. It is always the same
                // word, and counted with the template.
                let first = words.first().filter(|_| num_tokens > 0);
                let more = (1..num_tokens).filter_map(|_| random.pick(words));
                let words: Vec<&str> = first.into_iter().chain(more).map(String::as_str).collect();
                Prompt::Text(words.join(" "))
            }
        }
    }

    /// Tokens that the chat template adds to a prompt.
    pub(super) fn num_template_tokens(&self) -> usize {
        match self {
            Self::Ids(_) => 0,
            Self::Words { num_template_tokens, .. } => *num_template_tokens,
        }
    }
}

fn words() -> impl Iterator<Item = &'static str> {
    WORDS.split_whitespace()
}

/// The words that are one token together with the space before them. Tokenizers write it as `Ġ` or `▁`.
fn single_token_words(answer: &Value) -> Vec<String> {
    let tokens = answer["token_strs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let spaced = |token: &Value| {
        let token = token.as_str()?;
        token.strip_prefix([' ', 'Ġ', '▁']).map(str::to_owned)
    };
    let tokens: std::collections::HashSet<String> = tokens.iter().filter_map(spaced).collect();
    words().filter(|word| tokens.contains(*word)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_ordinary_text() {
        let tokens: Vec<u32> = (0..40).map(|index| 100 + index % 20).collect();
        let wanted = Vocabulary::Ids((100..120).collect());
        assert_eq!(Vocabulary::of_ids(&json!({"tokens": tokens})), Some(wanted));
        for wrong in [json!({}), json!({"tokens": [1, 2, 3]}), json!({"tokens": ["a"]})] {
            assert_eq!(Vocabulary::of_ids(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn special_tokens_are_not_in_the_middle() {
        assert_eq!(Vocabulary::of_size(8), Vocabulary::Ids(vec![2, 3, 4, 5]));
        assert_eq!(Vocabulary::of_size(1), Vocabulary::Ids(vec![0]));
        assert_eq!(Vocabulary::of_size(0), Vocabulary::Ids(vec![0]));
    }

    #[test]
    fn words_of_one_token() {
        let answer = json!({"token_strs": ["the", "Ġand", "▁have", " for", " rela", "tionship", "Ġxyz"]});
        assert_eq!(single_token_words(&answer), ["and", "have", "for"]);
        assert!(single_token_words(&json!({})).is_empty());
    }

    #[test]
    fn prompts_have_their_length() {
        let mut random = Random::new(5);
        let Prompt::Ids(ids) = Vocabulary::of_size(100).prompt(300, &mut random) else { panic!("no ids") };
        assert!(ids.len() == 300 && ids.iter().all(|id| (25..75).contains(id)));
        let words = ["a", "b"].map(str::to_owned).to_vec();
        let vocabulary = Vocabulary::Words { words, num_template_tokens: 4 };
        let Prompt::Text(text) = vocabulary.prompt(30, &mut random) else { panic!("no text") };
        assert_eq!(text.split(' ').count(), 30);
    }
}
