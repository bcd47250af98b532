//! Regular expressions for the numbers of a range, exact to the last digit.
//!
//! Every number that they match is one that programs can hold: an integer without bounds fits 64 bits, and other
//! numbers have at most [`MAX_DIGITS`] digits, which a double distinguishes from their neighbours, so that a bound
//! that excludes itself is not met by rounding.

use std::cmp::Ordering;

use serde_json::{Number, Value};

use super::keywords::BOUNDS;
use crate::{Error, Result};

/// Significant digits of a number with a fraction.
const MAX_DIGITS: usize = 15;
/// Digits before the point of a number without a bound on that side.
const MAX_WHOLE_DIGITS: usize = 19;
/// A number without bounds: no more digits than help, and an exponent that a double can have.
const ANY: &str = r"-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?";

/// Bounds are smaller than this.
const MAX_BOUND: f64 = 1e36;

/// One end of a range.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bound {
    pub(super) value: Number,
    /// The bound itself is excluded.
    pub(super) is_exclusive: bool,
}

impl Bound {
    /// Whether every number that is written without a bound is on the right side of it.
    fn is_far(&self, is_min: bool) -> bool {
        self.value.as_f64().is_some_and(|value| if is_min { value <= -MAX_BOUND } else { value >= MAX_BOUND })
    }
}

/// The order of two numbers, exact also where both are the same as doubles.
pub(super) fn compare(one: &Number, other: &Number) -> Ordering {
    let whole = |number: &Number| {
        let is_whole = |value: &f64| value.fract() == 0.0 && value.abs() < 1e38;
        number.as_i128().or_else(|| number.as_f64().filter(is_whole).map(|value| value as i128))
    };
    match (whole(one), whole(other)) {
        (Some(one), Some(other)) => one.cmp(&other),
        // A double with a fraction is so small that a double has every whole number there.
        _ => one.as_f64().unwrap_or(0.0).total_cmp(&other.as_f64().unwrap_or(0.0)),
    }
}

/// Whether a number is in a range.
pub(super) fn is_within(number: &Number, min: Option<&Bound>, max: Option<&Bound>) -> bool {
    let meets = |bound: Option<&Bound>, inside: Ordering| {
        bound.is_none_or(|bound| match compare(number, &bound.value) {
            Ordering::Equal => !bound.is_exclusive,
            order => order == inside,
        })
    };
    meets(min, Ordering::Greater) && meets(max, Ordering::Less)
}

/// Whether two values are the same: 1 is 1.0, also within lists and objects, whose keys have no order.
pub(super) fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => compare(one, other).is_eq(),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            let has =
                |(name, value): (&String, &Value)| other.get(name).is_some_and(|found| same(value, found));
            one.len() == other.len() && one.iter().all(has)
        }
        _ => one == other,
    }
}

/// Whether a number is a whole multiple of another one that is not 0, exact in the digits of both.
pub(super) fn is_multiple(number: &Number, divisor: &Number) -> bool {
    let (Some((digits, exponent)), Some((of, of_exponent))) = (scaled(number), scaled(divisor)) else {
        return false;
    };
    if digits == 0 || of == 0 {
        return digits == 0;
    }
    // Digits without zeros at their end are no multiple of ten.
    exponent >= of_exponent && (of_exponent..exponent).fold(digits % of, |rest, _| rest * 10 % of) == 0
}

/// Whether a range has a multiple of a number. True where that is not known.
pub(super) fn has_multiple(divisor: &Number, min: Option<&Bound>, max: Option<&Bound>) -> bool {
    let (Some(min), Some(max)) = (min, max) else { return true };
    let Some(numbers) = as_integers([divisor, &min.value, &max.value]) else { return true };
    let [of, low, high] = numbers;
    if of <= 0 {
        return true;
    }
    let low = if min.is_exclusive { low + 1 } else { low };
    let high = if max.is_exclusive { high - 1 } else { high };
    high.div_euclid(of) * of >= low
}

/// One in units of the last digit of a number, at most 10^16.
pub(super) fn units(number: &Number) -> i64 {
    let exponent = scaled(number).map_or(0, |(_, exponent)| exponent.clamp(-16, 0));
    10_i64.pow(exponent.unsigned_abs())
}

