//! The rotations of a model: the frequencies of rotary position embedding, with all ways of scaling them.

use std::f64::consts::PI;

use crate::config::{ModelConfig, RopeConfig, RopeScaling, RopeStyle, Rotation};
use crate::layers::Loader;
use crate::ops::RopeTable;
use crate::{Error, Result};

/// The angles of all rotations that layers have.
#[derive(Debug)]
pub struct RopeTables {
    /// Of [`Rotation::Usual`].
    pub usual: RopeTable,
    local: Option<RopeTable>,
    none: Option<RopeTable>,
}

impl RopeTables {
    /// Tables for positions below `max_positions`.
    ///
    /// # Errors
    /// If the divisors of the frequencies have to come from the checkpoint and are not there, or there is no memory.
    pub fn new(loader: &Loader<'_>, config: &ModelConfig, max_positions: usize) -> Result<Self> {
        let local = config.local_rope.as_ref().map(|rope| rope_table(loader, rope, max_positions));
        let has_none = config.layer_attention.iter().any(|layer| layer.rotation == Rotation::None);
        // Without pairs nothing is rotated.
        let none = has_none
            .then(|| RopeTable::new(loader.context(), RopeStyle::HalfSplit, Vec::new(), 1.0, max_positions));
        Ok(Self {
            usual: rope_table(loader, &config.rope, max_positions)?,
            local: local.transpose()?,
            none: none.transpose()?,
        })
    }

    /// Computes the missing positions below `num_positions`.
    ///
    /// # Errors
    /// If there are more than the tables are made for.
    pub fn extend_to(&mut self, num_positions: usize) -> Result<()> {
        let Self { usual, local, none } = self;
        [Some(usual), local.as_mut(), none.as_mut()]
            .into_iter()
            .flatten()
            .try_for_each(|table| table.extend_to(num_positions))
    }

    /// The angles of a layer's rotation.
    ///
    /// # Errors
    /// If the model has no such rotation.
    pub fn of(&self, rotation: Rotation) -> Result<&RopeTable> {
        let table = match rotation {
            Rotation::Usual => Some(&self.usual),
            Rotation::Local => self.local.as_ref(),
            Rotation::None => self.none.as_ref(),
        };
        table.ok_or_else(|| Error::internal(format!("the model has no rotation {rotation:?}")))
    }
}

/// The rotations of positions `0..max_positions`.
///
/// # Errors
/// If the divisors of the frequencies have to come from the checkpoint and are not there.
fn rope_table(loader: &Loader<'_>, config: &RopeConfig, max_positions: usize) -> Result<RopeTable> {
    let divisors = match &config.scaling {
        RopeScaling::FreqFactors(_) => Some(loader.vector("rope_freqs.weight", config.dim / 2)?),
        RopeScaling::Long { divisors, original_context, .. } => {
            let is_long = max_positions > *original_context;
            Some(match divisors {
                Some((short, long)) => {
                    let divisors = if is_long { long } else { short };
                    divisors.iter().map(|divisor| *divisor as f32).collect()
                }
                None => {
                    let names = ["rope_factors_short.weight", "rope_factors_long.weight"];
                    loader.ignore(names[usize::from(!is_long)]);
                    loader.vector(names[usize::from(is_long)], config.dim / 2)?
                }
            })
        }
        _ => None,
    };
    let factor = match *config.scaling.without_divisors() {
        RopeScaling::Yarn { attention_factor, .. } | RopeScaling::Long { attention_factor, .. } => {
            attention_factor as f32
        }
        _ => 1.0,
    };
    let frequencies = frequencies(config, divisors.as_deref());
    let table = RopeTable::new(loader.context(), config.style, frequencies, factor, max_positions)?;
    Ok(table.with_growth(config.query_growth))
}

