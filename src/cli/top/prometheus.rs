//! Parses the text format of Prometheus: names, labels and values.
//!
//! It accepts OpenMetrics too: timestamps and exemplars are ignored. Invalid lines are skipped, so that one
//! strange metric does not hide the others.

use std::collections::BTreeMap;

/// A sample: a series and its value.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample {
    pub(super) series: Series,
    pub(super) value: f64,
}

/// A name with labels.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
}

impl Series {
    /// A label's value.
    pub(super) fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }
}

/// All samples of a page.
pub(super) fn parse(page: &str) -> Vec<Sample> {
    page.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Sample> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let end = line.find(|c: char| !is_name(c)).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let rest = rest.trim_start();
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => parse_labels(rest)?,
        None => (BTreeMap::new(), rest),
    };
    // A timestamp or an exemplar may come after the value.
    let value = parse_value(rest.split_whitespace().next()?)?;
    Some(Sample { series: Series { name: name.to_owned(), labels }, value })
}

fn is_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | ':')
}

/// Labels after the opening brace, and the text after the closing one.
fn parse_labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        rest = rest.trim_start().trim_start_matches(',').trim_start();
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, value) = rest.split_once('=')?;
        let name = name.trim();
        if name.is_empty() || !name.chars().all(is_name) {
            return None;
        }
        let (value, after) = parse_quoted(value.trim_start().strip_prefix('"')?)?;
        labels.insert(name.to_owned(), value);
        rest = after;
    }
}

/// The unescaped text up to the closing quote, and the text after it.
fn parse_quoted(rest: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = rest.char_indices();
    while let Some((index, character)) = characters.next() {
        match character {
            '"' => return Some((value, &rest[index + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                escaped @ ('"' | '\\') => value.push(escaped),
                other => value.extend(['\\', other]),
            },
            _ => value.push(character),
        }
    }
    None
}

fn parse_value(word: &str) -> Option<f64> {
    // Rust parses inf, infinity and nan in any case and with a sign, as Go writes them.
    word.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The only sample of a line as `name{labels} value`, with sorted labels.
    fn show(line: &str) -> Option<String> {
        let samples = parse(line);
        assert!(samples.len() <= 1, "{line}");
        samples.first().map(|Sample { series, value }| format!("{} {:?} {value}", series.name, series.labels))
    }

    #[test]
    fn lines() {
        let check = |line: &str, wanted: Option<&str>| assert_eq!(show(line).as_deref(), wanted, "{line}");
        check("up 1", Some("up {} 1"));
        check(
            "vllm:x_total{model_name=\"m\",engine=\"0\"} 1.5e3",
            Some(r#"vllm:x_total {"engine": "0", "model_name": "m"} 1500"#),
        );
        check("a{} 2", Some("a {} 2"));
        check("a { b = \"c\" , } 2 1700000000000", Some(r#"a {"b": "c"} 2"#));
        check(r#"a{b="x\"y\\z\nw",c="}, ="} 3"#, Some(r#"a {"b": "x\"y\\z\nw", "c": "}, ="} 3"#));
        check("a{le=\"+Inf\"} +Inf", Some(r#"a {"le": "+Inf"} inf"#));
        check("a -Inf", Some("a {} -inf"));
        check("a NaN", Some("a {} NaN"));
        check("a_bucket{le=\"1\"} 4 # {trace_id=\"t\"} 0.5 1.2", Some(r#"a_bucket {"le": "1"} 4"#));
        check("a\t7\r", Some("a {} 7"));
        for wrong in [
            "",
            "# HELP a b",
            "# TYPE a counter",
            "# EOF",
            "a",
            "a b",
            "1a 2",
            "{x=\"y\"} 1",
            "a{b=\"c} 1",
            "a{b=c} 1",
            "a{b} 1",
            "a{b=\"c\" 1",
            "<html>",
            "a-b 1",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn a_strange_line_hides_no_other() {
        let samples = parse("# TYPE a counter\na 1\n???\nb{c=\"d\"} 2\n# EOF\n");
        let names: Vec<&str> = samples.iter().map(|sample| sample.series.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
    }
}
