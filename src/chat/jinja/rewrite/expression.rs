//! Expressions, read with Jinja's grammar and written with filters instead of operators.

use std::collections::HashSet;
use std::fmt;

use super::{Result, SyntaxError};
use crate::chat::jinja::lexer::{MAX_NAME_BYTES, Token, TokenKind};
use crate::chat::jinja::{methods, text};

/// Brackets inside of brackets.
const MAX_BRACKETS: usize = 50;
/// Operators, filters and subscripts on top of each other.
const MAX_CHAIN: usize = 200;
/// Arguments of one call.
pub(super) const MAX_ARGUMENTS: usize = 1_000;

/// A string literal of the template engine.
pub(super) fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '\\' => quoted.push_str("\\\\"),
            '"' => quoted.push_str("\\\""),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// The kind of an expression, as far as the text after it depends on it.
#[derive(Clone, PartialEq)]
pub(super) enum Shape {
    Name(String),
    /// The value in front of the dot, and the name after it.
    Attribute(String, String),
    /// Ends with a filter, so that only filters may follow without parentheses.
    Filtered,
    Other,
}

/// An expression as source for the engine.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) text: String,
    pub(super) shape: Shape,
    pub(super) height: usize,
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Node {
    pub(super) fn other(text: String, height: usize) -> Self {
        Self { text, shape: Shape::Other, height }
    }

    /// The text, so that anything may follow.
    fn primary(&self) -> String {
        if self.shape == Shape::Filtered { format!("({})", self.text) } else { self.text.clone() }
    }
}

/// Reads the tokens of one tag.
pub(super) struct Parser<'t> {
    tokens: &'t [Token],
    pub(super) at: usize,
    line: usize,
    names: &'t mut HashSet<String>,
    /// Macros that take arguments which they do not name.
    pub(super) open_macros: &'t HashSet<String>,
    num_brackets: usize,
    /// Whether a call stays one; a call block needs that.
    pub(super) keeps_calls: bool,
}

impl<'t> Parser<'t> {
    pub(super) fn new(
        tokens: &'t [Token],
        line: usize,
        names: &'t mut HashSet<String>,
        open_macros: &'t HashSet<String>,
    ) -> Self {
        Self { tokens, at: 0, line, names, open_macros, num_brackets: 0, keeps_calls: false }
    }

    pub(super) fn error(&self, message: impl Into<String>) -> SyntaxError {
        let line = self.tokens.get(self.at).or(self.tokens.last()).map_or(self.line, |token| token.line);
        SyntaxError { line, message: message.into() }
    }

    pub(super) fn unexpected(&self, expected: &str) -> SyntaxError {
        let found = match self.peek() {
            None => "the end of the tag".to_owned(),
            Some(TokenKind::Name(name)) => format!("{name:?}"),
            Some(TokenKind::Op(operator)) => format!("{operator:?}"),
            Some(TokenKind::Str(_)) => "a string".to_owned(),
            Some(TokenKind::Int(_) | TokenKind::Float(_)) => "a number".to_owned(),
        };
        self.error(format!("unexpected {found}, expected {expected}"))
    }

    pub(super) fn peek(&self) -> Option<&TokenKind> {
        self.tokens.get(self.at).map(|token| &token.kind)
    }

    pub(super) fn peek_second(&self) -> Option<&TokenKind> {
        self.tokens.get(self.at + 1).map(|token| &token.kind)
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at == self.tokens.len()
    }

    pub(super) fn skip_all(&mut self) {
        self.at = self.tokens.len();
    }

    pub(super) fn end(&self) -> Result<()> {
        if self.is_at_end() { Ok(()) } else { Err(self.unexpected("the end of the tag")) }
    }

