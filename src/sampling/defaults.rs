//! The sampling defaults of a model's files, for requests without values of their own.

use super::SamplingParams;

/// Defaults for missing values of requests; none where the files have none either.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SamplingDefaults {
    /// See [`SamplingParams::temperature`].
    pub temperature: Option<f32>,
    /// See [`SamplingParams::top_k`].
    pub top_k: Option<usize>,
    /// See [`SamplingParams::top_p`].
    pub top_p: Option<f32>,
    /// See [`SamplingParams::min_p`].
    pub min_p: Option<f32>,
    /// See [`SamplingParams::repetition_penalty`].
    pub repetition_penalty: Option<f32>,
    /// Most tokens to generate, as far as the context holds them.
    pub max_tokens: Option<usize>,
}

impl SamplingDefaults {
    /// The parameters, where those that are not set have the values of the files. `max_tokens` is not among them: it
    /// depends on the prompt, see [`Self::max_tokens_for`].
    #[must_use]
    pub fn apply(&self, params: SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(params.temperature),
            top_k: self.top_k.unwrap_or(params.top_k),
            top_p: self.top_p.unwrap_or(params.top_p),
            min_p: self.min_p.unwrap_or(params.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(params.repetition_penalty),
            ..params
        }
    }

    /// Most tokens for a prompt that leaves space for `left`, with at least `min_tokens` requested. A default is no
    /// reason to refuse a prompt.
    #[must_use]
    pub fn max_tokens_for(&self, left: usize, min_tokens: usize) -> Option<usize> {
        self.max_tokens.map(|most| most.max(min_tokens).min(left).max(1))
    }

    /// The values, as a line would list them; none if there are none.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        let values = [
            ("temperature", self.temperature.map(|value| value.to_string())),
            ("top_k", self.top_k.map(|value| value.to_string())),
            ("top_p", self.top_p.map(|value| value.to_string())),
            ("min_p", self.min_p.map(|value| value.to_string())),
            ("repetition_penalty", self.repetition_penalty.map(|value| value.to_string())),
            ("max_tokens", self.max_tokens.map(|value| value.to_string())),
        ];
        let given = values.into_iter().filter_map(|(name, value)| Some(format!("{name} {}", value?)));
        let list = given.collect::<Vec<_>>().join(", ");
        (!list.is_empty()).then_some(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_files_replace_unset_ones() {
        let defaults = SamplingDefaults { temperature: Some(0.6), top_k: Some(20), ..Default::default() };
        let params = defaults.apply(SamplingParams { top_p: 0.9, ..SamplingParams::default() });
        assert_eq!((params.temperature, params.top_k, params.top_p), (0.6, 20, 0.9));
        assert_eq!(defaults.describe().unwrap(), "temperature 0.6, top_k 20");
        assert_eq!(SamplingDefaults::default().describe(), None);
    }

    #[test]
    fn a_limit_of_tokens_gives_way_to_the_window_and_to_what_is_wanted_at_least() {
        let check = |most: Option<usize>, left: usize, min_tokens: usize, expected: Option<usize>| {
            let defaults = SamplingDefaults { max_tokens: most, ..Default::default() };
            assert_eq!(defaults.max_tokens_for(left, min_tokens), expected);
        };
        check(None, 10, 0, None);
        check(Some(8), 10, 0, Some(8));
        check(Some(8), 4, 0, Some(4));
        check(Some(8), 0, 0, Some(1));
        check(Some(8), 20, 9, Some(9));
    }
}
