//! Preprocessed source as tokens, each with its location in the file that it came from.
//!
//! The tokens are complete: in sequence they are the source.

use std::borrow::Cow;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Space,
    Newline,
    /// A line that begins with `#`.
    Directive,
    /// A string or a character.
    Quoted,
    Number,
    Word,
    Punctuation,
    /// Written by the rewriter; not looked into again.
    Raw,
}

#[derive(Debug, Clone)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Kind,
    pub(crate) text: Cow<'a, str>,
    pub(crate) file: &'a str,
    pub(crate) line: usize,
}

impl<'a> Token<'a> {
    pub(crate) fn is(&self, text: &str) -> bool {
        matches!(self.kind, Kind::Word | Kind::Punctuation) && self.text == text
    }

    pub(crate) fn is_any(&self, texts: &[&str]) -> bool {
        texts.iter().any(|text| self.is(text))
    }

    /// Neither code nor within it.
    pub(crate) fn is_blank(&self) -> bool {
        matches!(self.kind, Kind::Space | Kind::Newline | Kind::Directive)
    }

    /// Text of the rewriter's own instead of this token.
    pub(crate) fn raw(&self, text: impl Into<String>) -> Self {
        Self { kind: Kind::Raw, text: Cow::Owned(text.into()), ..self.clone() }
    }

    pub(crate) fn location(&self) -> String {
        format!("{}:{}", self.file, self.line)
    }
}

/// The longest come first.
const PUNCTUATION: [&str; 21] = [
    "<<=", ">>=", "...", "->*", "::", "->", "++", "--", "<=", ">=", "==", "!=", "&&", "||", "+=", "-=", "*=",
    "/=", "%=", "&=", "|=",
];

pub(crate) fn tokenize(source: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let (mut file, mut line) = ("", 1);
    let mut rest = source;
    let mut at_line_start = true;
    while !rest.is_empty() {
        let (kind, len) = first_token(rest, at_line_start);
        let (text, tail) = rest.split_at(len);
        rest = tail;
        tokens.push(Token { kind, text: Cow::Borrowed(text), file, line });
        match kind {
            Kind::Newline => {
                at_line_start = true;
                line += 1;
            }
            Kind::Directive => {
                if let Some((number, name)) = line_marker(text) {
                    // The marker names the line that follows it, and the newline after it counts one.
                    line = number.wrapping_sub(1);
                    file = name;
                }
            }
            Kind::Space => {}
            _ => at_line_start = false,
        }
    }
    tokens
}

fn first_token(rest: &str, at_line_start: bool) -> (Kind, usize) {
    let bytes = rest.as_bytes();
    let run =
        |from: usize, part: fn(&u8) -> bool| from + bytes[from..].iter().take_while(|b| part(b)).count();
    match bytes[0] {
        b'\n' => (Kind::Newline, 1),
        b' ' | b'\t' | b'\r' => (Kind::Space, run(0, |b| matches!(b, b' ' | b'\t' | b'\r'))),
        b'#' if at_line_start => (Kind::Directive, run(0, |b| *b != b'\n')),
        quote @ (b'"' | b'\'') => {
            let mut end = 1;
            while end < bytes.len() && bytes[end] != quote {
                end += 1 + usize::from(bytes[end] == b'\\');
            }
            (Kind::Quoted, (end + 1).min(bytes.len()))
        }
        b'0'..=b'9' => (Kind::Number, number_len(bytes)),
        b'.' if bytes.get(1).is_some_and(u8::is_ascii_digit) => (Kind::Number, number_len(bytes)),
        first if first.is_ascii_alphabetic() || first == b'_' => {
            (Kind::Word, run(0, |b| b.is_ascii_alphanumeric() || *b == b'_'))
        }
        _ => {
            let known = PUNCTUATION.iter().find(|text| rest.starts_with(**text));
            let len = known.map_or_else(|| rest.chars().next().map_or(1, char::len_utf8), |text| text.len());
            (Kind::Punctuation, len)
        }
    }
}

/// Digits, letters and points, and the sign after an `e` that is no digit.
fn number_len(bytes: &[u8]) -> usize {
    let hexadecimal = bytes.len() > 1 && matches!(bytes[1], b'x' | b'X');
    let mut end = 1;
    while end < bytes.len() {
        let sign = matches!(bytes[end], b'+' | b'-') && !hexadecimal && matches!(bytes[end - 1], b'e' | b'E');
        if !(sign || bytes[end].is_ascii_alphanumeric() || matches!(bytes[end], b'.' | b'\'' | b'_')) {
            break;
        }
        end += 1;
    }
    end
}

