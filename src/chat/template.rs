//! A chat template: Jinja source from a model's files, run within limits.
//!
//! Invariant: whatever the source, rendering ends, and what it writes and what its values take is bounded. A template
//! comes with a download and is not trusted.

use std::collections::HashSet;
use std::error::Error as _;
use std::io;
use std::thread;

use minijinja::{Environment, Error as TemplateError, ErrorKind as TemplateErrorKind};

use super::jinja::{self, Exceeded, Limits, Raised, Rendering};
use crate::{Error, Result};

/// Bytes of a template's source. The longest known ones are below 50 kB.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Characters of an error that are repeated.
const MAX_DETAIL: usize = 500;
/// For reading a template: its expressions are read by recursion.
const STACK_BYTES: usize = 32 << 20;
const NAME: &str = "chat";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// The variables that it reads, its own among them.
    names: HashSet<String>,
    /// In the place of what a conversation is given.
    limits: Option<Limits>,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// If it is too long or has a syntax error.
    pub fn new(source: &str) -> Result<Self> {
        Self::compile(source, None)
    }

    #[cfg(test)]
    pub(super) fn with_limits(source: &str, limits: Limits) -> Result<Self> {
        Self::compile(source, Some(limits))
    }

    fn compile(source: &str, limits: Option<Limits>) -> Result<Self> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(Error::invalid_model(format!(
                "the chat template is {} bytes long, expected at most {MAX_SOURCE_BYTES}",
                source.len()
            )));
        }
        thread::scope(|scope| {
            let compile = || {
                let rewritten = jinja::rewrite(source).map_err(|error| {
                    Error::invalid_model(format!(
                        "the chat template has a syntax error in line {}: {}",
                        error.line, error.message
                    ))
                })?;
                let mut environment = jinja::environment(&limits.unwrap_or_else(|| Limits::for_input(0)))
                    .map_err(|error| {
                        Error::internal("the template engine refuses its settings").with_source(error)
                    })?;
                environment.add_template_owned(NAME, rewritten.source).map_err(|error| {
                    let message = format!("the chat template has a syntax error{}", place_and_detail(&error));
                    Error::invalid_model(message).with_source(error)
                })?;
                Ok(Self { environment, source: source.to_owned(), names: rewritten.names, limits })
            };
            let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| {
                Error::internal("no thread could be started to read the chat template").with_source(error)
            })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// The text as it was given.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template reads this variable.
    pub(super) fn uses(&self, variable: &str) -> bool {
        self.names.contains(variable)
    }

    /// Renders with the fields of `context` as variables.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] if the template refuses the messages, fails, takes too many
    /// steps, too much memory or time, or writes too much.
    pub fn render(&self, context: &serde_json::Value) -> Result<String> {
        let limits = self.limits.unwrap_or_else(|| Limits::for_input(num_bytes(context)));
        let failed = |error: TemplateError| render_error(&error, &limits).with_source(error);
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let rendering = Rendering::begin(limits);
        let mut output = Capped { bytes: Vec::new(), limit: limits.output_bytes, is_exceeded: false };
        let variables = jinja::from_json(context).map_err(failed)?;
        let result = template.render_captured_to(variables, &mut output).map(drop);
        drop(rendering);
        if output.is_exceeded {
            return Err(Error::invalid_request(format!(
                "the chat template writes more than {} bytes",
                limits.output_bytes
            )));
        }
        result.map_err(failed)?;
        String::from_utf8(output.bytes).map_err(|error| {
            Error::internal("the chat template wrote something that is not text").with_source(error)
        })
    }
}

/// About what JSON takes as text.
fn num_bytes(json: &serde_json::Value) -> usize {
    match json {
        serde_json::Value::String(text) => text.len(),
        serde_json::Value::Array(items) => items.iter().map(num_bytes).sum::<usize>() + 2 * items.len(),
        serde_json::Value::Object(fields) => {
            fields.iter().map(|(name, value)| name.len() + num_bytes(value) + 4).sum()
        }
        _ => 8,
    }
}

struct Capped {
    bytes: Vec<u8>,
    limit: usize,
    is_exceeded: bool,
}

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
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

fn render_error(error: &TemplateError, limits: &Limits) -> Error {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(current) = source {
        if let Some(Raised(message)) = current.downcast_ref() {
            return Error::invalid_request(format!("the chat template refuses the messages: {message}"));
        }
        if let Some(Exceeded(message)) = current.downcast_ref() {
            return Error::invalid_request(format!("the chat template {message}"));
        }
        source = current.source();
    }
    if error.kind() == TemplateErrorKind::OutOfFuel {
        return Error::invalid_request(format!(
            "the chat template does not end within {} steps",
            limits.steps
        ));
    }
    Error::invalid_request(format!("the chat template failed{}", place_and_detail(error)))
}

