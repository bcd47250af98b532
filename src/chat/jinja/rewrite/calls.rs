//! Calls, filters and tests in expressions, with their arguments.

use super::Result;
use super::expression::{MAX_ARGUMENTS, Node, Parser, Shape, identifier, quote};
use crate::chat::jinja::lexer::TokenKind;

impl Parser<'_> {
    /// The arguments of a call as source, and their nesting.
    fn arguments(&mut self) -> Result<(Vec<String>, usize)> {
        self.expect_op("(")?;
        self.nested(|parser| {
            let mut arguments = Vec::new();
            let mut height = 0;
            while !parser.skip_op(")") {
                if !arguments.is_empty() {
                    parser.expect_op(",")?;
                    if parser.skip_op(")") {
                        break;
                    }
                }
                let (prefix, suffix) = if parser.skip_op("*") {
                    ("*".to_owned(), "|py_star")
                } else if parser.skip_op("**") {
                    ("**".to_owned(), "|py_stars")
                } else if let (Some(TokenKind::Name(name)), Some(TokenKind::Op("="))) =
                    (parser.peek(), parser.peek_second())
                {
                    let prefix = format!("{}=", identifier(name));
                    parser.at += 2;
                    (prefix, "")
                } else {
                    (String::new(), "")
                };
                let value = parser.expression()?;
                height = height.max(value.height);
                arguments.push(if prefix.starts_with('*') {
                    format!("{prefix}({value}{suffix})")
                } else {
                    format!("{prefix}{value}")
                });
                if arguments.len() > MAX_ARGUMENTS {
                    return Err(parser.error(format!("more than {MAX_ARGUMENTS} arguments")));
                }
            }
            Ok((arguments, height))
        })
    }

    pub(super) fn call(&mut self, callee: &Node) -> Result<Node> {
        let (mut arguments, height) = self.arguments()?;
        let height = self.taller(height.max(callee.height))?;
        let is_loop = |name: &str| name == "loop";
        let text = match &callee.shape {
            Shape::Name(name) => {
                if is_loop(name) {
                    arguments.iter_mut().for_each(|argument| argument.push_str("|py_iter"));
                } else if self.open_macros.contains(name) && !self.keeps_calls {
                    let mut all = vec![quote("")];
                    all.extend(arguments);
                    let text = format!("{name}|py_call({})", all.join(", "));
                    return Ok(Node { text, shape: Shape::Filtered, height });
                }
                format!("{name}({})", arguments.join(", "))
            }
            Shape::Attribute(base, name) if base == "self" || self.keeps_calls => {
                format!("{base}.{name}({})", arguments.join(", "))
            }
            Shape::Attribute(base, name) => {
                let base = if base == "dict" && name == "fromkeys" { "[]|py_dict" } else { base };
                let mut all = vec![quote(name)];
                all.extend(arguments);
                let text = format!("{base}|py_call({})", all.join(", "));
                return Ok(Node { text, shape: Shape::Filtered, height });
            }
            _ => format!("({callee})({})", arguments.join(", ")),
        };
        Ok(Node::other(text, height))
    }

    pub(super) fn filters_and_tests(&mut self, mut value: Node) -> Result<Node> {
        loop {
            if self.is_op("|") {
                let text = self.filter_chain(value.text)?;
                value = Node { text, shape: Shape::Filtered, height: self.taller(value.height)? };
            } else if self.skip_name("is") {
                value = self.test(&value)?;
            } else if self.is_op("(") {
                value = self.call(&value)?;
            } else {
                return Ok(value);
            }
        }
    }

    /// `|name(…)|name…` after a text.
    pub(super) fn filter_chain(&mut self, value: String) -> Result<String> {
        let mut text = value;
        let mut count = 0;
        while self.skip_op("|") {
            let filter = self.filter()?;
            text = if text.is_empty() { filter } else { format!("{text}|{filter}") };
            count += 1;
            self.taller(count)?;
        }
        Ok(text)
    }

    pub(super) fn filter_chain_without_pipe(&mut self) -> Result<String> {
        let first = self.filter()?;
        self.filter_chain(first)
    }

    fn dotted_name(&mut self, what: &str) -> Result<String> {
        let mut name = self.name(what)?;
        while self.skip_op(".") {
            name = format!("{name}.{}", self.name(what)?);
        }
        Ok(name)
    }

    fn filter(&mut self) -> Result<String> {
        let mut name = self.dotted_name("the name of a filter")?;
        // Ours are not for templates.
        if name.starts_with("py_") || name.contains('.') {
            name = format!("unknown_{}", name.replace('.', "_"));
        }
        if !self.is_op("(") {
            return Ok(name);
        }
        let (arguments, height) = self.arguments()?;
        self.taller(height)?;
        Ok(format!("{name}({})", arguments.join(", ")))
    }

    fn test(&mut self, value: &Node) -> Result<Node> {
        let is_negated = self.skip_name("not");
        let name = Node::other(quote(&self.dotted_name("the name of a test")?), 0);
        let mut all = vec![name.text];
        let mut height = value.height;
        let stands_alone = ["else", "or", "and"].iter().any(|word| self.is_name(word));
        if self.is_op("(") {
            let (arguments, arguments_height) = self.arguments()?;
            height = height.max(arguments_height);
            all.extend(arguments);
        } else if !stands_alone
            && matches!(
                self.peek(),
                Some(
                    TokenKind::Name(_)
                        | TokenKind::Str(_)
                        | TokenKind::Int(_)
                        | TokenKind::Float(_)
                        | TokenKind::Op("[" | "{")
                )
            )
        {
            if self.is_name("is") {
                return Err(self.error("tests cannot be chained with \"is\""));
            }
            let argument = self.primary()?;
            let argument = self.postfix(argument)?;
            height = height.max(argument.height);
            all.push(argument.text);
        }
        let height = self.taller(height)?;
        let text = format!("{}|py_test({})", value.text, all.join(", "));
        Ok(if is_negated {
            Node::other(format!("(not {text})"), height)
        } else {
            Node { text, shape: Shape::Filtered, height }
        })
    }
}
