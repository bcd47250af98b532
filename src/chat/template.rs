//! A chat template: Jinja source from a model's files, run within limits.
//!
//! Invariant: whatever the source, rendering ends, and what it writes is bounded. A template comes with a
//! download and is not trusted.

use std::io;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error as TemplateError, ErrorKind as TemplateErrorKind};

use super::{clock, json};
use crate::{Error, Result};

/// Instructions that one rendering may take; a conversation of a thousand turns takes about a million.
const MAX_STEPS: u64 = 20_000_000;
/// Bytes that one rendering may write. The largest context windows hold about a tenth of this.
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Bytes of a template's source. The longest known ones are below 50 kB.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Nesting of calls and blocks.
const MAX_DEPTH: usize = 100;
const NAME: &str = "chat";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
}

/// What `raise_exception` was called with.
#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// If it is too long or has a syntax error.
    pub fn new(source: &str) -> Result<Self> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(Error::invalid_model(format!(
                "the chat template is {} bytes long, expected at most {MAX_SOURCE_BYTES}",
                source.len()
            )));
        }
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(
            syntax.map_err(|error| Error::internal("the template syntax is not valid").with_source(error))?,
        );
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_recursion_limit(MAX_DEPTH);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, TemplateError> {
            Err(TemplateError::new(TemplateErrorKind::InvalidOperation, message.clone())
                .with_source(Raised(message)))
        });
        environment.add_function("strftime_now", |format: String| {
            clock::format(SystemTime::now(), &format).map_err(|directive| {
                let message = format!("strftime_now does not know {directive}");
                TemplateError::new(TemplateErrorKind::InvalidOperation, message)
            })
        });
        environment.add_template_owned(NAME, without_generation_blocks(source)).map_err(|error| {
            let message = format!("the chat template has a syntax error{}", place_and_detail(&error));
            Error::invalid_model(message).with_source(error)
        })?;
        Ok(Self { environment, source: source.to_owned() })
    }

    /// The text as it was given.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template reads this variable.
    pub(super) fn uses(&self, variable: &str) -> bool {
        let template = self.environment.get_template(NAME);
        template.is_ok_and(|template| template.undeclared_variables(false).contains(variable))
    }

    /// Renders with the fields of `context` as variables.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] if the template refuses the messages, fails, takes too many
    /// steps or writes too much.
    pub fn render(&self, context: &serde_json::Value) -> Result<String> {
        let failed = |error: TemplateError| render_error(&error).with_source(error);
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let mut output = Capped::default();
        let result = template.render_captured_to(json::to_template_value(context), &mut output).map(drop);
        if output.is_exceeded {
            return Err(Error::invalid_request(format!(
                "the chat template writes more than {MAX_OUTPUT_BYTES} bytes"
            )));
        }
        result.map_err(failed)?;
        String::from_utf8(output.bytes).map_err(|error| {
            Error::internal("the chat template wrote something that is not text").with_source(error)
        })
    }
}

#[derive(Default)]
struct Capped {
    bytes: Vec<u8>,
    is_exceeded: bool,
}

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            self.is_exceeded = true;
            return Err(io::Error::other("the output is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn render_error(error: &TemplateError) -> Error {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(current) = source {
        if let Some(Raised(message)) = current.downcast_ref() {
            return Error::invalid_request(format!("the chat template refuses the messages: {message}"));
        }
        source = current.source();
    }
    if error.kind() == TemplateErrorKind::OutOfFuel {
        return Error::invalid_request(format!("the chat template does not end within {MAX_STEPS} steps"));
    }
    Error::invalid_request(format!("the chat template failed{}", place_and_detail(error)))
}

fn place_and_detail(error: &TemplateError) -> String {
    let line = error.line().map(|line| format!(" in line {line}")).unwrap_or_default();
    match error.detail() {
        Some(detail) => format!("{line}: {}: {detail}", error.kind()),
        None => format!("{line}: {}", error.kind()),
    }
}

