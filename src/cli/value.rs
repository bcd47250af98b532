//! Parsers of flag values with their own syntax: lists of ids, sizes, biases.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use tinyvllm::Error;
use tinyvllm::config::EngineConfig;
use tinyvllm::ops::cpu::simd::CpuLevel;

/// Token ids separated by commas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TokenIds(pub(crate) Vec<u32>);

impl FromStr for TokenIds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse_id = |word: &str| {
            let word = word.trim();
            word.parse().map_err(|_| format!("{word:?} is not a token id; write ids as in 5,6,7"))
        };
        text.split(',').map(parse_id).collect::<Result<_, _>>().map(Self)
    }
}

/// `ID=BIAS`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LogitBias {
    pub(crate) token_id: u32,
    pub(crate) bias: f32,
}

impl FromStr for LogitBias {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (token_id, bias) = text.split_once('=')?;
            Some(Self { token_id: token_id.trim().parse().ok()?, bias: bias.trim().parse().ok()? })
        };
        parse().ok_or_else(|| "write it as ID=BIAS, such as 42=-5".to_owned())
    }
}

/// A fraction from 0 to 1.
pub(crate) fn parse_fraction(text: &str) -> Result<f64, String> {
    let fraction: Option<f64> = text.trim().parse().ok();
    fraction
        .filter(|fraction| (0.0..=1.0).contains(fraction))
        .ok_or_else(|| "give a fraction from 0 to 1, such as 0.7".to_owned())
}

/// A number of bytes with K, M, G or T (powers of 1,024; `Ki`, `KiB` and `KB` mean the same as `K`).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_uppercase();
    let unit = unit.strip_suffix('B').unwrap_or(&unit);
    let factor: u64 = match unit.strip_suffix('I').unwrap_or(unit) {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => return Err("write a size as in 512M or 2G".to_owned()),
    };
    let too_large = || "the size is too large".to_owned();
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(too_large);
    }
    let value: f64 = number.parse().map_err(|_| "write a size as in 512M or 2G".to_owned())?;
    let bytes = value * factor as f64;
    if bytes < 1e18 { Ok(bytes as u64) } else { Err(too_large()) }
}

/// Parses GB/s (10⁹) into bytes per second.
pub(crate) fn parse_bandwidth(text: &str) -> Result<f64, String> {
    let gigabytes: f64 = text.trim().parse().map_err(|_| "write a number of GB/s".to_owned())?;
    match gigabytes {
        0.001..=1e6 => Ok(gigabytes * 1e9),
        _ => Err("it must be at least 0.001 and at most 1000000 GB/s".to_owned()),
    }
}

/// Parses the name of an instruction set that this machine supports.
pub(crate) fn parse_cpu_level(name: &str) -> Result<CpuLevel, String> {
    let available = CpuLevel::available();
    available.iter().copied().find(|level| level.name() == name).ok_or_else(|| {
        let names: Vec<_> = available.iter().map(|level| level.name()).collect();
        format!("this machine has {}", names.join(", "))
    })
}

/// Parses a time in seconds, at most a day.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.trim().parse().map_err(|_| "write a number of seconds".to_owned())?;
    match seconds {
        0.0..=86_400.0 => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("it must be at least 0 and at most 86400 seconds".to_owned()),
    }
}

/// Parses an interval: a tenth of a second to an hour.
pub(crate) fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.trim().parse().map_err(|_| "write a number of seconds".to_owned())?;
    match seconds {
        0.1..=3_600.0 => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("it must be at least 0.1 and at most 3600 seconds".to_owned()),
    }
}

/// Parses any type of the library. Appends the hint of an error to the message, because `clap` prints only
/// that.
pub(crate) fn parse_value<T: FromStr<Err = Error>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: Error| match error.hint() {
        Some(hint) => format!("{error}; {hint}"),
        None => error.to_string(),
    })
}

/// A number of tokens, optionally with vLLM's units: `4k` is 4,000 and `4K` is 4,096, likewise m, M, g and G.
pub(crate) fn parse_count(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let wrong = || "write a number, or one as in 4k (4000) or 4K (4096)".to_owned();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: u64 = match &text[digits.len()..] {
        "" => return text.parse().map_err(|_| wrong()),
        "k" => 1_000,
        "m" => 1_000_000,
        "g" => 1_000_000_000,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return Err(wrong()),
    };
    let number: f64 = digits.parse().map_err(|_| wrong())?;
    match number * factor as f64 {
        count if (0.0..=1e15).contains(&count) => Ok(count.round() as usize),
        _ => Err(wrong()),
    }
}