/// These numbers in units of the last digit of one of them. None if they are too large for that.
fn as_integers<const N: usize>(numbers: [&Number; N]) -> Option<[i128; N]> {
    let mut parts = [(0_i128, 0_i32); N];
    for (part, number) in parts.iter_mut().zip(numbers) {
        let (digits, exponent) = scaled(number)?;
        let digits = i128::try_from(digits).ok()?;
        let is_negative = number.to_string().starts_with('-');
        *part = (if is_negative { -digits } else { digits }, if digits == 0 { 0 } else { exponent });
    }
    let unit = parts.iter().map(|(_, exponent)| *exponent).min()?;
    let mut integers = [0; N];
    for (integer, (digits, exponent)) in integers.iter_mut().zip(parts) {
        let power = 10_i128.checked_pow(exponent.abs_diff(unit))?;
        *integer = digits.checked_mul(power).filter(|integer| integer.unsigned_abs() < 1 << 120)?;
    }
    Some(integers)
}

/// The keyword of a bound that has too many digits.
pub(super) fn unwritable_bound(fields: &serde_json::Map<String, Value>) -> &'static str {
    let is_large = |name: &&&str| {
        fields.get(**name).and_then(Value::as_f64).is_some_and(|value| value.abs() >= MAX_BOUND)
    };
    BOUNDS.iter().find(is_large).copied().unwrap_or("minimum")
}

/// `(digits, exponent)` of a magnitude digits · 10^exponent, without zeros at the end of the digits.
fn scaled(number: &Number) -> Option<(u128, i32)> {
    let text = number.to_string();
    let text = text.trim_start_matches('-');
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let mut digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let mut exponent = exponent.parse::<i32>().ok()? - i32::try_from(fraction.len()).ok()?;
    while digits != 0 && digits.is_multiple_of(10) {
        (digits, exponent) = (digits / 10, exponent + 1);
    }
    Some((digits, exponent))
}

/// Matches the integers of a range; none if there are none. Without a bound, those of 64 bits.
///
/// # Errors
/// If a bound has more digits than can be computed with.
pub(super) fn integers(min: Option<&Bound>, max: Option<&Bound>) -> Result<Option<String>> {
    let whole = |bound: &Bound, is_min: bool| -> Result<i128> {
        let number = &bound.value;
        let exact = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
        let (value, is_whole) = match (exact, number.as_f64()) {
            (Some(value), _) => (value, true),
            (None, Some(value)) if value.abs() < MAX_BOUND => {
                let rounded = if is_min { value.ceil() } else { value.floor() };
                (rounded as i128, rounded == value)
            }
            _ => return Err(too_large(number)),
        };
        let step = i128::from(bound.is_exclusive && is_whole);
        Ok(if is_min { value + step } else { value - step })
    };
    let (min, max) = (min.filter(|min| !min.is_far(true)), max.filter(|max| !max.is_far(false)));
    let min = min.map(|bound| whole(bound, true)).transpose()?;
    let max = max.map(|bound| whole(bound, false)).transpose()?;
    let (low, high) = match (min, max) {
        (Some(min), Some(max)) => (min, max),
        (Some(min), None) if min >= 0 => (min, i128::from(u64::MAX).max(min.saturating_mul(2))),
        (Some(min), None) => (min, i128::from(i64::MAX)),
        (None, Some(max)) => (i128::from(i64::MIN).min(max.saturating_mul(2)), max),
        (None, None) => (i128::from(i64::MIN), i128::from(i64::MAX)),
    };
    let mut parts = Vec::new();
    if low < 0 {
        let nearest = high.min(-1).unsigned_abs();
        parts.extend(whole_range(nearest, low.unsigned_abs()).map(|range| format!("-{range}")));
    }
    if high >= 0 {
        parts.extend(whole_range(low.max(0).unsigned_abs(), high.unsigned_abs()));
    }
    Ok(either(&parts))
}

