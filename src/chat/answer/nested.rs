//! Values whose elements are between marks, like arguments: `<key>…</key>` in an object, `<item>…</item>` in a list.

use serde_json::Value;

use super::unquoted::{Schema, Types, quoted};

/// Maximum nesting.
const MAX_DEPTH: usize = 32;

/// The value in JSON. `marks` are the texts before a key, and before one at the end of its value; a `>` follows both.
pub(super) fn json(text: &str, marks: [&str; 2], item: &str, schema: Option<Schema<'_>>) -> String {
    part(text, marks, item, schema, 0).unwrap_or_else(|| quoted(text))
}

fn part(
    text: &str,
    marks: [&str; 2],
    item: &str,
    schema: Option<Schema<'_>>,
    depth: usize,
) -> Option<String> {
    let [open, close] = marks;
    if !text.contains(open) {
        return Some(schema.map_or_else(Types::default, Types::of).json(text));
    }
    if depth == MAX_DEPTH {
        return None;
    }
    let mut parts = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (key, after) = rest.strip_prefix(open)?.split_once('>')?;
        let (begin, end) = (format!("{open}{key}>"), format!("{close}{key}>"));
        // The end that does not belong to a nested element of the same name.
        let mut from = 0;
        let inner = loop {
            let at = from + after.get(from..)?.find(&end)?;
            let inner = &after[..at];
            if inner.matches(&begin).count() == inner.matches(&end).count() {
                break inner;
            }
            from = at + end.len();
        };
        rest = after[inner.len() + end.len()..].trim_start();
        let of_part =
            schema.and_then(|schema| if key == item { schema.item() } else { schema.property(key) });
        parts.push((key, part(inner, marks, item, of_part, depth + 1)?));
    }
    let is_list = parts.iter().all(|(key, _)| *key == item);
    let parts = parts.into_iter().map(|(key, json)| match is_list {
        true => json,
        false => format!("{}: {json}", Value::from(key)),
    });
    let parts = parts.collect::<Vec<_>>().join(", ");
    Some(if is_list { format!("[{parts}]") } else { format!("{{{parts}}}") })
}