/// `{% generation %}` blocks mark what to train on. Rendering ignores them, so they become blocks that
/// are always taken; the signs for whitespace control stay where they are.
fn without_generation_blocks(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        text.push_str(before);
        rest = tag;
        let sign = tag.len() - tag.trim_start_matches(['-', '+']).len();
        let word = tag[sign..].trim_start();
        let skipped = tag.len() - word.len();
        let closes = |word: &str| word.trim_start().trim_start_matches(['-', '+']).starts_with("%}");
        for (from, to) in [("generation", "if true"), ("endgeneration", "endif")] {
            if let Some(after) = word.strip_prefix(from)
                && closes(after)
            {
                text.push_str(&tag[..skipped]);
                text.push_str(to);
                rest = after;
                break;
            }
        }
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, context: &serde_json::Value) -> Result<String> {
        ChatTemplate::new(source)?.render(context)
    }

    fn check(source: &str, context: &serde_json::Value, expected: &str) {
        assert_eq!(render(source, context).unwrap(), expected, "{source}");
    }

    #[test]
    fn blocks_are_trimmed_as_templates_expect() {
        check("  {% if true %}\na\n  {% endif %}\nb\n", &json!({}), "a\nb");
        check("{% generation %}\nx{% endgeneration %}\ny", &json!({}), "xy");
        check("a {%- generation -%} x {%- endgeneration %} b", &json!({}), "ax b");
    }

    #[test]
    fn a_template_says_what_it_reads() {
        let check = |source: &str, expected: bool| {
            assert_eq!(ChatTemplate::new(source).unwrap().uses("tools"), expected, "{source}");
        };
        check("{% if tools %}x{% endif %}", true);
        check("{%- if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", true);
        check("{% for t in tools %}{{ t }}{% endfor %}", true);
        check("{{ messages[0].tools }} tools", false);
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = json!({"z": "é<'&\"\n🦙", "a": [1, 2.5, true, null, [], {}]});
        let context = json!({"value": value});
        check("{{ value | tojson }}", &context, r#"{"z": "é<'&\"\n🦙", "a": [1, 2.5, true, null, [], {}]}"#);
        check(
            "{{ value | tojson(ensure_ascii=true, sort_keys=true) }}",
            &context,
            r#"{"a": [1, 2.5, true, null, [], {}], "z": "\u00e9<'&\"\n\ud83e\udd99"}"#,
        );
        check("{{ [1, {'a': 2}] | tojson(indent=2) }}", &json!({}), "[\n  1,\n  {\n    \"a\": 2\n  }\n]");
        check(
            "{{ value | tojson(separators=(',', ':')) }}",
            &json!({"value": {"a": [1, 2]}}),
            r#"{"a":[1,2]}"#,
        );
        assert!(render("{{ 1 | tojson(indent=1000) }}", &json!({})).is_err());
        assert!(render("{{ 1 | tojson(colour=1) }}", &json!({})).is_err());
    }

    #[test]
    fn python_methods_namespaces_and_loops() {
        check(
            "{{ ' x '.strip() }}{{ 'a</t>b'.split('</t>')[-1] }}{{ '\n\nc'.lstrip('\n') }}",
            &json!({}),
            "xbc",
        );
        check(
            "{% for k, v in m.items() %}{{ k }}{{ v }}{% endfor %}",
            &json!({"m": {"b": 1, "a": 2}}),
            "b1a2",
        );
        check(
            "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i == 4 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            &json!({}),
            "6",
        );
        check("{{ x is defined }}{{ none }}", &json!({}), "FalseNone");
        let year = render("{{ strftime_now('%Y') }}", &json!({})).unwrap();
        assert!(year.parse::<u32>().unwrap() >= 2024);
    }

    #[test]
    fn hostile_templates_end_with_an_error() {
        let check = |source: &str, expected: &str| {
            let error = render(source, &json!({"messages": []})).unwrap_err();
            assert!(error.message().contains(expected), "{error:?} should contain {expected:?}");
        };
        check(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "does not end within",
        );
        check("{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "writes more than");
        check("{{ 'x' * 1000000000 }}", "failed in line 1");
        check("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion");
        check("{{ raise_exception('only users') }}", "refuses the messages: only users");
        check("{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}", "messages: deep");
        check("\n{{ nothing.at.all }}", "failed in line 2");
        check("{{ strftime_now('%Q') }}", "%Q");
        check("{% include 'other' %}", "failed");
        check("a\n{% if %}", "syntax error in line 2");
        check("{% unknown %}", "syntax error");
        check(&" ".repeat(MAX_SOURCE_BYTES + 1), "1048577 bytes long");
    }
}