/// A number of tokens of a sequence, refused if no sequence is as long.
pub(crate) fn at_most_a_sequence(num_tokens: usize) -> Result<usize, String> {
    match num_tokens {
        ..=EngineConfig::LONGEST => Ok(num_tokens),
        _ => Err(format!("it must be at most {}, which no context exceeds", EngineConfig::LONGEST)),
    }
}

/// A duration or an age in its largest unit: `5 minutes`.
pub(crate) fn human_age(age: Duration) -> String {
    let seconds = age.as_secs();
    let (number, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3_600 => (seconds / 60, "minute"),
        3_600..86_400 => (seconds / 3_600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    format!("{number} {unit}{}", if number == 1 { "" } else { "s" })
}

/// Bytes in a readable unit: `1.1 GiB`.
pub(crate) fn human_bytes(bytes: u64) -> impl Display {
    indicatif::BinaryBytes(bytes)
}

/// Parameters in a readable unit: `1.96 B`.
pub(crate) fn human_count(number: u64) -> String {
    let number = number as f64;
    match number {
        _ if number >= 1e9 => format!("{:.2} B", number / 1e9),
        _ if number >= 1e6 => format!("{:.1} M", number / 1e6),
        _ => format!("{:.1} k", number / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let check =
            |text: &str, expected: Option<u64>| assert_eq!(parse_bytes(text).ok(), expected, "{text}");
        check("0", Some(0));
        check("1000", Some(1_000));
        check("2G", Some(2 << 30));
        check("512m", Some(512 << 20));
        check("1.5K", Some(1_536));
        check("3 GiB", Some(3 << 30));
        check("1MB", Some(1 << 20));
        for text in ["", "G", "-1", "1X", "1e3", "1.2.3M", "99999999999T", "1GG", "0x10", "."] {
            check(text, None);
        }
    }

    #[test]
    fn counts() {
        let check =
            |text: &str, expected: Option<usize>| assert_eq!(parse_count(text).ok(), expected, "{text}");
        check("4096", Some(4_096));
        check("4k", Some(4_000));
        check("4K", Some(4_096));
        check("25.6k", Some(25_600));
        check("1m", Some(1_000_000));
        check("0", Some(0));
        for text in ["", "k", "-1", "-1k", "1.5", "4kb", "4 KiB", "1e3", "NaNk", "infk", "9999999999999G"] {
            check(text, None);
        }
    }

    #[test]
    fn ages() {
        let ages =
            [0, 1, 59, 60, 7_199, 90_000, 200_000].map(|seconds| human_age(Duration::from_secs(seconds)));
        assert_eq!(ages, ["0 seconds", "1 second", "59 seconds", "1 minute", "1 hour", "1 day", "2 days"]);
    }

    #[test]
    fn seconds() {
        assert_eq!(parse_seconds("1.5"), Ok(Duration::from_millis(1_500)));
        assert_eq!(parse_seconds("0"), Ok(Duration::ZERO));
        for text in ["", "x", "-1", "NaN", "inf", "86401", "1e300"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn intervals() {
        assert_eq!(parse_interval("0.1"), Ok(Duration::from_millis(100)));
        for text in ["", "0", "0.09", "-1", "NaN", "inf", "3601"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bandwidths() {
        assert_eq!(parse_bandwidth("18.5"), Ok(18.5e9));
        for text in ["", "x", "0", "-1", "NaN", "inf", "1e7"] {
            assert!(parse_bandwidth(text).is_err(), "{text}");
        }
    }

    #[test]
    fn token_ids() {
        let check = |text: &str, expected: Option<&[u32]>| {
            assert_eq!(text.parse::<TokenIds>().ok().map(|ids| ids.0).as_deref(), expected, "{text}");
        };
        check("5,6,7", Some(&[5, 6, 7]));
        check(" 5, 6 ", Some(&[5, 6]));
        check("4294967295", Some(&[u32::MAX]));
        for text in ["", "5,", ",5", "5,,6", "a", "-1", "4294967296", "1.0", "5 6"] {
            check(text, None);
        }
    }

    #[test]
    fn logit_biases() {
        assert_eq!("42=-1.5".parse(), Ok(LogitBias { token_id: 42, bias: -1.5 }));
        for text in ["", "42", "=1", "42=", "x=1", "42=x", "42:1"] {
            assert!(text.parse::<LogitBias>().is_err(), "{text}");
        }
    }

    #[test]
    fn instruction_sets_that_are_not_there_are_refused() {
        let level = CpuLevel::detect();
        assert_eq!(parse_cpu_level(level.name()), Ok(level));
        assert!(parse_cpu_level("mmx").unwrap_err().contains(level.name()));
    }
}
