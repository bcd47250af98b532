//! The path to a position in a body, for the message of an error there.

/// The path, such as `a.b[1]`, of the value at a position in JSON that is valid up to there. Lines and
/// columns count from one, and a column is a byte.
pub(super) fn path(body: &[u8], line: usize, column: usize) -> String {
    let is_break = |(_, byte): &(usize, &u8)| **byte == b'\n';
    let start = match line {
        0 | 1 => 0,
        line => body.iter().enumerate().filter(is_break).nth(line - 2).map_or(0, |(at, _)| at + 1),
    };
    let before = &body[..(start + column).min(body.len())];
    let mut steps: Vec<Step> = Vec::new();
    let mut offset = 0;
    while let Some(byte) = before.get(offset) {
        match byte {
            b'{' => steps.push(Step::Field(None)),
            b'[' => steps.push(Step::Item(0)),
            b'}' | b']' => drop(steps.pop()),
            b',' => match steps.last_mut() {
                Some(Step::Item(index)) => *index += 1,
                Some(Step::Field(name)) => *name = None,
                None => {}
            },
            b'"' => {
                let len = string_len(&before[offset..]);
                if let Some(Step::Field(name @ None)) = steps.last_mut() {
                    let text = serde_json::from_slice::<String>(&before[offset..offset + len]);
                    *name = Some(text.unwrap_or_default());
                }
                offset += len;
                continue;
            }
            _ => {}
        }
        offset += 1;
    }
    let mut path = String::new();
    for step in steps {
        match step {
            Step::Field(name) => {
                if !path.is_empty() {
                    path.push('.');
                }
                path.push_str(&tinyvllm::shortened(&name.unwrap_or_default()));
            }
            Step::Item(index) => path.push_str(&format!("[{index}]")),
        }
    }
    path
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
