//! The type of cached keys and values: the requested one, or one that holds the model's.

use std::str::FromStr;

use crate::config::ModelConfig;
use crate::models::{CachedRange, cached_range};
use crate::ops::KvCacheDType;
use crate::ops::cpu::fp8::E4m3;
use crate::weights::Checkpoint;
use crate::{Error, Result};

/// The largest value that half precision holds.
const F16_MAX: f32 = 65_504.0;

/// `--kv-cache-dtype`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvCacheChoice {
    /// Half precision, or bf16 for a model whose keys or values may be beyond it.
    #[default]
    Auto,
    /// This one.
    Fixed(KvCacheDType),
}

impl From<KvCacheDType> for KvCacheChoice {
    fn from(dtype: KvCacheDType) -> Self {
        Self::Fixed(dtype)
    }
}

impl FromStr for KvCacheChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            name => name.parse().map(Self::Fixed),
        }
    }
}

/// The result of the choice.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ChosenKvCache {
    pub(super) dtype: KvCacheDType,
    /// The notice about it.
    pub(super) notice: Option<String>,
    /// The way out where logits are not numbers.
    pub(super) broken_logits_hint: Option<String>,
}

impl KvCacheChoice {
    /// The type before weights are read. Another one that they may call for is as large.
    #[must_use]
    pub fn planned(self) -> KvCacheDType {
        match self {
            Self::Auto => KvCacheDType::default(),
            Self::Fixed(dtype) => dtype,
        }
    }

    /// The type for a model, whose weights are read where kernels have keys and values in half precision. Where it
    /// `rounds_queries`, a device gives queries the type of keys, and makes halves of types of eight bits too.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] if half precision was requested and does not hold the keys or values.
    pub(super) fn choose(
        self,
        checkpoint: &Checkpoint,
        config: &ModelConfig,
        rounds_queries: bool,
        num_threads: usize,
    ) -> Result<ChosenKvCache> {
        let are_halves = match self.planned() {
            KvCacheDType::F16 => true,
            KvCacheDType::Q8_0 | KvCacheDType::Fp8E4m3 => rounds_queries,
            KvCacheDType::Bf16 | KvCacheDType::F32 => false,
        };
        let mut chosen = match are_halves {
            true => self.for_range(cached_range(checkpoint, config, rounds_queries, num_threads))?,
            false => ChosenKvCache { dtype: self.planned(), notice: None, broken_logits_hint: None },
        };
        if chosen.dtype == KvCacheDType::Fp8E4m3 {
            // Without queries, which are not stored.
            let range = cached_range(checkpoint, config, false, num_threads);
            chosen.notice = range.and_then(clamped).or(chosen.notice);
        }
        Ok(chosen)
    }

    fn for_range(self, range: Option<CachedRange>) -> Result<ChosenKvCache> {
        let half = |notice, broken_logits_hint| {
            Ok(ChosenKvCache { dtype: self.planned(), notice, broken_logits_hint })
        };
        // Unknown.
        let Some(CachedRange { layer, at_most, at_least }) = range else {
            let hint = "keys or values may be beyond half precision: start with --kv-cache-dtype bf16";
            return half(None, Some(hint.to_owned()));
        };
        if at_most <= F16_MAX {
            return half(None, None);
        }
        let reach = format!("keys or values of layer {layer} may be as large as {at_most:.0}");
        match self {
            Self::Auto => Ok(ChosenKvCache {
                dtype: KvCacheDType::Bf16,
                notice: Some(format!(
                    "{reach}, and half precision holds {F16_MAX:.0}: the KV cache has bf16, which is less exact \
                     (--kv-cache-dtype f32 is exact)"
                )),
                broken_logits_hint: None,
            }),
            Self::Fixed(dtype) if at_least > F16_MAX => Err(Error::invalid_request(format!(
                "--kv-cache-dtype {dtype} is for values up to {F16_MAX:.0}, but keys or values of this model are \
                 {at_least:.0} and more"
            ))
            .with_hint("give --kv-cache-dtype bf16 or f32, or omit it")),
            Self::Fixed(_) => half(
                Some(format!(
                    "{reach}, and half precision holds {F16_MAX:.0}; --kv-cache-dtype bf16 holds them all"
                )),
                Some(format!("{reach}, beyond half precision: start with --kv-cache-dtype bf16")),
            ),
        }
    }
}

/// The notice where some cached value is always beyond fp8_e4m3. Bounds are beyond it for most models, whose values are
/// far below their bounds, so these say nothing.
fn clamped(range: CachedRange) -> Option<String> {
    (range.at_least > E4m3::MAX).then(|| {
        format!(
            "keys or values of this model are {:.0} and more, and fp8_e4m3 holds {:.0}: larger ones become that \
             (--kv-cache-dtype q8_0 holds them)",
            range.at_least,
            E4m3::MAX
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_names_values_that_eight_bits_do_not_hold() {
        let range = |at_least| CachedRange { layer: 3, at_least, at_most: 1e4 };
        assert_eq!(clamped(range(448.0)), None);
        let notice = clamped(range(500.0)).unwrap();
        assert!(notice.contains("are 500 and more, and fp8_e4m3 holds 448"), "{notice}");
    }

    #[test]
    fn half_precision_is_for_keys_that_it_holds() {
        let check = |choice: &str, range: Option<(f32, f32)>, expected: Result<KvCacheDType, &str>| {
            let choice: KvCacheChoice = choice.parse().unwrap();
            let range = range.map(|(at_least, at_most)| CachedRange { layer: 3, at_least, at_most });
            match (choice.for_range(range), expected) {
                (Ok(chosen), Ok(dtype)) => assert_eq!(chosen.dtype, dtype, "{choice:?}, {range:?}"),
                (Err(error), Err(expected)) => {
                    assert!(error.message().contains(expected), "{error}");
                    assert!(error.hint().unwrap().contains("--kv-cache-dtype bf16"), "{error:?}");
                }
                (found, _) => panic!("{choice:?}, {range:?}: {found:?}"),
            }
        };
        check("auto", Some((0.0, 300.0)), Ok(KvCacheDType::F16));
        check("auto", Some((0.0, 7e4)), Ok(KvCacheDType::Bf16));
        check("auto", Some((9e4, 1e5)), Ok(KvCacheDType::Bf16));
        check("auto", None, Ok(KvCacheDType::F16));
        check("f16", Some((0.0, 7e4)), Ok(KvCacheDType::F16));
        check("q8_0", Some((0.0, 7e4)), Ok(KvCacheDType::Q8_0));
        check("q8_0", Some((9e4, 1e5)), Err("--kv-cache-dtype q8_0 is for values up to 65504"));
        check("fp8_e4m3", Some((500.0, 7e4)), Ok(KvCacheDType::Fp8E4m3));
        check(
            "f16",
            Some((9e4, 1e5)),
            Err("up to 65504, but keys or values of this model are 90000 and more"),
        );
        assert_eq!(KvCacheChoice::Fixed(KvCacheDType::F32).planned(), KvCacheDType::F32);
        let notice =
            KvCacheChoice::Auto.for_range(Some(CachedRange { layer: 3, at_least: 0.0, at_most: 7e4 }));
        assert!(notice.unwrap().notice.unwrap().contains("layer 3 may be as large as 70000"));
        for range in [None, Some(CachedRange { layer: 3, at_least: 0.0, at_most: 7e4 })] {
            let chosen = KvCacheChoice::Fixed(KvCacheDType::F16).for_range(range).unwrap();
            assert!(chosen.broken_logits_hint.unwrap().contains("--kv-cache-dtype bf16"));
        }
    }
}