/// Radians per position of each pair.
fn frequencies(config: &RopeConfig, divisors: Option<&[f32]>) -> Vec<f32> {
    let dim = config.dim as f64;
    let base = |pair: usize| config.theta.powf(-2.0 * pair as f64 / dim);
    let scaled = |pair: usize| match *config.scaling.without_divisors() {
        RopeScaling::None | RopeScaling::FreqFactors(_) | RopeScaling::Long { .. } => base(pair),
        RopeScaling::Linear { factor } => base(pair) / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let wavelength = 2.0 * PI / base(pair);
            let context = original_context as f64;
            if wavelength < context / high_freq_factor {
                base(pair)
            } else if wavelength > context / low_freq_factor {
                base(pair) / factor
            } else {
                let smooth = (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                base(pair) * ((1.0 - smooth) / factor + smooth)
            }
        }
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
            // The pair that makes this many rotations in the original context.
            let pair_of = |rotations: f64| {
                dim * (original_context as f64 / (2.0 * PI * rotations)).ln() / (2.0 * config.theta.ln())
            };
            let (low, high) = (pair_of(beta_fast), pair_of(beta_slow));
            let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
            let (low, high) = (low.max(0.0), high.min(dim - 1.0));
            let ramp = ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            base(pair) / factor * ramp + base(pair) * (1.0 - ramp)
        }
    };
    let divisor = |pair: usize| divisors.map_or(1.0, |divisors| f64::from(divisors[pair]));
    (0..config.dim / 2).map(|pair| (scaled(pair) / divisor(pair)) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaled(theta: f64, dim: usize, scaling: RopeScaling) -> Vec<f32> {
        frequencies(
            &RopeConfig { theta, dim, style: RopeStyle::HalfSplit, scaling, query_growth: None },
            None,
        )
    }

    #[test]
    fn llama3_divisors_are_those_of_published_files() {
        let check = |dim, factor, expected: &[(usize, f32)]| {
            let scaling = RopeScaling::Llama3 {
                factor,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 8192,
            };
            let plain = scaled(5e5, dim, RopeScaling::None);
            let scaled = scaled(5e5, dim, scaling);
            for &(pair, divisor) in expected {
                let actual = plain[pair] / scaled[pair];
                assert!((actual / divisor - 1.0).abs() < 1e-5, "pair {pair}: {actual}, wanted {divisor}");
            }
        };
        check(
            128,
            8.0,
            &[
                (0, 1.0),
                (28, 1.0),
                (29, 1.20748),
                (30, 1.55341),
                (31, 2.02631),
                (32, 2.69453),
                (33, 3.68425),
                (34, 5.25733),
                (35, 8.0),
                (63, 8.0),
            ],
        );
        check(64, 32.0, &[(14, 1.0), (15, 1.65133), (16, 3.29226), (17, 9.66673), (18, 32.0), (31, 32.0)]);
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_divides_slow_ones() {
        let scaling = RopeScaling::Yarn {
            factor: 40.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.0,
            truncate: true,
        };
        let plain = scaled(1e4, 64, RopeScaling::None);
        let scaled = scaled(1e4, 64, scaling);
        // 64 · ln(4096 / 64π) / (2 ln 10⁴) = 10.47 and 64 · ln(4096 / 2π) / (2 ln 10⁴) = 22.51.
        for pair in 0..=10 {
            assert_eq!(scaled[pair], plain[pair], "pair {pair}");
        }
        for pair in 23..32 {
            assert!((plain[pair] / scaled[pair] - 40.0).abs() < 1e-3, "pair {pair}");
        }
        // A third of the ramp between: (14 - 10) / (23 - 10).
        let ramp = 4.0 / 13.0;
        assert!((scaled[14] / plain[14] - (ramp / 40.0 + 1.0 - ramp)).abs() < 1e-5);
    }

    #[test]
    fn the_ramp_of_yarn_may_end_between_pairs() {
        let scaling = RopeScaling::Yarn {
            factor: 40.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.0,
            truncate: false,
        };
        let (plain, scaled) = (scaled(1e4, 64, RopeScaling::None), scaled(1e4, 64, scaling));
        for (pair, expected) in [(10, 1.0), (11, 0.957_266), (14, 0.714_35), (22, 0.066_574), (23, 0.025)] {
            let actual = scaled[pair] / plain[pair];
            assert!((actual - expected).abs() < 1e-5, "pair {pair}: {actual}, wanted {expected}");
        }
    }

    #[test]
    fn linear_and_given_divisors_divide() {
        let plain = scaled(1e4, 8, RopeScaling::None);
        assert_eq!(plain, [1.0, 0.1, 0.01, 0.001]);
        assert_eq!(scaled(1e4, 8, RopeScaling::Linear { factor: 2.0 }), [0.5, 0.05, 0.005, 0.0005]);
        let check = |scaling: RopeScaling, expected: [f32; 4]| {
            let scaling = RopeScaling::FreqFactors(Box::new(scaling));
            let config =
                RopeConfig { theta: 1e4, dim: 8, style: RopeStyle::Interleaved, scaling, query_growth: None };
            assert_eq!(frequencies(&config, Some(&[1.0, 1.0, 2.0, 4.0])), expected);
        };
        check(RopeScaling::None, [1.0, 0.1, 0.005, 0.00025]);
        check(RopeScaling::Linear { factor: 2.0 }, [0.5, 0.05, 0.0025, 0.000_125]);
    }
}
