//! From a router's logits to experts and weights.

use crate::config::{ExpertsConfig, Scoring};

/// Writes the experts of a token, the best first, and their weights. `logits` becomes scratch.
///
/// probabilities → plus bias to choose by → only experts of the best groups → the best ones → their probabilities
/// without bias → divided by their sum → times a factor.
pub(super) fn choose(
    config: &ExpertsConfig,
    bias: Option<&[f32]>,
    logits: &mut [f32],
    experts: &mut [u32],
    weights: &mut [f32],
) {
    probabilities(config.scoring, logits);
    let score = |expert: usize, probability: f32| probability + bias.map_or(0.0, |bias| bias[expert]);
    let group_len = logits.len() / config.num_groups.max(1);
    let is_open = |expert: usize, probabilities: &[f32]| {
        if config.num_groups_per_tok >= config.num_groups {
            return true;
        }
        // A group is open if fewer than this number of others are better, or equal and before it.
        let own = expert / group_len;
        let own_score = group_score(config.scoring, own, group_len, probabilities, score);
        let better = (0..config.num_groups).filter(|group| {
            let other = group_score(config.scoring, *group, group_len, probabilities, score);
            other > own_score || (other == own_score && *group < own)
        });
        better.count() < config.num_groups_per_tok
    };
    for rank in 0..experts.len() {
        let (chosen, _) = experts.split_at(rank);
        let mut best: Option<(usize, f32)> = None;
        for (expert, probability) in logits.iter().enumerate() {
            let score = score(expert, *probability);
            // NaN ranks below every number; some expert has to be chosen.
            let is_better = best.is_none_or(|(_, best)| score > best || (best.is_nan() && !score.is_nan()));
            if is_better && !chosen.contains(&(expert as u32)) && is_open(expert, logits) {
                best = Some((expert, score));
            }
        }
        let (expert, _) = best.unwrap_or((0, 0.0));
        experts[rank] = expert as u32;
        weights[rank] = logits[expert];
    }
    let sum: f32 = weights.iter().sum();
    // The constant that the models were trained with: the sum is never 0.
    let factor = if config.normalize { config.scale / (sum + 1e-20) } else { config.scale };
    weights.iter_mut().for_each(|weight| *weight *= factor);
}

fn probabilities(scoring: Scoring, logits: &mut [f32]) {
    match scoring {
        Scoring::Sigmoid => logits.iter_mut().for_each(|logit| *logit = 1.0 / (1.0 + (-*logit).exp())),
        Scoring::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for logit in logits.iter_mut() {
                *logit = (*logit - max).exp();
                sum += *logit;
            }
            logits.iter_mut().for_each(|logit| *logit /= sum);
        }
    }
}

fn group_score(
    scoring: Scoring,
    group: usize,
    group_len: usize,
    probabilities: &[f32],
    score: impl Fn(usize, f32) -> f32,
) -> f32 {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    let first = group * group_len;
    for (expert, probability) in (first..).zip(&probabilities[first..first + group_len]) {
        let score = score(expert, *probability);
        if score > best {
            (best, second) = (score, best);
        } else if score > second {
            second = score;
        }
    }
    match scoring {
        Scoring::Softmax => best,
        Scoring::Sigmoid if group_len < 2 => best,
        Scoring::Sigmoid => best + second,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(scoring: Scoring) -> ExpertsConfig {
        ExpertsConfig {
            num_dense_layers: 0,
            num_experts: 4,
            num_experts_per_tok: 2,
            intermediate_size: 1,
            shared_intermediate_size: None,
            scoring,
            has_selection_bias: false,
            has_router_bias: false,
            has_biases: false,
            is_interleaved: false,
            num_groups: 1,
            num_groups_per_tok: 1,
            normalize: false,
            scale: 1.0,
        }
    }

    fn chosen(config: &ExpertsConfig, bias: Option<&[f32]>, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let mut experts = vec![0; config.num_experts_per_tok];
        let mut weights = vec![0.0; config.num_experts_per_tok];
        choose(config, bias, &mut logits.to_vec(), &mut experts, &mut weights);
        (experts, weights)
    }

    fn ln(probabilities: [f32; 4]) -> [f32; 4] {
        probabilities.map(f32::ln)
    }

    fn assert_near(actual: &[f32], expected: &[f32]) {
        assert_eq!(actual.len(), expected.len());
        for (actual, expected) in actual.iter().zip(expected) {
            assert!((actual - expected).abs() < 1e-6, "{actual} is not {expected}");
        }
    }

    #[test]
    fn softmax_is_over_all_experts() {
        let softmax = config(Scoring::Softmax);
        let (experts, weights) = chosen(&softmax, None, &ln([0.1, 0.4, 0.2, 0.3]));
        assert_eq!(experts, [1, 3]);
        assert_near(&weights, &[0.4, 0.3]);
        let (_, weights) = chosen(
            &ExpertsConfig { normalize: true, scale: 2.0, ..softmax },
            None,
            &ln([0.1, 0.4, 0.2, 0.3]),
        );
        assert_near(&weights, &[8.0 / 7.0, 6.0 / 7.0]);
    }

    #[test]
    fn a_bias_chooses_but_does_not_weigh() {
        let sigmoid = ExpertsConfig { normalize: true, scale: 1.8, ..config(Scoring::Sigmoid) };
        // Sigmoids 0.5, 0.75, 0.25, 0.8.
        let logits = [0.0, 3.0_f32.ln(), -(3.0_f32.ln()), 4.0_f32.ln()];
        let (experts, weights) = chosen(&sigmoid, Some(&[0.0, -1.0, 1.0, 0.0]), &logits);
        assert_eq!(experts, [2, 3]);
        assert_near(&weights, &[1.8 * 0.25 / 1.05, 1.8 * 0.8 / 1.05]);
    }

    #[test]
    fn only_the_best_groups_are_open() {
        let softmax = ExpertsConfig { num_groups: 2, num_groups_per_tok: 1, ..config(Scoring::Softmax) };
        assert_eq!(chosen(&softmax, None, &ln([0.1, 0.4, 0.25, 0.25])).0, [1, 0]);
        // The sum of the best two decides.
        let sigmoid = ExpertsConfig { num_groups: 2, num_groups_per_tok: 1, ..config(Scoring::Sigmoid) };
        assert_eq!(chosen(&sigmoid, None, &[-9.0, 1.0, 0.5, 0.6]).0, [3, 2]);
    }

    #[test]
    fn of_equals_the_first_are_chosen_and_numbers_before_none() {
        assert_eq!(chosen(&config(Scoring::Softmax), None, &[1.0; 4]).0, [0, 1]);
        let (experts, _) = chosen(&config(Scoring::Sigmoid), None, &[f32::NAN, 0.0, f32::NAN, -1.0]);
        assert_eq!(experts, [1, 3]);
        assert_eq!(chosen(&config(Scoring::Softmax), None, &[f32::NAN; 4]).0, [0, 1]);
    }
}
