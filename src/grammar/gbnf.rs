//! Grammars as llama.cpp and vLLM write them (GBNF, EBNF with `::=`), in the words of Lark.
//!
//! The two languages have the same elements: rules of alternatives, literals, sets of characters, groups and
//! repetitions. So a grammar is translated token by token; the grammar library interprets it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::iter::Peekable;
use std::str::Chars;

use crate::{Error, Result, quoted};

/// Whether this is such a grammar: its first rule shows it.
pub(super) fn is_gbnf(text: &str) -> bool {
    let mut tokens = Tokens::new(text);
    matches!((tokens.next(), tokens.next()), (Some(Ok(Token::Name(_))), Some(Ok(Token::Define))))
}

/// The same grammar in Lark.
///
/// # Errors
/// If it is not well-formed, if a rule is missing or given twice, or if there is no rule `root`.
pub(super) fn to_lark(text: &str) -> Result<String> {
    let mut tokens = Vec::new();
    for token in Tokens::new(text) {
        tokens.push(token?);
    }
    let mut rules: HashMap<&str, String> = HashMap::new();
    for pair in tokens.windows(2) {
        if let [Token::Name(name), Token::Define] = pair
            && rules.insert(name, lark_name(name, rules.len())).is_some()
        {
            return Err(invalid(format_args!("the rule {} is given twice", quoted(name))));
        }
    }
    if !rules.contains_key("root") {
        return Err(invalid("it has no rule \"root\", with which it would begin"));
    }
    let mut lark = String::new();
    let mut rest = tokens.iter().peekable();
    while let Some(token) = rest.next() {
        let is_definition = rest.peek() == Some(&&Token::Define);
        match token {
            Token::Name(name) => {
                let rule = rules.get(name.as_str());
                let rule = rule.ok_or_else(|| invalid(format_args!("there is no rule {}", quoted(name))))?;
                if is_definition {
                    rest.next();
                    lark.push('\n');
                    lark.push_str(rule);
                    lark.push(':');
                } else {
                    lark.push(' ');
                    lark.push_str(rule);
                }
            }
            Token::Define => return Err(invalid("there is a \"::=\" without the name of a rule before it")),
            Token::Literal(text) => {
                lark.push(' ');
                lark.push_str(&serde_json::Value::from(text.as_str()).to_string());
            }
            Token::Class(regex) => {
                lark.push_str(" /");
                lark.push_str(regex);
                lark.push('/');
            }
            Token::Repeat(text) => lark.push_str(text),
            Token::Other(c) => {
                lark.push(' ');
                lark.push(*c);
            }
        }
    }
    Ok(lark)
}

/// A name that Lark takes for a rule's.
fn lark_name(name: &str, number: usize) -> String {
    if name == "root" {
        return "start".to_owned();
    }
    let known: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' }).collect();
    format!("r{number}_{known}")
}

fn invalid(problem: impl std::fmt::Display) -> Error {
    Error::invalid_request(format!("the grammar is in GBNF, and {problem}"))
}

#[derive(Debug, PartialEq)]
enum Token {
    Name(String),
    /// `::=`
    Define,
    Literal(String),
    /// A set of characters, as a regular expression.
    Class(String),
    /// `*`, `+`, `?`, `{2}`, `{2,}` or `{2,5}`
    Repeat(String),
    /// `(`, `)` or `|`
    Other(char),
}

struct Tokens<'a> {
    chars: Peekable<Chars<'a>>,
    line: usize,
}

impl<'a> Tokens<'a> {
    fn new(text: &'a str) -> Self {
        Self { chars: text.chars().peekable(), line: 1 }
    }

    fn next_char(&mut self) -> Option<char> {
        let c = self.chars.next();
        self.line += usize::from(c == Some('\n'));
        c
    }

    fn take_while(&mut self, is_part: impl Fn(char) -> bool) -> String {
        let mut text = String::new();
        while let Some(c) = self.chars.next_if(|c| is_part(*c)) {
            text.push(c);
        }
        text
    }

    fn error(&self, problem: impl std::fmt::Display) -> Error {
        invalid(format_args!("{problem} in line {}", self.line))
    }

