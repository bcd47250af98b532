//! Splits a template like Jinja with `trim_blocks` and `lstrip_blocks`: data, and tags with their tokens. Whitespace
//! control is applied here.

use super::rewrite::SyntaxError;
use super::strings::is_space;

type Result<T> = std::result::Result<T, SyntaxError>;

/// A segment of a template, and its first line.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) line: usize,
    pub(super) kind: SegmentKind,
}

#[derive(Debug)]
pub(super) enum SegmentKind {
    /// Literal text.
    Data(String),
    /// `{{ … }}`.
    Print(Vec<Token>),
    /// `{% … %}`.
    Block(Vec<Token>),
}

/// A token, and its line.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Token {
    pub(super) line: usize,
    pub(super) kind: TokenKind,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum TokenKind {
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    Op(&'static str),
}

/// Maximum bytes of a name: the time of a lookup is proportional to them.
pub(super) const MAX_NAME_BYTES: usize = 1_000;

/// Longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// Takes a template apart.
pub(super) fn lex(source: &str) -> Result<Vec<Segment>> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { source, at: 0, line: 1, at_line_start: true, segments: Vec::new() };
    lexer.run()?;
    Ok(lexer.segments)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: usize,
    /// Whether the last text ended with a new line.
    at_line_start: bool,
    segments: Vec<Segment>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn error(&self, message: impl Into<String>) -> SyntaxError {
        SyntaxError { line: self.line, message: message.into() }
    }

    /// Advances by this many bytes.
    fn advance(&mut self, bytes: usize) {
        let passed = &self.source[self.at..self.at + bytes];
        self.line += passed.matches('\n').count();
        self.at_line_start = passed.ends_with('\n');
        self.at += bytes;
    }

    fn push(&mut self, line: usize, kind: SegmentKind) {
        self.segments.push(Segment { line, kind });
    }

    fn data(&mut self, text: &str) {
        if !text.is_empty() {
            self.push(self.line, SegmentKind::Data(text.to_owned()));
        }
    }

    fn run(&mut self) -> Result<()> {
        loop {
            let rest = self.rest();
            let Some(start) = find_tag(rest) else {
                self.data(rest);
                return Ok(());
            };
            let sign = rest[start + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
            let is_print = rest[start..].starts_with("{{");
            self.data(stripped(&rest[..start], sign, !is_print, self.at_line_start));
            self.advance(start);
            let inner = start + 2 + usize::from(sign.is_some());
            if rest[start..].starts_with("{%")
                && let Some(length) = raw_begin(&rest[inner..])
            {
                self.advance(inner - start + length);
                self.raw()?;
            } else if rest[start..].starts_with("{#") {
                let end = rest[inner..].find("#}").ok_or_else(|| self.error("a comment has no end"))?;
                // The sign of the end may be the comment's only character.
                let sign = rest[inner..inner + end].chars().next_back().filter(|c| matches!(c, '-' | '+'));
                self.advance(inner - start + end + 2);
                self.after_end(sign, true);
            } else {
                let line = self.line;
                self.advance(inner - start);
                let tokens = self.tokens(if is_print { "}}" } else { "%}" })?;
                self.push(
                    line,
                    if is_print { SegmentKind::Print(tokens) } else { SegmentKind::Block(tokens) },
                );
            }
        }
    }

    /// Skips the whitespace that the end of a tag strips.
    fn after_end(&mut self, sign: Option<char>, trims: bool) {
        let rest = self.rest();
        match sign {
            Some('-') => {
                let blanks = rest.len() - rest.trim_start_matches(is_space).len();
                if blanks > 0 {
                    self.advance(blanks);
                }
            }
            None if trims && rest.starts_with('\n') => self.advance(1),
            _ => {}
        }
    }

    /// Text up to `{% endraw %}`.
    fn raw(&mut self) -> Result<()> {
        let rest = self.rest();
        let mut from = 0;
        while let Some(start) = rest[from..].find("{%").map(|at| from + at) {
            let sign = rest[start + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
            let inner = start + 2 + usize::from(sign.is_some());
            let word = rest[inner..].trim_start_matches(is_space);
            if let Some(after) = word.strip_prefix("endraw") {
                let after = after.trim_start_matches(is_space);
                let end_sign = after.chars().next().filter(|c| matches!(c, '-' | '+'));
                let end = &after[usize::from(end_sign.is_some())..];
                if let Some(after) = end.strip_prefix("%}") {
                    self.data(stripped(&rest[..start], sign, true, self.at_line_start));
                    self.advance(rest.len() - after.len());
                    self.after_end(end_sign, true);
                    return Ok(());
                }
            }
            from = start + 2;
        }
        Err(self.error("a raw block has no end"))
    }

    fn tokens(&mut self, end: &str) -> Result<Vec<Token>> {
        let mut tokens = Vec::new();
        let mut open = Vec::new();
        loop {
            let rest = self.rest();
            if open.is_empty() {
                let sign = rest.chars().next().filter(|c| *c == '-' || *c == '+' && end == "%}");
                if rest[usize::from(sign.is_some())..].starts_with(end) {
                    self.advance(2 + usize::from(sign.is_some()));
                    self.after_end(sign, end == "%}");
                    return Ok(tokens);
                }
            }
            let Some(first) = rest.chars().next() else {
                return Err(self.error(format!("a tag has no end, {end:?} is missing")));
            };
            if is_space(first) {
                self.advance(first.len_utf8());
                continue;
            }
            let line = self.line;
            let follows_dot = self.source[..self.at].ends_with('.');
            let (kind, length) = if first.is_ascii_digit() {
                number(rest, follows_dot).map_err(|message| self.error(message))?
            } else if first == '_' || first.is_alphabetic() {
                let length = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
                if length > MAX_NAME_BYTES {
                    return Err(self.error(format!(
                        "a name has {length} bytes, more than the {MAX_NAME_BYTES} that one may have"
                    )));
                }
                (TokenKind::Name(rest[..length].to_owned()), length)
            } else if matches!(first, '\'' | '"') {
                let length = string_length(rest).ok_or_else(|| self.error("a string has no end"))?;
                let text = unescape(&rest[1..length - 1]).map_err(|message| self.error(message))?;
                (TokenKind::Str(text), length)
            } else {
                let operator = OPERATORS.iter().find(|operator| rest.starts_with(**operator));
                let operator =
                    operator.ok_or_else(|| self.error(format!("unexpected character {first:?}")))?;
                (TokenKind::Op(operator), operator.len())
            };
            if let TokenKind::Op(operator) = kind {
                match operator {
                    "(" | "[" | "{" => open.push(operator),
                    ")" | "]" | "}" => {
                        let expected = match open.pop() {
                            Some("(") => ")",
                            Some("[") => "]",
                            Some(_) => "}",
                            None => return Err(self.error(format!("unexpected {operator:?}"))),
                        };
                        if expected != operator {
                            return Err(self.error(format!("unexpected {operator:?}, expected {expected:?}")));
                        }
                    }
                    _ => {}
                }
            }
            tokens.push(Token { line, kind });
            self.advance(length);
        }
    }
}

fn find_tag(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut from = 0;
    while let Some(at) = text[from..].find('{').map(|at| from + at) {
        if matches!(bytes.get(at + 1), Some(b'{' | b'%' | b'#')) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

/// The data before a tag, without the whitespace that the tag strips.
fn stripped(text: &str, sign: Option<char>, is_block: bool, at_line_start: bool) -> &str {
    match sign {
        Some('-') => text.trim_end_matches(is_space),
        None if is_block => {
            let line = text.rfind('\n').map_or(0, |at| at + 1);
            if (line > 0 || at_line_start) && text[line..].chars().all(is_space) {
                &text[..line]
            } else {
                text
            }
        }
        _ => text,
    }
}

/// The length of the rest of `{% raw %}`, with the whitespace that it strips.
fn raw_begin(text: &str) -> Option<usize> {
    let word = text.trim_start_matches(is_space).strip_prefix("raw")?.trim_start_matches(is_space);
    let after = match word.strip_prefix('-') {
        Some(end) => end.strip_prefix("%}")?.trim_start_matches(is_space),
        None => word.strip_prefix("%}")?,
    };
    Some(text.len() - after.len())
}

/// Digits with single underscores between them.
fn digits(text: &str, radix: u32) -> usize {
    let mut length = 0;
    let bytes = text.as_bytes();
    while let Some(byte) = bytes.get(length) {
        let is_digit = |byte: &u8| char::from(*byte).is_digit(radix);
        if is_digit(byte) || *byte == b'_' && length > 0 && bytes.get(length + 1).is_some_and(is_digit) {
            length += 1;
        } else {
            break;
        }
    }
    length
}

fn number(text: &str, follows_dot: bool) -> std::result::Result<(TokenKind, usize), String> {
    let plain = |length: usize| text[..length].replace('_', "");
    let whole = digits(text, 10);
    if !follows_dot {
        let mut length = whole;
        if text[length..].starts_with('.') {
            let fraction = digits(&text[length + 1..], 10);
            if fraction > 0 {
                length += 1 + fraction;
            }
        }
        if text[length..].starts_with(['e', 'E']) {
            let sign = usize::from(text[length + 1..].starts_with(['+', '-']));
            let exponent = digits(&text[length + 1 + sign..], 10);
            if exponent > 0 {
                length += 1 + sign + exponent;
            }
        }
        if length > whole {
            let number = plain(length).parse().map_err(|_| format!("{} is not a number", &text[..length]))?;
            return Ok((TokenKind::Float(number), length));
        }
    }
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if text.len() > 2 && text.is_char_boundary(2) && text[..2].eq_ignore_ascii_case(prefix) {
            let after = &text[2..];
            let skipped = usize::from(after.starts_with('_'));
            let length = digits(&after[skipped..], radix);
            if length > 0 {
                let length = 2 + skipped + length;
                let number = i128::from_str_radix(&plain(length)[2..], radix);
                return number
                    .map(|number| (TokenKind::Int(number), length))
                    .map_err(|_| too_large(&text[..length]));
            }
        }
    }
    // A decimal number does not begin with a zero, but zeros may follow each other.
    let length =
        if text.starts_with('0') { text.find(|c| c != '0' && c != '_').unwrap_or(text.len()) } else { whole };
    let number = plain(length).parse().map_err(|_| too_large(&text[..length]))?;
    Ok((TokenKind::Int(number), length))
}

fn too_large(text: &str) -> String {
    let start: String = text.chars().take(40).collect();
    format!("the integer {start} has more than 127 bits")
}

fn string_length(text: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let mut chars = text.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        if c == '\\' {
            chars.next();
        } else if c == quote {
            return Some(at + 1);
        }
    }
    None
}

/// The text of a string literal, as Python reads it.
fn unescape(text: &str) -> std::result::Result<String, String> {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        plain.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let Some(c) = rest.chars().next() else { break };
        rest = &rest[c.len_utf8()..];
        let hex = |length: usize| -> std::result::Result<u32, String> {
            rest.get(..length)
                .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
                .and_then(|digits| u32::from_str_radix(digits, 16).ok())
                .ok_or_else(|| format!("\\{c} needs {length} hexadecimal digits"))
        };
        let mut used = 0;
        match c {
            '\n' => {}
            '\\' | '\'' | '"' => plain.push(c),
            'a' => plain.push('\u{7}'),
            'b' => plain.push('\u{8}'),
            'f' => plain.push('\u{C}'),
            'n' => plain.push('\n'),
            'r' => plain.push('\r'),
            't' => plain.push('\t'),
            'v' => plain.push('\u{B}'),
            '0'..='7' => {
                used = rest.bytes().take(2).take_while(|byte| (b'0'..=b'7').contains(byte)).count();
                let mut code = u32::from(c) - u32::from('0');
                for digit in rest[..used].bytes() {
                    code = code * 8 + u32::from(digit - b'0');
                }
                plain.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            'x' | 'u' | 'U' => {
                used = match c {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let mut code = hex(used)?;
                // Two escapes that make one character together.
                if (0xD800..0xDC00).contains(&code)
                    && let Some(low) = rest.get(used..used + 6).and_then(|text| text.strip_prefix("\\u"))
                    && let Ok(low @ 0xDC00..0xE000) = u32::from_str_radix(low, 16)
                {
                    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                    used += 6;
                }
                plain.push(char::from_u32(code).ok_or_else(|| format!("U+{code:04X} is not a character"))?);
            }
            other => {
                plain.push('\\');
                plain.push(other);
            }
        }
        rest = &rest[used..];
    }
    plain.push_str(rest);
    Ok(plain)
}