/// `# 12 "file"` and `#line 12 "file"`.
fn line_marker(directive: &str) -> Option<(usize, &str)> {
    let rest = directive.strip_prefix("#line").or_else(|| directive.strip_prefix('#'))?.trim_start();
    let (number, rest) = rest.split_once(' ')?;
    let name = rest.trim_start().strip_prefix('"')?;
    Some((number.parse().ok()?, name.split('"').next()?))
}

/// Those that are code.
pub(crate) fn code<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    tokens.iter().filter(|token| !token.is_blank()).cloned().collect()
}

/// The code with one space between tokens.
pub(crate) fn spaced(tokens: &[Token<'_>]) -> String {
    let words: Vec<&str> =
        tokens.iter().filter(|token| !token.is_blank()).map(|token| &*token.text).collect();
    words.join(" ")
}

/// The newlines and directives of `tokens`, so that later lines stay where they were.
pub(crate) fn newlines<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    let is_line = |token: &&Token<'a>| matches!(token.kind, Kind::Newline | Kind::Directive);
    tokens.iter().filter(is_line).cloned().collect()
}

/// The index of the bracket that closes the one at `open`.
pub(crate) fn closing(tokens: &[Token<'_>], open: usize) -> Result<usize, String> {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(open) {
        if token.is_any(&["(", "[", "{"]) {
            depth += 1;
        } else if token.is_any(&[")", "]", "}"]) {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                return Ok(index);
            }
        }
    }
    Err(format!("{}: `{}` is not closed", tokens[open].location(), tokens[open].text))
}

/// The index of the `>` that closes the `<` at `open`. Comparisons in template arguments are in brackets.
pub(crate) fn closing_angle(tokens: &[Token<'_>], open: usize) -> Result<usize, String> {
    let (mut angles, mut brackets) = (0_usize, 0_usize);
    for (index, token) in tokens.iter().enumerate().skip(open) {
        if token.is_any(&["(", "[", "{"]) {
            brackets += 1;
        } else if token.is_any(&[")", "]", "}"]) {
            brackets = brackets.saturating_sub(1);
        } else if brackets == 0 && token.is("<") {
            angles += 1;
        } else if brackets == 0 && token.is(">") {
            angles = angles.saturating_sub(1);
            if angles == 0 {
                return Ok(index);
            }
        }
    }
    Err(format!("{}: `<` is not closed", tokens[open].location()))
}

/// The segments between commas outside all brackets, including angle brackets.
pub(crate) fn split_at_commas<'a>(tokens: &[Token<'a>]) -> Vec<Vec<Token<'a>>> {
    let mut parts = Vec::new();
    let mut part = Vec::new();
    let (mut brackets, mut angles) = (0_usize, 0_usize);
    for token in tokens {
        if token.is_any(&["(", "[", "{"]) {
            brackets += 1;
        } else if token.is_any(&[")", "]", "}"]) {
            brackets = brackets.saturating_sub(1);
        } else if token.is("<") {
            angles += 1;
        } else if token.is(">") {
            angles = angles.saturating_sub(1);
        } else if token.is(",") && brackets == 0 && angles == 0 {
            parts.push(std::mem::take(&mut part));
            continue;
        }
        part.push(token.clone());
    }
    parts.push(part);
    parts
}

/// The tokens without their `[[…]]`, and the contents of these, one list for each attribute.
pub(crate) fn without_attributes<'a>(
    tokens: &[Token<'a>],
) -> Result<(Vec<Token<'a>>, Vec<Vec<Token<'a>>>), String> {
    let (mut kept, mut attributes) = (Vec::new(), Vec::new());
    let mut index = 0;
    while index < tokens.len() {
        if is_attribute(tokens, index) {
            let end = closing(tokens, index)?;
            attributes.extend(split_at_commas(&code(&tokens[index + 2..end - 1])));
            kept.extend(newlines(&tokens[index..end]));
            index = end + 1;
        } else {
            kept.push(tokens[index].clone());
            index += 1;
        }
    }
    Ok((kept, attributes))
}

/// Whether `[[` begins at `index`. A subscript of a subscript has something between its brackets.
pub(crate) fn is_attribute(tokens: &[Token<'_>], index: usize) -> bool {
    tokens[index].is("[") && tokens.get(index + 1).is_some_and(|next| next.is("["))
}

/// `name(argument)` as a pair; the second is empty if there is no argument.
pub(crate) fn call_parts(tokens: &[Token<'_>]) -> (String, String) {
    let name = tokens.first().map(|token| token.text.to_string()).unwrap_or_default();
    let inner = tokens.get(2..tokens.len().saturating_sub(1)).unwrap_or_default();
    (name, spaced(inner))
}
