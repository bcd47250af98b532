//! The path to a position in a body, for the message of an error there.

use std::fmt;

/// The path, such as `a.b[1]`, of the value at a position in JSON that is valid up to there. Lines and
/// columns count from one, and a column is a byte.
pub(super) fn path(body: &[u8], line: usize, column: usize) -> String {
    let is_break = |(_, byte): &(usize, &u8)| **byte == b'\n';
    let start = match line {
        0 | 1 => 0,
        line => body.iter().enumerate().filter(is_break).nth(line - 2).map_or(0, |(at, _)| at + 1),
    };
    let before = &body[..(start + column).min(body.len())];
    let (mut path, mut offset) = (BodyPath::default(), 0);
    while offset < before.len() {
        offset = path.advance(before, offset);
    }
    path.to_string()
}

/// The path to a position that moves through a body.
#[derive(Default)]
pub(super) struct BodyPath(Vec<Step>);

impl BodyPath {
    /// Reads the next byte or string, and returns the offset after it.
    pub(super) fn advance(&mut self, body: &[u8], offset: usize) -> usize {
        let steps = &mut self.0;
        match body[offset] {
            b'{' => steps.push(Step::Field(None)),
            b'[' => steps.push(Step::Item(0)),
            b'}' | b']' => drop(steps.pop()),
            b',' => match steps.last_mut() {
                Some(Step::Item(index)) => *index += 1,
                Some(Step::Field(name)) => *name = None,
                None => {}
            },
            b'"' => {
                let len = string_len(&body[offset..]);
                if let Some(Step::Field(name @ None)) = steps.last_mut() {
                    let text = serde_json::from_slice::<String>(&body[offset..offset + len]);
                    *name = Some(text.unwrap_or_default());
                }
                return offset + len;
            }
            _ => {}
        }
        offset + 1
    }

    /// The names of the fields, outermost first.
    pub(super) fn names(&self) -> Vec<&str> {
        let names = self.0.iter().filter_map(|step| match step {
            Step::Field(name) => name.as_deref(),
            Step::Item(_) => None,
        });
        names.collect()
    }
}

impl fmt::Display for BodyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.0.iter().enumerate() {
            match step {
                Step::Field(name) => {
                    let dot = if index > 0 { "." } else { "" };
                    write!(f, "{dot}{}", tinyvllm::shortened(name.as_deref().unwrap_or_default()))?;
                }
                Step::Item(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

enum Step {
    /// In an object, at the field with this name.
    Field(Option<String>),
    /// In a list, at this index.
    Item(usize),
}

/// The length of the string that begins here, with its quotes.
fn string_len(text: &[u8]) -> usize {
    let mut is_escaped = false;
    for (at, byte) in text.iter().enumerate().skip(1) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}