/// Matches the numbers of a range; none if there are none.
///
/// # Errors
/// If a bound has more digits than can be computed with.
pub(super) fn numbers(min: Option<&Bound>, max: Option<&Bound>) -> Result<Option<String>> {
    if let (None, None) = (min, max) {
        return Ok(Some(ANY.to_owned()));
    }
    let (min, max) = (min.filter(|min| !min.is_far(true)), max.filter(|max| !max.is_far(false)));
    let min = min.map(Decimal::new).transpose()?;
    let max = max.map(Decimal::new).transpose()?;
    // Of the two bounds, the one with more digits before the point determines how many may follow it.
    let num_whole = [&min, &max].into_iter().flatten().map(|bound| bound.whole.to_string().len()).max();
    let num_whole = num_whole.unwrap_or(1);
    let num_digits = MAX_DIGITS.saturating_sub(num_whole);
    // Where a bound is missing, numbers do not grow without end either.
    let limit = Decimal::power_of_ten((num_whole + 1).max(MAX_WHOLE_DIGITS));
    let low = min.unwrap_or_else(|| Decimal { is_negative: true, ..limit.clone() });
    let high = max.unwrap_or(limit);
    let mut parts = Vec::new();
    if low.is_negative {
        let nearest = if high.is_negative { high.clone() } else { Decimal::zero(true) };
        parts.extend(magnitudes(&nearest, &low, num_digits).map(|range| format!("-{range}")));
    }
    if !high.is_negative {
        let nearest = if low.is_negative { Decimal::zero(false) } else { low };
        parts.extend(magnitudes(&nearest, &high, num_digits));
    }
    Ok(either(&parts))
}

fn too_large(number: &Number) -> Error {
    Error::invalid_request(format!("the bound {number} has too many digits")).with_hint("leave it out")
}

fn either(parts: &[String]) -> Option<String> {
    match parts {
        [] => None,
        [one] => Some(one.clone()),
        _ => Some(format!("({})", parts.join("|"))),
    }
}

/// Any digit, this many times.
fn digits(min: usize, max: usize) -> String {
    match (min, max) {
        (_, 0) => String::new(),
        (1, 1) => "[0-9]".to_owned(),
        (min, max) if min == max => format!("[0-9]{{{min}}}"),
        (min, max) => format!("[0-9]{{{min},{max}}}"),
    }
}

fn class(from: u8, to: u8) -> String {
    match from == to {
        true => char::from(from).to_string(),
        false => format!("[{}-{}]", char::from(from), char::from(to)),
    }
}

/// Matches the integers from `low` to `high`, without a sign.
fn whole_range(low: u128, high: u128) -> Option<String> {
    if low > high {
        return None;
    }
    let (low, high) = (low.to_string(), high.to_string());
    if low.len() == high.len() {
        return Some(same_length(low.as_bytes(), high.as_bytes()));
    }
    // Those as long as the lower one, those of any length between, and those as long as the higher one.
    let mut parts = vec![same_length(low.as_bytes(), "9".repeat(low.len()).as_bytes())];
    if high.len() - low.len() > 1 {
        parts.push(format!("[1-9]{}", digits(low.len(), high.len() - 2)));
    }
    parts.push(same_length(format!("1{}", "0".repeat(high.len() - 1)).as_bytes(), high.as_bytes()));
    either(&parts)
}

/// Matches the digits from `low` to `high`, which have the same length.
fn same_length(low: &[u8], high: &[u8]) -> String {
    let (Some((first, low)), Some((last, high))) = (low.split_first(), high.split_first()) else {
        return String::new();
    };
    let rest = low.len();
    if first == last {
        return format!("{}{}", char::from(*first), same_length(low, high));
    }
    let is_lowest = low.iter().all(|digit| *digit == b'0');
    let is_highest = high.iter().all(|digit| *digit == b'9');
    let mut parts = Vec::new();
    let (mut from, mut to) = (*first, *last);
    if !is_lowest {
        parts.push(format!("{}{}", char::from(*first), same_length(low, &vec![b'9'; rest])));
        from += 1;
    }
    if !is_highest {
        to -= 1;
    }
    if from <= to {
        parts.push(format!("{}{}", class(from, to), digits(rest, rest)));
    }
    if !is_highest {
        parts.push(format!("{}{}", char::from(*last), same_length(&vec![b'0'; rest], high)));
    }
    either(&parts).unwrap_or_default()
}

/// A bound in decimal digits.
#[derive(Debug, Clone)]
struct Decimal {
    is_negative: bool,
    whole: u128,
    /// Digits after the point, without zeros at the end.
    fraction: Vec<u8>,
    is_exclusive: bool,
}

