//! A chat template: Jinja source from a model's files, run within limits.
//!
//! Invariant: for every source, rendering ends, and its output, the memory of its values and its work are bounded. A
//! template is downloaded and not trusted.

use std::collections::HashSet;
use std::error::Error as _;
use std::io;
use std::thread;

use minijinja::{Environment, Error as TemplateError, ErrorKind as TemplateErrorKind};

use super::jinja::{self, Limits, Raised, Rendering, Spent};
use crate::{Error, Result, visible};

/// Maximum bytes of a template's source. The longest known ones are below 50 kB.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Characters of an error that are repeated.
const MAX_DETAIL: usize = 500;
/// For reading a template: its expressions are read by recursion.
const STACK_BYTES: usize = 32 << 20;
const NAME: &str = "chat";
/// The way out for a limit.
pub(super) const WAY_OUT: &str =
    "shorten the conversation, or replace the template with --chat-template FILE";

/// Between a template's name and the words with which it refuses.
pub(super) const REFUSES: &str = " refuses the messages: ";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// What it is called in errors.
    name: String,
    /// The variables that it reads, its own among them.
    names: HashSet<String>,
    /// Replaces the conversation's inputs.
    limits: Option<Limits>,
    /// Instructions of one rendering.
    steps: u64,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// If it is too long or has a syntax error.
    pub fn new(source: &str) -> Result<Self> {
        Self::named(source, "the chat template")
    }

    /// The same, called like this in errors.
    pub(super) fn named(source: &str, name: &str) -> Result<Self> {
        Self::compile(source, name, None)
    }

    #[cfg(test)]
    pub(super) fn with_limits(source: &str, limits: Limits) -> Result<Self> {
        Self::compile(source, "the chat template", Some(limits))
    }

    fn compile(source: &str, name: &str, limits: Option<Limits>) -> Result<Self> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(Error::invalid_model(format!(
                "{name} is {} bytes long, expected at most {MAX_SOURCE_BYTES}",
                source.len()
            )));
        }
        thread::scope(|scope| {
            let compile = || {
                let rewritten = jinja::rewrite(source).map_err(|error| {
                    Error::invalid_model(format!(
                        "{name} has a syntax error in line {}: {}",
                        error.line, error.message
                    ))
                })?;
                let steps = limits.unwrap_or_else(|| Limits::for_input(0)).steps;
                let mut environment = jinja::environment(steps).map_err(|error| {
                    Error::internal("the template engine refuses its settings").with_source(error)
                })?;
                environment.add_template_owned(NAME, rewritten.source).map_err(|error| {
                    let message = format!("{name} has a syntax error{}", line_and_detail(&error));
                    Error::invalid_model(message).with_source(error)
                })?;
                let (source, name) = (source.to_owned(), name.to_owned());
                Ok(Self { environment, source, name, names: rewritten.names, limits, steps })
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
        self.render_within(context, &Limits::for_input(num_bytes(context)), &mut Spent::default())
    }

    /// The same within the rest of these limits.
    pub(super) fn render_within(
        &self,
        context: &serde_json::Value,
        limits: &Limits,
        spent: &mut Spent,
    ) -> Result<String> {
        if let Some(reached) = spent.over() {
            return Err(self.limit_error(reached));
        }
        let limits = self.limits.unwrap_or(*limits);
        let mut output = Capped { bytes: Vec::new(), limit: limits.output_bytes, is_exceeded: false };
        let result = self.write(context, limits, spent, &mut output);
        if output.is_exceeded {
            spent.end(format!("writes more than the limit of {} bytes", limits.output_bytes));
        }
        if let Err(error) = &result
            && error.kind() == TemplateErrorKind::OutOfFuel
        {
            spent.end(format!("does not end within {} steps", self.steps));
        }
        match (result, spent.over()) {
            (result, Some(reached)) => {
                let error = self.limit_error(reached);
                Err(match result {
                    Ok(()) => error,
                    Err(source) => error.with_source(source),
                })
            }
            (Err(error), None) => Err(self.render_error(&error).with_source(error)),
            (Ok(()), None) => String::from_utf8(output.bytes).map_err(|error| {
                Error::internal("the chat template wrote something that is not text").with_source(error)
            }),
        }
    }

    fn write(
        &self,
        context: &serde_json::Value,
        limits: Limits,
        spent: &mut Spent,
        output: &mut Capped,
    ) -> std::result::Result<(), TemplateError> {
        let template = self.environment.get_template(NAME)?;
        // Values are let go before the rendering ends.
        let _rendering = Rendering::begin(limits, spent);
        template.render_captured_to(jinja::from_json(context)?, output).map(drop)
    }

    fn limit_error(&self, reached: &str) -> Error {
        Error::invalid_request(format!("{} {reached}", self.name)).with_hint(WAY_OUT)
    }

    fn render_error(&self, error: &TemplateError) -> Error {
        let mut source: Option<&dyn std::error::Error> = Some(error);
        while let Some(current) = source {
            if let Some(Raised(message)) = current.downcast_ref() {
                let message = visible(message);
                return Error::invalid_request(format!("{}{REFUSES}{message}", self.name));
            }
            source = current.source();
        }
        Error::invalid_request(format!("{} failed{}", self.name, line_and_detail(error)))
    }
}

/// The limits for a conversation.
pub(super) fn limits_for(context: &serde_json::Value) -> Limits {
    Limits::for_input(num_bytes(context))
}

/// About the size of its JSON text.
pub(super) fn num_bytes(json: &serde_json::Value) -> usize {
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

fn line_and_detail(error: &TemplateError) -> String {
    // The innermost error has the cause.
    let mut cause = error;
    while let Some(inner) = cause.source().and_then(|source| source.downcast_ref::<TemplateError>()) {
        cause = inner;
    }
    let line = error.line().map(|line| format!(" in line {line}")).unwrap_or_default();
    match cause.detail() {
        Some(detail) => format!("{line}: {}", visible(&detail.chars().take(MAX_DETAIL).collect::<String>())),
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
    fn a_template_reports_what_it_reads() {
        let check = |source: &str, expected: bool| {
            assert_eq!(ChatTemplate::new(source).unwrap().uses("tools"), expected, "{source}");
        };
        check("{% if tools %}x{% endif %}", true);
        check("{%- if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", true);
        check("{% for t in tools %}{{ t }}{% endfor %}", true);
        check("{{ messages[0].tools }} tools", false);
    }

    /// Templates and Jinja2's output for them, or none where it fails; `scripts/render_templates.py` generates them.
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
        check("{{ loop.cycle() }}", "undefined");
        check("{% for a in [1] %}{{ loop.cycle() }}{% endfor %}", "no items for cycling");
        check("{% for a in [1] %}{% set l = loop %}{{ l.cycle(*[]) }}{% endfor %}", "no items for cycling");
        check("{{ raise_exception('only users') }}", "refuses the messages: only users");
        check("{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}", "messages: deep");
        check("\n{{ nothing.at.all }}", "failed in line 2: undefined value");
        check("\n\n{{ ['a'] + 'b' }}", "failed in line 3: unsupported operand types for +: 'list' and 'str'");
        check("{% include 'other' %}", "single file");
        check("{{ [].append(1) }}", "cannot change a list");
        check("a\n{% if %}", "syntax error in line 2");
        check("a\n\n{{ .System }}{{ .Prompt }}", "syntax error in line 3");
        check("{% unknown %}", "unknown tag \"unknown\"");
        check(&" ".repeat(MAX_SOURCE_BYTES + 1), "1048577 bytes long");
        check(&format!("{{{{ raise_exception('a' * {}) }}}}", 5_000_000), "refuses the messages: aaa");
    }
}