fn place_and_detail(error: &TemplateError) -> String {
    // The innermost error is the one that says what went wrong.
    let mut cause = error;
    while let Some(inner) = cause.source().and_then(|source| source.downcast_ref::<TemplateError>()) {
        cause = inner;
    }
    let line = error.line().map(|line| format!(" in line {line}")).unwrap_or_default();
    match cause.detail() {
        Some(detail) => format!("{line}: {}", detail.chars().take(MAX_DETAIL).collect::<String>()),
        None => format!("{line}: {}", cause.kind()),
    }
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

    /// Templates and what Jinja2 writes for them, or nothing where it fails; `scripts/render_templates.py` makes them.
    #[test]
    fn expressions_and_blocks_are_those_of_jinja() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/templates/expressions.json");
        let fixture: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let cases = fixture["cases"].as_array().unwrap();
        assert!(cases.len() > 1_000);
        let mut wrong = Vec::new();
        for case in cases {
            let source = case[0].as_str().unwrap();
            let rendered = render(source, &fixture["variables"]);
            if rendered.as_deref().ok() != case[1].as_str() {
                wrong.push(format!("{source}\n  gives {rendered:?}\n  not   {:?}", case[1].as_str()));
            }
        }
        assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    }

    #[test]
    fn line_ends_of_other_systems_are_line_ends() {
        let messages = json!({"messages": [{"role": "user", "content": "a\r\nb"}]});
        let source = "{% for m in messages %}\r\n[{{ m.role }}]\r\n{{ m.content }}\r\n{% endfor %}\r\nend\r";
        check(source, &messages, "[user]\na\r\nb\nend");
    }

    #[test]
    fn the_time_is_there() {
        let year = render("{{ strftime_now('%Y') }}", &json!({})).unwrap();
        assert!(year.parse::<u32>().unwrap() >= 2024);
    }

    #[test]
    fn errors_say_what_and_where() {
        let check = |source: &str, expected: &str| {
            let error = render(source, &json!({"messages": []})).unwrap_err();
            assert!(error.message().contains(expected), "{error:?} should contain {expected:?}");
        };
        check("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion");
        check("{{ raise_exception('only users') }}", "refuses the messages: only users");
        check("{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}", "messages: deep");
        check("\n{{ nothing.at.all }}", "failed in line 2: undefined value");
        check("\n\n{{ ['a'] + 'b' }}", "failed in line 3: unsupported operand types for +: 'list' and 'str'");
        check("{% include 'other' %}", "stands alone");
        check("{{ [].append(1) }}", "cannot change a list");
        check("a\n{% if %}", "syntax error in line 2");
        check("a\n\n{{ .System }}{{ .Prompt }}", "syntax error in line 3");
        check("{% unknown %}", "unknown tag \"unknown\"");
        check(&" ".repeat(MAX_SOURCE_BYTES + 1), "1048577 bytes long");
        check(&format!("{{{{ raise_exception('a' * {}) }}}}", 5_000_000), "refuses the messages: aaa");
    }

    /// Small limits, so that the test is quick; the time is for what has no other limit.
    const LIMITS: Limits = Limits {
        steps: 200_000,
        value_bytes: 4 << 20,
        output_bytes: 1 << 20,
        time: std::time::Duration::from_secs(30),
    };

    #[test]
    fn hostile_templates_end_with_an_error() {
        let check = |source: &str, expected: &str| {
            let rendered =
                ChatTemplate::with_limits(source, LIMITS).and_then(|template| template.render(&json!({})));
            let shown: String = source.chars().take(200).collect();
            match rendered {
                Ok(_) => assert!(expected.is_empty(), "{shown} should fail with {expected:?}"),
                Err(error) => {
                    let message = error.to_string();
                    assert!(!expected.is_empty() && message.contains(expected), "{shown}: {message}");
                    assert!(message.len() < 4_000, "{shown}");
                }
            }
        };
        // Forty times something that doubles, held by a namespace.
        let doubled = |start: &str, step: &str, rest: &str| {
            format!(
                "{{% set ns = namespace(s={start}) %}}{{% for i in range(40) %}}{{% set ns.s = {step} %}}{{% endfor %}}{rest}"
            )
        };
        let (steps, values) = ("does not end within", "makes values of more than");
        check("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", steps);
        check("{% for a in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", "writes more than");
        check(&format!("{{% for a in range(99) %}}{}{{% endfor %}}", "x".repeat(20_000)), "writes more than");
        for step in [
            "ns.s ~ ns.s",
            "ns.s + ns.s",
            "ns.s * 2",
            "[ns.s, ns.s] | join",
            "ns.s | replace('a', 'aa')",
            "ns.s.replace('a', 'aa')",
            "'%s%s' % (ns.s, ns.s)",
            "'{0}{0}'.format(ns.s)",
        ] {
            check(&doubled("'a'", step, ""), values);
        }
        for step in ["ns.s + ns.s", "ns.s * 2", "ns.s + ns.s | list"] {
            check(&doubled("[1]", step, ""), values);
        }
        for rest in ["{{ ns.s }}", "{{ ns.s | string }}", "{{ ns.s | tojson }}", "{{ ns.s | pprint }}"] {
            check(&doubled("[1]", "[ns.s, ns.s]", rest), values);
        }
        check(
            "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = m(ns.s) %}{% endfor %}",
            values,
        );
        check(
            "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
            values,
        );
        check(
            "{% set ns = namespace(s=[]) %}{% for i in range(9999) %}{% set ns.s = [ns.s] %}{% endfor %}",
            "nested more than",
        );
        check(
            "{% set ns = namespace(s=[]) %}{% for i in range(9999) %}{% set ns.s = {'a': ns.s} %}{% endfor %}",
            "nested more than",
        );
        // A chain of namespaces is deep, and is let go without a deep stack.
        check(
            "{% set ns = namespace() %}{% for i in range(9999) %}{% set ns.s = namespace(s=ns.s) %}{% endfor %}{% set ns.s = 1 %}x",
            "",
        );
        for rest in ["{{ ns }}", "{{ ns.l | string }}", "{{ ns.l == ns2.l }}"] {
            check(
                &format!(
                    "{{% set ns = namespace() %}}{{% set ns2 = namespace() %}}{{% set ns.l = [ns] %}}{{% set ns2.l = [ns2] %}}{rest}"
                ),
                if rest.contains("==") { "" } else { "contains itself" },
            );
        }
        check(
            "{% set ns = namespace(l=[]) %}{% set ns.l = [ns] %}{{ ns.l | tojson }}",
            "not JSON serializable",
        );
        for wide in [
            "'a' | center(1000000000)",
            "'a\nb' | indent(1000000000)",
            "'a'.ljust(2000000000)",
            "'a'.zfill(2000000000)",
            "'%2000000000d' | format(1)",
            "'%.2000000000f' | format(1.0)",
            "'%*d' % (2000000000, 1)",
            "'{:2000000000}'.format(1)",
            "'{:.2000000000f}'.format(1.0)",
            "[1] | batch(1000000000, 'x') | list",
            "[1] | slice(1000000000) | list",
            "[1] * 1000000000",
            "'a' * 10 ** 9",
            "range(9999) | join('a' * 10000)",
            "[1] | tojson(indent=1000000000)",
            "'a\t'.expandtabs(1000000000)",
            "('a' * 1000000) | list",
            "('a ' * 1000000).split()",
            "('a ' * 1000000) | wordwrap(1)",
            "strftime_now('%A' * 1000000)",
        ] {
            check(&format!("{{{{ ({wide}) | length }}}}"), values);
        }
        for large in ["10 ** 10 ** 10", "10.0 ** 400", "2 ** 127 * 2", "range(1000000000)"] {
            check(&format!("{{{{ {large} }}}}"), "the chat template failed");
        }
        for nested in [
            format!("{}1{}", "(".repeat(100_000), ")".repeat(100_000)),
            format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)),
            format!("{}1", "-".repeat(100_000)),
            format!("a{}", "|upper".repeat(50_000)),
            format!("a{}", "[0]".repeat(50_000)),
            format!("a{}", ".b".repeat(50_000)),
            format!("{}2", "1 if 0 else ".repeat(50_000)),
            format!("1{}", " or 1".repeat(50_000)),
            format!("{}1{}", "{'a':".repeat(50_000), "}".repeat(50_000)),
        ] {
            check(&format!("{{{{ {nested} }}}}"), "syntax error");
        }
        check(&format!("{{{{ {}1 }}}}", "not ".repeat(100_000)), "");
        check(
            &format!("{}x{}", "{% if 1 %}".repeat(10_000), "{% endif %}".repeat(10_000)),
            "blocks are nested",
        );
        check(&format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(20_000)), "blocks are nested");
        check(&"{# ".repeat(100_000), "a comment has no end");
        check(&"{{ ".repeat(100_000), "syntax error");
    }

    #[test]
    fn work_that_leaves_nothing_ends_too() {
        let limits = Limits {
            steps: u64::MAX >> 1,
            value_bytes: usize::MAX,
            time: std::time::Duration::from_millis(50),
            ..LIMITS
        };
        for work in [
            "l | sum",
            "l | tojson",
            "l | unique | list",
            "l | sort",
            "s | upper",
            "s | replace('b', 'c')",
            "'b' in s",
            "s | length",
            "s[-1]",
            "l == m",
            "l[::-1]",
            "s.split('b')",
        ] {
            let source = format!(
                "{{% set s = 'é' * 100000 %}}{{% set l = range(9999) | list %}}{{% set m = range(9999) | list %}}{{% for i in range(99999) %}}{{% for j in range(99999) %}}{{% set x = {work} %}}{{% endfor %}}{{% endfor %}}"
            );
            let error = ChatTemplate::with_limits(&source, limits).unwrap().render(&json!({})).unwrap_err();
            assert!(error.message().contains("takes more than 50ms"), "{work}: {error}");
        }
    }
}