    fn token(&mut self, first: char) -> Result<Token> {
        match first {
            '(' | ')' | '|' => Ok(Token::Other(first)),
            '*' | '+' | '?' => Ok(Token::Repeat(first.to_string())),
            '.' => Ok(Token::Class(r"(?s:.)".to_owned())),
            '{' => {
                let bounds = self.take_while(|c| c.is_ascii_digit() || c == ',' || c == ' ');
                match self.next_char() {
                    Some('}') => Ok(Token::Repeat(format!("{{{}}}", bounds.replace(' ', "")))),
                    _ => Err(self.error("a repetition {…} is not closed")),
                }
            }
            ':' => match (self.next_char(), self.next_char()) {
                (Some(':'), Some('=')) => Ok(Token::Define),
                _ => Err(self.error("there is a \":\" that is not part of \"::=\"")),
            },
            '"' => self.literal(),
            '[' => self.class(),
            c if is_name(c) => Ok(Token::Name(format!("{c}{}", self.take_while(is_name)))),
            c => Err(self.error(format_args!("{c:?} cannot stand there,"))),
        }
    }

    fn literal(&mut self) -> Result<Token> {
        let mut text = String::new();
        loop {
            match self.next_char() {
                Some('"') => return Ok(Token::Literal(text)),
                Some('\\') => text.push(self.escaped()?),
                Some(c) => text.push(c),
                None => return Err(self.error("a literal is not closed")),
            }
        }
    }

    fn class(&mut self) -> Result<Token> {
        let mut regex = "[".to_owned();
        if self.chars.next_if_eq(&'^').is_some() {
            regex.push('^');
        }
        let mut is_empty = true;
        loop {
            let c = match self.next_char() {
                Some(']') if is_empty => return Err(self.error("a set of characters is empty")),
                Some(']') => {
                    regex.push(']');
                    return Ok(Token::Class(regex));
                }
                // Between two characters it makes a range, elsewhere it is one itself.
                Some('-') if !is_empty && self.chars.peek() != Some(&']') => {
                    regex.push('-');
                    continue;
                }
                Some('\\') => self.escaped()?,
                Some(c) => c,
                None => return Err(self.error("a set of characters is not closed")),
            };
            is_empty = false;
            match c.is_ascii_alphanumeric() {
                true => regex.push(c),
                // Writing to a string cannot fail.
                false => _ = write!(regex, "\\x{{{:x}}}", u32::from(c)),
            }
        }
    }

    /// The escape after a backslash.
    fn escaped(&mut self) -> Result<char> {
        let num_digits = match self.next_char() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(c) if c.is_ascii_punctuation() => return Ok(c),
            _ => return Err(self.error("there is an unknown escape")),
        };
        let digits: String = (0..num_digits).filter_map(|_| self.next_char()).collect();
        let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == num_digits);
        code.and_then(char::from_u32)
            .ok_or_else(|| self.error(format_args!("{digits:?} is not the number of a character,")))
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

impl Iterator for Tokens<'_> {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_char()? {
                '#' => {
                    self.take_while(|c| c != '\n');
                }
                c if c.is_whitespace() => {}
                c => return Some(self.token(c)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_translated_token_by_token() {
        let check = |gbnf: &str, lark: &str| {
            assert!(is_gbnf(gbnf), "{gbnf}");
            assert_eq!(to_lark(gbnf).unwrap().trim(), lark, "{gbnf}");
        };
        check(r#"root ::= "a" | "b\n\"""#, r#"start: "a" | "b\n\"""#);
        check("# a comment\nroot ::= item+ # more\nitem ::= [a-z]\n", "start: r1_item+\nr1_item: /[a-z]/");
        check("root ::= (\n  \"a\"\n  | A-b\n)* \nA-b ::= .", "start: ( \"a\" | r1_a_b )*\nr1_a_b: /(?s:.)/");
        check(r"root ::= [^/\]\x41-] [0-9]{2,3}", r"start: /[^\x{2f}\x{5d}A\x{2d}]/ /[0-9]/{2,3}");
        check("root ::= \"\u{e9}\\u00e9\"", "start: \"\u{e9}\u{e9}\"");
        assert!(!is_gbnf("start: \"::=\""));
        assert!(!is_gbnf(""));
    }

    #[test]
    fn errors_are_named() {
        let check = |gbnf: &str, words: &str| {
            let message = to_lark(gbnf).unwrap_err().to_string();
            assert!(message.contains(words), "{gbnf}: {message}");
        };
        check("a ::= \"x\"", "no rule \"root\"");
        check("root ::= b", "no rule \"b\"");
        check("root ::= \"a\"\nroot ::= \"b\"", "given twice");
        check("root ::= \"a\n\n", "not closed in line 3");
        check("root ::= [a", "not closed");
        check("root ::= []", "empty");
        check("root ::= \"\\q\"", "unknown escape");
        check("root ::= \"\\xzz\"", "not the number of a character");
        check("root ::= \"a\"{2", "not closed");
        check("root ::= (=\"a\")", "'='");
        check("root ::= a : b", "\"::=\"");
        check("root ::= ::= \"a\"", "without the name");
    }
}