    pub(super) fn is_op(&self, operator: &str) -> bool {
        matches!(self.peek(), Some(TokenKind::Op(found)) if *found == operator)
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Some(TokenKind::Name(found)) if found == name)
    }

    pub(super) fn skip_op(&mut self, operator: &str) -> bool {
        let found = self.is_op(operator);
        self.at += usize::from(found);
        found
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect_op(&mut self, operator: &str) -> Result<()> {
        if self.skip_op(operator) { Ok(()) } else { Err(self.unexpected(&format!("{operator:?}"))) }
    }

    pub(super) fn expect_name(&mut self, name: &str) -> Result<()> {
        if self.skip_name(name) { Ok(()) } else { Err(self.unexpected(&format!("{name:?}"))) }
    }

    pub(super) fn name(&mut self, what: &str) -> Result<String> {
        match self.peek() {
            Some(TokenKind::Name(name)) => {
                let name = identifier(name);
                self.at += 1;
                Ok(name)
            }
            _ => Err(self.unexpected(what)),
        }
    }

    pub(super) fn taller(&self, height: usize) -> Result<usize> {
        if height >= MAX_CHAIN {
            return Err(self
                .error(format!("an expression has more than {MAX_CHAIN} operations on top of each other")));
        }
        Ok(height + 1)
    }

    /// A filter of ours on a value.
    pub(super) fn filtered(&self, value: &Node, filter: &str, arguments: &[&Node]) -> Result<Node> {
        let height = arguments.iter().map(|node| node.height).chain([value.height]).max().unwrap_or(0);
        let mut text = format!("{}|{filter}", value.text);
        if !arguments.is_empty() {
            text.push('(');
            for (index, argument) in arguments.iter().enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                text.push_str(&argument.text);
            }
            text.push(')');
        }
        Ok(Node { text, shape: Shape::Filtered, height: self.taller(height)? })
    }

    /// A target of `for` or `with`: a name, or several.
    pub(super) fn targets(&mut self) -> Result<String> {
        let mut targets = self.target()?;
        while self.skip_op(",") {
            if self.is_name("in") || self.is_op("=") || self.is_op(")") {
                targets.push(',');
                break;
            }
            targets = format!("{targets}, {}", self.target()?);
        }
        Ok(targets)
    }

    pub(super) fn target(&mut self) -> Result<String> {
        if self.skip_op("(") {
            let inner = self.nested(Self::targets)?;
            self.expect_op(")")?;
            return Ok(format!("({inner})"));
        }
        self.name("a name to assign to")
    }

    /// A target of `set`: names, or an attribute of a namespace.
    pub(super) fn set_target(&mut self) -> Result<(Option<(String, String)>, String)> {
        if matches!(self.peek(), Some(TokenKind::Name(_)))
            && matches!(self.peek_second(), Some(TokenKind::Op(".")))
        {
            let namespace = self.name("a namespace")?;
            self.names.insert(namespace.clone());
            self.at += 1;
            let attribute = self.name("an attribute")?;
            return Ok((Some((namespace, attribute)), String::new()));
        }
        Ok((None, self.targets()?))
    }

    /// The parameters of a macro, without their parentheses, and defaults that read other parameters: the engine
    /// resolves those only inside of the macro.
    pub(super) fn signature(&mut self) -> Result<(String, Vec<(String, String)>)> {
        self.expect_op("(")?;
        let mut parameters: Vec<String> = Vec::new();
        let mut names: Vec<String> = Vec::new();
        let mut late = Vec::new();
        while !self.skip_op(")") {
            if !parameters.is_empty() {
                self.expect_op(",")?;
                if self.skip_op(")") {
                    break;
                }
            }
            let name = self.name("the name of a parameter")?;
            let mut parameter = name.clone();
            if self.skip_op("=") {
                let start = self.at;
                let default = self.expression()?.text;
                let reads_others = self.tokens[start..self.at]
                    .iter()
                    .any(|token| matches!(&token.kind, TokenKind::Name(read) if names.contains(read)));
                if reads_others {
                    parameter.push_str("=py_undefined");
                    late.push((name.clone(), default));
                } else {
                    parameter += &format!("={default}");
                }
            }
            names.push(name);
            parameters.push(parameter);
            if parameters.len() > MAX_ARGUMENTS {
                return Err(self.error(format!("more than {MAX_ARGUMENTS} parameters")));
            }
        }
        Ok((parameters.join(", "), late))
    }

    /// The call after `{% call %}`, as a call.
    pub(super) fn plain_call(&mut self) -> Result<String> {
        self.keeps_calls = true;
        let node = self.unary(true)?;
        self.keeps_calls = false;
        Ok(node.text)
    }

    pub(super) fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.num_brackets += 1;
        if self.num_brackets > MAX_BRACKETS {
            return Err(self.error(format!("brackets are nested more than {MAX_BRACKETS} deep")));
        }
        let keeps_calls = std::mem::take(&mut self.keeps_calls);
        let parsed = parse(self)?;
        self.keeps_calls = keeps_calls;
        self.num_brackets -= 1;
        Ok(parsed)
    }

    /// Expressions with commas between them are a tuple. A condition may follow if `with_condition` is true.
    pub(super) fn tuple(&mut self, with_condition: bool, end_names: &[&str]) -> Result<Node> {
        let mut items: Vec<Node> = Vec::new();
        let mut is_tuple = false;
        loop {
            let is_end =
                self.is_at_end() || self.is_op(")") || end_names.iter().any(|name| self.is_name(name));
            if is_end {
                break;
            }
            items.push(if with_condition { self.expression()? } else { self.or()? });
            if !self.skip_op(",") {
                break;
            }
            is_tuple = true;
        }
        match items.pop() {
            None => Err(self.unexpected("an expression")),
            Some(item) if !is_tuple => Ok(item),
            Some(item) => {
                items.push(item);
                self.collection(&items, "py_tuple")
            }
        }
    }

    fn collection(&self, items: &[Node], filter: &str) -> Result<Node> {
        let height = items.iter().map(|node| node.height).max().unwrap_or(0);
        let texts: Vec<&str> = items.iter().map(|node| node.text.as_str()).collect();
        let list = Node::other(format!("[{}]", texts.join(", ")), self.taller(height)?);
        self.filtered(&list, filter, &[])
    }

    /// An expression, with a condition after it or not.
    pub(super) fn expression(&mut self) -> Result<Node> {
        let mut value = self.or()?;
        while self.skip_name("if") {
            let condition = self.or()?;
            let (otherwise, height) = if self.skip_name("else") {
                let otherwise = self.nested(Self::expression)?;
                (format!(" else {otherwise}"), otherwise.height)
            } else {
                (String::new(), 0)
            };
            let height = self.taller(height.max(value.height).max(condition.height))?;
            value = Node::other(format!("({value} if {condition}{otherwise})"), height);
        }
        Ok(value)
    }

    fn connected(&mut self, word: &str, next: fn(&mut Self) -> Result<Node>) -> Result<Node> {
        let first = next(self)?;
        if !self.is_name(word) {
            return Ok(first);
        }
        let mut text = format!("({first}");
        let mut height = first.height;
        let mut count = 1;
        while self.skip_name(word) {
            let term = next(self)?;
            height = height.max(term.height);
            count += 1;
            text += &format!(" {word} {term}");
        }
        text.push(')');
        // The engine reads these one on top of the other.
        Ok(Node::other(text, self.taller(height + count)?))
    }

    fn or(&mut self) -> Result<Node> {
        self.connected("or", Self::and)
    }

    fn and(&mut self) -> Result<Node> {
        self.connected("and", Self::not)
    }

    fn not(&mut self) -> Result<Node> {
        let mut count = 0;
        while self.skip_name("not") {
            count += 1;
        }
        let value = self.comparison()?;
        let height = value.height;
        // Twice is a boolean again.
        Ok(match count {
            0 => value,
            count if count % 2 == 1 => Node::other(format!("(not {value})"), self.taller(height)?),
            _ => Node::other(format!("(not (not {value}))"), self.taller(height)?),
        })
    }

    fn comparison(&mut self) -> Result<Node> {
        let value = self.sum()?;
        let mut arguments: Vec<Node> = Vec::new();
        loop {
            let operator = match (self.peek(), self.peek_second()) {
                (Some(TokenKind::Op(operator @ ("==" | "!=" | "<" | "<=" | ">" | ">="))), _) => *operator,
                (Some(TokenKind::Name(name)), _) if name == "in" => "in",
                (Some(TokenKind::Name(name)), Some(TokenKind::Name(second)))
                    if name == "not" && second == "in" =>
                {
                    self.at += 1;
                    "not in"
                }
                _ => break,
            };
            self.at += 1;
            arguments.push(Node::other(quote(operator), 0));
            arguments.push(self.sum()?);
            if arguments.len() > MAX_ARGUMENTS {
                return Err(self.error(format!("more than {MAX_ARGUMENTS} comparisons")));
            }
        }
        if arguments.is_empty() {
            return Ok(value);
        }
        self.filtered(&value, "py_compare", &arguments.iter().collect::<Vec<_>>())
    }

    /// Operators of one precedence, from left to right. The same one several times is one call.
    fn operators(&mut self, operators: &[(&str, &str)], next: fn(&mut Self) -> Result<Node>) -> Result<Node> {
        let mut value = next(self)?;
        let mut pending: Option<(&str, Vec<Node>)> = None;
        loop {
            let found =
                operators.iter().find(|(operator, _)| self.is_op(operator)).map(|(_, filter)| *filter);
            if let Some((filter, arguments)) = &pending
                && found != Some(*filter)
            {
                value = self.filtered(&value, filter, &arguments.iter().collect::<Vec<_>>())?;
                pending = None;
            }
            let Some(filter) = found else { return Ok(value) };
            self.at += 1;
            let operand = next(self)?;
            let (_, arguments) = pending.get_or_insert((filter, Vec::new()));
            arguments.push(operand);
            if arguments.len() > MAX_ARGUMENTS {
                return Err(self.error(format!("more than {MAX_ARGUMENTS} operands")));
            }
        }
    }

    fn sum(&mut self) -> Result<Node> {
        self.operators(&[("+", "py_add"), ("-", "py_sub")], Self::concatenation)
    }

    fn concatenation(&mut self) -> Result<Node> {
        self.operators(&[("~", "py_concat")], Self::term)
    }

    fn term(&mut self) -> Result<Node> {
        let operators = [("*", "py_mul"), ("/", "py_div"), ("//", "py_floordiv"), ("%", "py_rem")];
        self.operators(&operators, Self::power)
    }

    fn power(&mut self) -> Result<Node> {
        self.operators(&[("**", "py_pow")], |parser| parser.unary(true))
    }

    fn unary(&mut self, with_filter: bool) -> Result<Node> {
        let mut signs = Vec::new();
        while self.is_op("-") || self.is_op("+") {
            signs.push(if self.is_op("-") { "py_neg" } else { "py_pos" });
            self.at += 1;
            if signs.len() > MAX_CHAIN {
                return Err(self.error(format!("more than {MAX_CHAIN} signs")));
            }
        }
        let mut value = self.primary()?;
        value = self.postfix(value)?;
        for sign in signs.into_iter().rev() {
            value = self.filtered(&value, sign, &[])?;
        }
        if with_filter { self.filters_and_tests(value) } else { Ok(value) }
    }

    pub(super) fn primary(&mut self) -> Result<Node> {
        let Some(token) = self.peek() else { return Err(self.unexpected("an expression")) };
        let node = match token {
            TokenKind::Name(name) => match name.as_str() {
                "true" | "True" => Node::other("true".to_owned(), 0),
                "false" | "False" => Node::other("false".to_owned(), 0),
                "none" | "None" => Node::other("none".to_owned(), 0),
                name => {
                    let name = identifier(name);
                    self.names.insert(name.clone());
                    Node { text: name.clone(), shape: Shape::Name(name), height: 0 }
                }
            },
            TokenKind::Str(text) => {
                let mut text = text.clone();
                while let Some(TokenKind::Str(more)) = self.peek_second() {
                    text.push_str(more);
                    self.at += 1;
                }
                Node::other(quote(&text), 0)
            }
            TokenKind::Int(number) => Node::other(format!("({number})"), 0),
            TokenKind::Float(number) if number.is_infinite() => Node::other("(1e999)".to_owned(), 0),
            TokenKind::Float(number) => Node::other(format!("({})", text::float_repr(*number)), 0),
            TokenKind::Op("(") => {
                self.at += 1;
                if self.skip_op(")") {
                    return self.collection(&[], "py_tuple");
                }
                let inner = self.nested(|parser| parser.tuple(true, &[]))?;
                self.expect_op(")")?;
                // In parentheses, it is neither a name nor an attribute any more, but the same value.
                return Ok(inner);
            }
            TokenKind::Op("[") => {
                self.at += 1;
                let items = self.nested(|parser| parser.items("]"))?;
                return self.collection(&items, "py_list");
            }
            TokenKind::Op("{") => {
                self.at += 1;
                let items = self.nested(Self::fields)?;
                return self.collection(&items, "py_dict");
            }
            TokenKind::Op(_) => return Err(self.unexpected("an expression")),
        };
        self.at += 1;
        Ok(node)
    }

    fn items(&mut self, end: &str) -> Result<Vec<Node>> {
        let mut items = Vec::new();
        while !self.skip_op(end) {
            if !items.is_empty() {
                self.expect_op(",")?;
                if self.skip_op(end) {
                    break;
                }
            }
            items.push(self.expression()?);
        }
        Ok(items)
    }

    fn fields(&mut self) -> Result<Vec<Node>> {
        let mut items = Vec::new();
        while !self.skip_op("}") {
            if !items.is_empty() {
                self.expect_op(",")?;
                if self.skip_op("}") {
                    break;
                }
            }
            items.push(self.expression()?);
            self.expect_op(":")?;
            items.push(self.expression()?);
        }
        Ok(items)
    }

    pub(super) fn postfix(&mut self, mut value: Node) -> Result<Node> {
        loop {
            if self.skip_op(".") {
                value = match self.peek() {
                    Some(TokenKind::Name(name)) => {
                        let name = name.clone();
                        self.at += 1;
                        self.attribute(&value, &name)?
                    }
                    Some(TokenKind::Int(index)) => {
                        let index = Node::other(format!("({index})"), 0);
                        self.at += 1;
                        self.filtered(&value, "py_item", &[&index])?
                    }
                    _ => return Err(self.unexpected("a name or a number")),
                };
            } else if self.skip_op("[") {
                value = self.subscript(&value)?;
            } else if self.is_op("(") {
                value = self.call(&value)?;
            } else {
                return Ok(value);
            }
        }
    }

    fn attribute(&self, value: &Node, name: &str) -> Result<Node> {
        let base = value.primary();
        let is_own = matches!(&value.shape, Shape::Name(name) if name == "loop" || name == "self");
        let mut node = if !is_own && (methods::is_name(name) || !name.is_ascii()) {
            self.filtered(value, "py_attr", &[&Node::other(quote(name), 0)])?
        } else {
            Node::other(format!("{base}.{name}"), self.taller(value.height)?)
        };
        // Calls of it are rewritten differently.
        if node.shape == Shape::Filtered {
            node.text = format!("({})", node.text);
        }
        node.shape = Shape::Attribute(base, name.to_owned());
        Ok(node)
    }

    fn subscript(&mut self, value: &Node) -> Result<Node> {
        let start = self.at;
        let mut keys = Vec::new();
        let mut slice = None;
        self.nested(|parser| {
            while !parser.skip_op("]") {
                if !keys.is_empty() {
                    parser.expect_op(",")?;
                }
                if let Some(parts) = parser.subscripted(&mut keys)? {
                    slice = Some(parts);
                }
            }
            Ok(())
        })?;
        if let Some([first, last, step]) = slice {
            if keys.len() > 1 {
                return Err(self.error("a slice must be alone in its brackets"));
            }
            return self.filtered(value, "py_slice", &[&first, &last, &step]);
        }
        // An empty subscript is an empty tuple.
        if keys.is_empty() {
            keys.push(self.collection(&[], "py_tuple")?);
        }
        // A key that is written out and is no method is looked up by the engine, which is quicker.
        if let [Token { kind: TokenKind::Str(name), .. }, Token { kind: TokenKind::Op("]"), .. }] =
            &self.tokens[start..self.at]
            && !methods::is_name(name)
            && name.len() <= MAX_NAME_BYTES
        {
            return Ok(Node::other(
                format!("{}[{}]", value.primary(), quote(name)),
                self.taller(value.height)?,
            ));
        }
        match &keys[..] {
            [key] => self.filtered(value, "py_item", &[key]),
            keys => {
                let key = self.collection(keys, "py_tuple")?;
                self.filtered(value, "py_item", &[&key])
            }
        }
    }

    /// A key, or the three bounds of a slice.
    fn subscripted(&mut self, keys: &mut Vec<Node>) -> Result<Option<[Node; 3]>> {
        let none = || Node::other("none".to_owned(), 0);
        let mut parts = [none(), none(), none()];
        if !self.is_op(":") {
            let key = self.expression()?;
            if !self.is_op(":") {
                keys.push(key);
                return Ok(None);
            }
            parts[0] = key;
        }
        self.at += 1;
        keys.push(none());
        for part in &mut parts[1..] {
            if !self.is_op(":") && !self.is_op("]") && !self.is_op(",") {
                *part = self.expression()?;
            }
            if !self.skip_op(":") {
                break;
            }
        }
        Ok(Some(parts))
    }
}

/// A name that the engine accepts, which has to be ASCII.
pub(super) fn identifier(name: &str) -> String {
    if name.is_ascii() {
        return name.to_owned();
    }
    name.chars()
        .map(|c| if c.is_ascii() { c.to_string() } else { format!("_u{:x}_", u32::from(c)) })
        .collect()
}