impl Decimal {
    fn new(bound: &Bound) -> Result<Self> {
        let number = &bound.value;
        let text = match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(value), ..) => value.to_string(),
            (_, Some(value), _) => value.to_string(),
            (.., Some(value)) if value.abs() < MAX_BOUND => value.to_string(),
            _ => return Err(too_large(number)),
        };
        let (is_negative, text) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.as_str()),
        };
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let fraction = fraction.trim_end_matches('0').as_bytes().to_vec();
        let whole = whole.parse().map_err(|_| too_large(number))?;
        let is_zero = whole == 0 && fraction.is_empty();
        Ok(Self { is_negative: is_negative && !is_zero, whole, fraction, is_exclusive: bound.is_exclusive })
    }

    fn zero(is_exclusive: bool) -> Self {
        Self { is_negative: false, whole: 0, fraction: Vec::new(), is_exclusive }
    }

    fn power_of_ten(exponent: usize) -> Self {
        let exponent = u32::try_from(exponent).unwrap_or(u32::MAX);
        Self { whole: 10_u128.saturating_pow(exponent), ..Self::zero(true) }
    }
}

/// Matches the magnitudes from one to the other, with at most this many digits after the point.
fn magnitudes(low: &Decimal, high: &Decimal, num_digits: usize) -> Option<String> {
    let num_digits = num_digits.max(low.fraction.len()).max(high.fraction.len());
    let with_fraction = |whole: String, fraction: &Digits| match (&fraction.text, fraction.has_none) {
        (Some(text), true) => Some(format!("{whole}(\\.{text})?")),
        (Some(text), false) => Some(format!("{whole}\\.{text}")),
        (None, true) => Some(whole),
        (None, false) => None,
    };
    let mut parts = Vec::new();
    if low.whole == high.whole {
        let fraction = between(Some((low, &low.fraction)), Some((high, &high.fraction)), num_digits);
        parts.extend(with_fraction(low.whole.to_string(), &fraction));
    } else if low.whole < high.whole {
        let fraction = between(Some((low, &low.fraction)), None, num_digits);
        parts.extend(with_fraction(low.whole.to_string(), &fraction));
        if let Some(range) = whole_range(low.whole + 1, high.whole - 1) {
            parts.extend(with_fraction(range, &between(None, None, num_digits)));
        }
        let fraction = between(None, Some((high, &high.fraction)), num_digits);
        parts.extend(with_fraction(high.whole.to_string(), &fraction));
    }
    either(&parts)
}

/// Digits after a point.
struct Digits {
    /// Matches one or more of them; none if there is no such text.
    text: Option<String>,
    /// Whether there may be none at all.
    has_none: bool,
}

/// A bound without its first remaining digit.
fn after_first<'b>((bound, rest): (&'b Decimal, &'b [u8])) -> (&'b Decimal, &'b [u8]) {
    (bound, rest.get(1..).unwrap_or_default())
}

