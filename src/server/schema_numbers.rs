//! Numbers in JSON schemas that are not read exactly.
//!
//! JSON has any number of digits, and a program has integers of 64 bits and doubles. In most fields the nearest
//! number is good enough. In a schema it would enforce another number than the client wrote, so such a number is an
//! error. In annotations, and in tools that the model calls freely, it enforces nothing.

use super::error::ApiError;
use super::path_in_body::BodyPath;
use tinyvllm::shortened;

/// Fields of bodies with schemas that are enforced. The tools' are if a call is required.
const SCHEMAS: [&str; 9] = [
    "format",
    "guided_json",
    "json_schema",
    "output_config",
    "output_format",
    "response_format",
    "structured_outputs",
    "text",
    "tools",
];
/// Keywords with a bound, which may be any number that is the same as a double.
const BOUNDS: [&str; 5] = ["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"];
/// Keywords with values, of which the answer has the digits.
const VALUES: [&str; 2] = ["const", "enum"];
/// Keywords that enforce nothing.
const ANNOTATIONS: [&str; 3] = ["default", "example", "examples"];
/// Every number with fewer characters is read exactly.
const MIN_CHARS: usize = 16;

/// Finds a number in the schemas of a body, which is valid JSON.
///
/// # Errors
/// 400 with its path.
pub(super) fn check(body: &[u8], requires_call: bool) -> Result<(), ApiError> {
    match find(body, |names| {
        names.first().is_some_and(|first| SCHEMAS.contains(first) && (requires_call || *first != "tools"))
    }) {
        Some(found) => Err(found.error("")),
        None => Ok(()),
    }
}

/// The same for a schema in the text of the field `param`.
///
/// # Errors
/// As [`check`].
pub(super) fn check_schema(schema: &[u8], param: &str) -> Result<(), ApiError> {
    match find(schema, |_| true) {
        Some(found) => Err(found.error(&format!("{param}."))),
        None => Ok(()),
    }
}

struct Inexact {
    path: String,
    text: String,
    read: f64,
}

impl Inexact {
    fn error(&self, within: &str) -> ApiError {
        let path = format!("{within}{}", self.path);
        let message = format!(
            "{path} is {}, which cannot be enforced exactly: it would be {}; give it at most 15 digits, or use a string \
             with a pattern",
            shortened(&self.text),
            self.read
        );
        ApiError::invalid(path, message)
    }
}

fn find(body: &[u8], is_inside: impl Fn(&[&str]) -> bool) -> Option<Inexact> {
    let is_digit = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b'.' | b'-' | b'+' | b'e' | b'E');
    if !body
        .chunk_by(|a, b| is_digit(a) == is_digit(b))
        .any(|run| run.len() >= MIN_CHARS && is_digit(&run[0]))
    {
        return None;
    }
    let (mut path, mut offset) = (BodyPath::default(), 0);
    while let Some(byte) = body.get(offset) {
        if !(byte.is_ascii_digit() || *byte == b'-') {
            offset = path.advance(body, offset);
            continue;
        }
        let len = body[offset..].iter().take_while(|byte| is_digit(byte)).count();
        if len >= MIN_CHARS
            && let Ok(text) = std::str::from_utf8(&body[offset..offset + len])
        {
            let names = path.names();
            let is_value = names.iter().any(|name| VALUES.contains(name))
                && !names.iter().any(|name| ANNOTATIONS.contains(name));
            let is_bound = names.last().is_some_and(|name| BOUNDS.contains(name));
            if (is_value || is_bound) && is_inside(&names) && !is_exact(text, is_value) {
                let read = text.parse().unwrap_or(f64::NAN);
                return Some(Inexact { path: path.to_string(), text: text.to_owned(), read });
            }
        }
        offset += len;
    }
    None
}

/// Whether a number is read without a change: as the same digits, or as a double of the same size.
fn is_exact(text: &str, has_same_digits: bool) -> bool {
    if text.parse::<i64>().is_ok() || text.parse::<u64>().is_ok() {
        return true;
    }
    let Ok(read) = text.parse::<f64>() else { return true };
    let is_same_integer = || read.abs() < 1e38 && (read as i128).to_string() == text;
    decimal(text) == decimal(&format!("{read:e}")) || !has_same_digits && is_same_integer()
}

/// The digits of a number without zeros around them, and the power of ten of the first one.
fn decimal(text: &str) -> (bool, String, i64) {
    let (is_negative, text) = text.strip_prefix('-').map_or((false, text), |text| (true, text));
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let significant = digits.trim_start_matches('0');
    let num_zeros = digits.len() - significant.len();
    let digits = significant.trim_end_matches('0');
    if digits.is_empty() {
        return (false, String::new(), 0);
    }
    let exponent = exponent.parse::<i64>().unwrap_or(0);
    (is_negative, digits.to_owned(), exponent.saturating_add(whole.len() as i64 - num_zeros as i64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_enforced_as_it_was_written_or_refused_by_its_path() {
        let check = |schema: &str, path: Option<&str>| {
            let body = format!("{{\"a\": [1, \"]\"], \"response_format\": {{\"schema\": {schema}}}}}");
            let error = super::check(body.as_bytes(), false).err().map(|error| error.body()["error"].clone());
            let path = path.map(|path| format!("response_format.schema.{path}"));
            assert_eq!(error.as_ref().and_then(|error| error["param"].as_str()), path.as_deref(), "{schema}");
            if let Some(error) = error {
                let message = error["message"].as_str().unwrap();
                assert!(message.contains("it would be") && message.contains("pattern"), "{message}");
            }
        };
        let long = "123456789012345678901234567890";
        check(&format!("{{\"const\": {long}}}"), Some("const"));
        check(&format!("{{\"const\": -{long}}}"), Some("const"));
        check(&format!("{{\"enum\": [1, {{\"b\": [{long}]}}]}}"), Some("enum[1].b[0]"));
        check(
            &format!("{{\"properties\": {{\"x\": {{\"minimum\": {long}}}}}}}"),
            Some("properties.x.minimum"),
        );
        check("{\"maximum\": 0.30000000000000000001}", Some("maximum"));
        check("{\"const\": 3.14159265358979323846}", Some("const"));
        // Of this one a double has the size, and another program other digits.
        check("{\"const\": 18446744073709551616}", Some("const"));
        check("{\"maximum\": 18446744073709551616}", None);
        for exact in [
            "18446744073709551615",
            "-9223372036854775808",
            "100000000000000000000",
            "1e20",
            "0.30000000000000004",
            "1.00000000000000000000",
            "0.0000000000000000001",
            "-1.5e-300",
        ] {
            check(&format!("{{\"const\": {exact}}}"), None);
        }
        for nothing in ["default", "examples", "title"] {
            check(&format!("{{\"{nothing}\": [{long}]}}"), None);
        }
        let tools = format!("{{\"n\": {long}, \"prompt\": [{long}], \"tools\": [{{\"minimum\": {long}}}]}}");
        assert!(
            super::check(tools.as_bytes(), false).is_ok() && super::check(tools.as_bytes(), true).is_err()
        );
        let error = check_schema(format!("{{\"enum\": [{long}]}}").as_bytes(), "guided_json").unwrap_err();
        assert_eq!(error.body()["error"]["param"], "guided_json.enum[0]");
    }
}
