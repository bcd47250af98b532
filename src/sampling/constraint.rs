//! The engine's interface to constraints on a sequence: a set of allowed tokens before each draw.
//!
//! The engine uses token ids and does not depend on grammars; a request brings its [`Constraint`]. A sequence's state
//! depends on its own tokens only, so that scheduling cannot change the allowed tokens.

use crate::Result;

/// A rule for the output of a request. Each of its sequences starts a state of its own.
pub trait Constraint: Send + Sync + std::fmt::Debug {
    /// The state of a sequence without tokens.
    fn start(&self) -> Box<dyn ConstraintState>;
}

/// How far a sequence has come in its [`Constraint`].
pub trait ConstraintState: Send {
    /// Replaces `allowed` by the tokens that may come next, and returns whether the sequence may end here. If it may
    /// end and the set is empty, it is complete. Tokens that only end the sequence are not in the set.
    ///
    /// # Errors
    /// If the sequence can neither continue nor end, or if the limits do not suffice to decide.
    fn allowed(&mut self, allowed: &mut TokenMask) -> Result<bool>;

    /// Takes the token that was chosen.
    ///
    /// # Errors
    /// If it was not allowed.
    fn accept(&mut self, token_id: u32) -> Result<()>;

    /// Tokens of which all or the first are likely to come next because no other text is allowed. They are tried like
    /// any draft, so they need not be right.
    fn forced(&mut self) -> Vec<u32> {
        Vec::new()
    }

    /// Rolls the last `num_tokens` accepted tokens back. Under constraints that cannot, nothing is drafted.
    ///
    /// # Errors
    /// If it cannot.
    fn roll_back(&mut self, num_tokens: usize) -> Result<()> {
        let _ = num_tokens;
        Err(crate::Error::internal("this constraint cannot be rolled back"))
    }
}

/// A set of token ids, with one bit for each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// Replaces the set: bit `i` of word `w` is token `32 w + i`.
    pub fn set_words(&mut self, words: &[u32]) {
        self.words.clear();
        self.words.extend_from_slice(words);
    }

    /// Takes all tokens out.
    pub fn clear(&mut self) {
        self.words.clear();
    }

    /// Adds a token.
    pub fn insert(&mut self, token_id: u32) {
        let word = (token_id / u32::BITS) as usize;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (token_id % u32::BITS);
    }

    /// Takes a token out.
    pub fn remove(&mut self, token_id: u32) {
        if let Some(word) = self.words.get_mut((token_id / u32::BITS) as usize) {
            *word &= !(1 << (token_id % u32::BITS));
        }
    }

    /// Whether the token is in the set.
    #[must_use]
    pub fn contains(&self, token_id: u32) -> bool {
        let word = self.words.get((token_id / u32::BITS) as usize).copied().unwrap_or(0);
        word >> (token_id % u32::BITS) & 1 == 1
    }

    /// The token, if the set has one.
    #[must_use]
    pub fn only(&self) -> Option<u32> {
        let num_bits: u32 = self.words.iter().map(|word| word.count_ones()).sum();
        (num_bits == 1).then(|| self.iter().next()).flatten()
    }

    /// Whether no token is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The tokens, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let bits = |word: u32| (0..u32::BITS).filter(move |bit| word >> bit & 1 == 1);
        (0_u32..).zip(&self.words).flat_map(move |(index, &word)| bits(word).map(move |bit| index * 32 + bit))
    }

    /// Sets the logits of all other tokens to -infinity.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        let words = self.words.iter().copied().chain(std::iter::repeat(0));
        for (logits, word) in logits.chunks_mut(u32::BITS as usize).zip(words) {
            match word {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                _ => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

impl FromIterator<u32> for TokenMask {
    fn from_iter<I: IntoIterator<Item = u32>>(token_ids: I) -> Self {
        let mut mask = Self::default();
        token_ids.into_iter().for_each(|token_id| mask.insert(token_id));
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_a_set() {
        let ids = [0, 5, 31, 32, 63, 64, 100];
        let mut mask: TokenMask = ids.into_iter().collect();
        assert_eq!(mask.iter().collect::<Vec<_>>(), ids);
        assert!((0..200).all(|id| mask.contains(id) == ids.contains(&id)));
        assert!(!mask.contains(u32::MAX));
        mask.remove(5);
        mask.remove(u32::MAX);
        assert!(!mask.contains(5) && !mask.is_empty());
        ids.iter().for_each(|id| mask.remove(*id));
        assert!(mask.is_empty());
        mask.set_words(&[2, 1]);
        assert_eq!(mask.iter().collect::<Vec<_>>(), [1, 32]);
        mask.clear();
        assert_eq!(mask.iter().next(), None);
    }

    #[test]
    fn logits_outside_the_mask_are_impossible() {
        let mut mask: TokenMask = (0..32).chain([70]).collect();
        mask.remove(3);
        for num_logits in [0, 31, 32, 71, 200] {
            let mut logits = vec![1.0; num_logits];
            mask.apply(&mut logits);
            for (id, logit) in (0..).zip(logits) {
                assert_eq!(logit == 1.0, mask.contains(id), "{id}");
            }
        }
    }
}