/// Matches up to `num_left` further digits of a number between two bounds, of which `(bound, rest)` has these digits
/// left. A bound that is absent was passed already.
fn between(low: Option<(&Decimal, &[u8])>, high: Option<(&Decimal, &[u8])>, num_left: usize) -> Digits {
    // Missing digits count as zeros.
    let is_zero_enough = low.is_none_or(|(bound, rest)| rest.is_empty() && !bound.is_exclusive);
    let is_zero_allowed = high.is_none_or(|(bound, rest)| !rest.is_empty() || !bound.is_exclusive);
    let has_none = is_zero_enough && is_zero_allowed;
    if num_left == 0 {
        return Digits { text: None, has_none };
    }
    let low = low.filter(|(bound, rest)| !rest.is_empty() || bound.is_exclusive);
    if low.is_none() && high.is_none() {
        return Digits { text: Some(digits(1, num_left)), has_none };
    }
    let first = |end: Option<(&Decimal, &[u8])>, default: u8| {
        end.map_or(default, |(_, rest)| rest.first().copied().unwrap_or(b'0'))
    };
    let (from, to) = (first(low, b'0'), first(high, b'9'));
    let mut parts = Vec::new();
    let mut add = |digit: u8, low: Option<(&Decimal, &[u8])>, high: Option<(&Decimal, &[u8])>| {
        let rest = between(low, high, num_left - 1);
        let digit = char::from(digit);
        match (rest.text, rest.has_none) {
            (Some(text), true) => parts.push(format!("{digit}({text})?")),
            (Some(text), false) => parts.push(format!("{digit}{text}")),
            (None, true) => parts.push(digit.to_string()),
            (None, false) => {}
        }
    };
    let (low_rest, high_rest) = (low.map(after_first), high.map(after_first));
    if from == to && low.is_some() && high.is_some() {
        add(from, low_rest, high_rest);
    } else if from <= to {
        let (mut inner_from, mut inner_to) = (from, to);
        if low.is_some() {
            add(from, low_rest, None);
            inner_from += 1;
        }
        if high.is_some() {
            add(to, None, high_rest);
            inner_to -= 1;
        }
        if inner_from <= inner_to {
            let rest = digits(0, num_left - 1);
            parts.push(format!("{}{rest}", class(inner_from, inner_to)));
        }
    }
    Digits { text: either(&parts), has_none }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(value: &str, is_exclusive: bool) -> Bound {
        Bound { value: value.parse().unwrap(), is_exclusive }
    }

    fn is_match(regex: &str, text: &str) -> bool {
        let regex = fancy_regex::Regex::new(&format!("^(?:{regex})$")).unwrap();
        regex.is_match(text).unwrap()
    }

    #[test]
    fn multiples_are_exact() {
        let is = |number: &str, divisor: &str| {
            is_multiple(&serde_json::from_str(number).unwrap(), &serde_json::from_str(divisor).unwrap())
        };
        for (number, divisor) in [
            ("19.99", "0.01"),
            ("0.3", "0.1"),
            ("-9223372036854775808", "4"),
            ("18446744073709551612", "4"),
            ("0", "3"),
            ("-0.0", "0.5"),
            ("1500", "1.5"),
        ] {
            assert!(is(number, divisor), "{number} of {divisor}");
        }
        for (number, divisor) in [
            ("18446744073709551615", "4"),
            ("9007199254740995", "3"),
            ("0.35", "0.1"),
            ("1e300", "7e298"),
            ("1e-9", "1"),
            ("5", "10"),
        ] {
            assert!(!is(number, divisor), "{number} of {divisor}");
        }
    }

    #[test]
    fn integers_are_exact() {
        let ranges = [(-12, 7), (0, 0), (1, 9), (5, 123), (-250, -31), (99, 100), (-1, 1), (10, 1_000)];
        for (low, high) in ranges {
            let (min, max) = (bound(&low.to_string(), false), bound(&high.to_string(), false));
            let regex = integers(Some(&min), Some(&max)).unwrap().unwrap();
            for number in -1_200..=1_200 {
                let expected = (low..=high).contains(&number);
                assert_eq!(is_match(&regex, &number.to_string()), expected, "{number} {low} {high} {regex}");
            }
            assert!(!is_match(&regex, "-0") && !is_match(&regex, "01") && !is_match(&regex, ""));
        }
        let check = |min: Option<&str>, max: Option<&str>, inside: &[&str], outside: &[&str]| {
            let (min, max) = (min.map(|text| bound(text, false)), max.map(|text| bound(text, false)));
            let regex = integers(min.as_ref(), max.as_ref()).unwrap().unwrap();
            for text in inside {
                assert!(is_match(&regex, text), "{text} {regex}");
            }
            for text in outside {
                assert!(!is_match(&regex, text), "{text} {regex}");
            }
        };
        let (i64_min, i64_max, u64_max) =
            ("-9223372036854775808", "9223372036854775807", "18446744073709551615");
        let (below, above) = ("-9223372036854775809", "9223372036854775808");
        check(Some(i64_min), Some(i64_max), &[i64_min, i64_max, "0"], &[below, above]);
        check(None, None, &[i64_min, i64_max, "0", "-1"], &[below, above, "1.0"]);
        check(Some("0"), None, &["0", u64_max], &["-1", "18446744073709551616"]);
        check(Some("0"), Some(u64_max), &["0", u64_max], &["18446744073709551616"]);
        check(None, Some("9007199254740993"), &["9007199254740993"], &["9007199254740994"]);
        check(Some("9007199254740993"), None, &["9007199254740993"], &["9007199254740992"]);
        check(None, Some("999999999999999999"), &["999999999999999999"], &["1000000000000000000"]);
        check(Some("1.5"), Some("3.5"), &["2", "3"], &["1", "4"]);
        check(Some("1e20"), None, &["100000000000000000000"], &["99999999999999999999"]);
        let exclusive = integers(Some(&bound("1", true)), Some(&bound("3", true))).unwrap().unwrap();
        assert!(is_match(&exclusive, "2") && !is_match(&exclusive, "1") && !is_match(&exclusive, "3"));
        assert_eq!(integers(Some(&bound("1", true)), Some(&bound("2", true))).unwrap(), None);
        assert_eq!(integers(Some(&bound("3", false)), Some(&bound("2", false))).unwrap(), None);
        assert!(integers(Some(&bound("1e300", false)), None).is_err());
    }

    #[test]
    fn numbers_are_compared_exactly() {
        let number = |text: &str| -> Number { text.parse().unwrap() };
        let texts = [
            "-9223372036854775808",
            "-0.5",
            "0",
            "0.25",
            "1",
            "9007199254740992",
            "9007199254740993",
            "18446744073709551610",
            "18446744073709551615",
            "1e20",
            "1e300",
        ];
        for (index, one) in texts.iter().enumerate() {
            for (at, other) in texts.iter().enumerate() {
                assert_eq!(compare(&number(one), &number(other)), index.cmp(&at), "{one} {other}");
            }
        }
        assert!(
            same(&1.into(), &1.0.into()) && !same(&1.into(), &"1".into()) && same(&0.into(), &(-0.0).into())
        );
    }

    #[test]
    fn numbers_are_exact() {
        let ends = ["-12.5", "-3", "-0.25", "0", "0.125", "0.3", "1", "1.05", "7", "99.999", "120"];
        let texts: Vec<String> = (-2_000..=2_000)
            .flat_map(|number: i32| {
                [number.to_string(), format!("{}", f64::from(number) / 16.0), format!("{number}.50")]
            })
            .chain(ends.iter().map(|end| (*end).to_owned()))
            .collect();
        for (index, low) in ends.iter().enumerate() {
            for high in &ends[index..] {
                for exclusive in [false, true] {
                    let (min, max) = (bound(low, exclusive), bound(high, exclusive));
                    let regex = numbers(Some(&min), Some(&max)).unwrap();
                    let Some(regex) = regex else {
                        assert!(low == high && exclusive);
                        continue;
                    };
                    let regex = fancy_regex::Regex::new(&format!("^(?:{regex})$")).unwrap();
                    let [low, high]: [f64; 2] = [low.parse().unwrap(), high.parse().unwrap()];
                    for text in &texts {
                        let number: f64 = text.parse().unwrap();
                        let is_inside = low <= number && number <= high;
                        let expected = is_inside && !(exclusive && (number == low || number == high));
                        let is_zero = text.trim_start_matches('-').parse() == Ok(0.0);
                        if !(is_zero && text.starts_with('-')) {
                            assert_eq!(
                                regex.is_match(text).unwrap(),
                                expected,
                                "{text} {low} {high} {regex}"
                            );
                        }
                    }
                }
            }
        }
        let small = numbers(Some(&bound("0", true)), Some(&bound("1", true))).unwrap().unwrap();
        assert!(is_match(&small, "0.00000000000001") && !is_match(&small, "0.0") && !is_match(&small, "1"));
        assert!(is_match(&small, "0.99999999999999") && !is_match(&small, "0.9999999999999999999"));
        let open = numbers(Some(&bound("2.5", false)), None).unwrap().unwrap();
        assert!(is_match(&open, "2.5") && is_match(&open, "123456789") && !is_match(&open, "2.4"));
        let open = numbers(None, Some(&bound("-1", false))).unwrap().unwrap();
        assert!(is_match(&open, "-1") && is_match(&open, "-999999") && !is_match(&open, "0"));
        let any = numbers(None, None).unwrap().unwrap();
        assert!(is_match(&any, "6.02214076e23") && is_match(&any, "-0") && !is_match(&any, "1e999"));
    }
}
