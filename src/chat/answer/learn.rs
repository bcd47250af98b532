//! Learns a call syntax from a template's rendering of known calls: two calls differ in their names and arguments, and
//! the rest is marks.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::syntax::{ANY_TYPE, Body, CallSyntax, LINE_END, NUMBER, ObjectText, Pairs};

/// Characters of a mark that no other text has.
const MIN_MARK: usize = 4;

/// The range of a call in a text, and its elements.
struct Found {
    start: usize,
    end: usize,
    /// The text between the name and the arguments, if these are not one object.
    after_name: String,
    body: Body,
}

/// Finds a call after a position in a text.
type Find = fn(&str, usize, &str, &Value) -> Option<Found>;

/// The possible syntaxes of the text, if it has only these calls inside the template's text `around` an answer.
pub(super) fn syntaxes(
    text: &str,
    calls: &[(&'static str, Value)],
    ids: &[&str],
    around: (&str, &str),
) -> Vec<CallSyntax> {
    let find: [Find; 3] = [object, named, pairs];
    let syntaxes = find.into_iter().filter_map(|find| {
        let mut found: Vec<Found> = Vec::new();
        for (name, arguments) in calls {
            let from = found.last().map_or(0, |last| last.end);
            found.push(find(text, from, name, arguments)?);
        }
        syntax(text, found, ids, around)
    });
    syntaxes.collect()
}

/// A syntax from the text before the calls, between them and after.
fn syntax(text: &str, found: Vec<Found>, ids: &[&str], (before, after): (&str, &str)) -> Option<CallSyntax> {
    let (first, last) = (found.first()?, found.last()?);
    let head = &text[..first.start];
    let head = &head[shared_start(head, before)..];
    let tail = &text[last.end..];
    let tail = &tail[..tail.len() - shared_end(tail, after)];
    let between = found.windows(2).next().map(|pair| &text[pair[0].end..pair[1].start]);
    // These have a meaning of their own in a syntax.
    if [head, tail, between.unwrap_or_default()].iter().any(|text| text.contains([NUMBER, LINE_END])) {
        return None;
    }
    // Of two calls, the common text before and after both belongs to each.
    let (open, close) = match between {
        Some(between) => {
            let open = shared_end(head, between);
            let close = shared_start(tail, &between[..between.len() - open]);
            (open, close)
        }
        None => (head.len(), tail.len()),
    };
    let (begin, open) = head.split_at(head.len() - open);
    let (close, end) = tail.split_at(close);
    let separator = between.map_or("", |between| &between[close.len()..between.len() - open.len()]);
    let clean = |mark: &str| ids.iter().fold(mark.to_owned(), |mark, id| mark.replace(id, "call#"));
    let Found { after_name, mut body, .. } = found.into_iter().next()?;
    if let Body::Object(object) = &mut body {
        for text in [&mut object.before_name, &mut object.before_arguments, &mut object.end] {
            *text = Cow::Owned(clean(text));
        }
    }
    let mut syntax =
        CallSyntax { after_name: clean(&after_name), separator: clean(separator), ..CallSyntax::default() };
    match &body {
        // Only its group's text precedes such a call.
        Body::Object(_) if begin.trim().is_empty() => {
            syntax.group = [clean(open), clean(close)];
            syntax.is_each = true;
        }
        Body::Object(_) => {
            syntax.group = [clean(&(begin.to_owned() + open)), clean(&(close.to_owned() + end))]
        }
        _ => {
            syntax.group =
                if begin.trim().is_empty() { Default::default() } else { [clean(begin), clean(end)] };
            (syntax.open, syntax.close) = (clean(open), clean(close));
        }
    }
    syntax.body = body;
    let start = [&syntax.group[0], &syntax.open].into_iter().find(|mark| !mark.trim().is_empty())?;
    let start = start.trim().trim_end_matches('[').to_owned();
    // A mark that any text could have is none, and one with digits of an identifier is not always the same.
    if start.len() < MIN_MARK || syntax.group.iter().chain([&syntax.open]).any(|mark| mark.contains("call#"))
    {
        return None;
    }
    syntax.name = format!("as in the template, {start}…");
    Some(syntax)
}

/// An object with the name and the arguments, or one in it that has them.
fn object(text: &str, from: usize, name: &str, arguments: &Value) -> Option<Found> {
    let quoted = Value::from(name).to_string();
    let at = from + text[from..].find(&quoted)?;
    let starts = text[from..at].rmatch_indices('{').map(|(start, _)| from + start);
    let mut found = None;
    for start in starts {
        let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Map<String, Value>>();
        let Some(Ok(object)) = values.next() else { continue };
        let end = start + values.byte_offset();
        let inner = object.get("function").and_then(Value::as_object).unwrap_or(&object);
        let key =
            |wanted: &Value| inner.iter().find(|(_, value)| *value == wanted).map(|(key, _)| key.clone());
        let (Some(name_key), Some(arguments_key)) = (key(&name.into()), key(arguments)) else { continue };
        let all = &text[start..end];
        let name_at = all.find(&quoted)?;
        let between_at = name_at + quoted.len();
        let arguments_at = all[between_at..].find(&format!("\"{arguments_key}\"")).map(|at| between_at + at);
        let value_at = arguments_at.and_then(|at| Some(at + all[at..].find('{')?));
        let body = match value_at {
            Some(value_at) => {
                let mut values = serde_json::Deserializer::from_str(&all[value_at..]).into_iter::<Value>();
                values.next()?.ok()?;
                let value_end = value_at + values.byte_offset();
                let clean = |text: &str| Cow::Owned(text.replace([NUMBER, LINE_END], ""));
                ObjectText {
                    before_name: clean(&all[..name_at]),
                    before_arguments: clean(&all[between_at..value_at]),
                    end: clean(&all[value_end..]),
                    has_more: true,
                }
            }
            // The arguments come first.
            None => ObjectText {
                before_name: Cow::Owned(format!("{{\"{name_key}\": ")),
                before_arguments: Cow::Owned(format!(", \"{arguments_key}\": ")),
                end: Cow::Borrowed("}"),
                has_more: true,
            },
        };
        found = Some(Found { start, end, after_name: String::new(), body: Body::Object(body) });
    }
    found
}

/// A name with arguments in JSON after it.
fn named(text: &str, from: usize, name: &str, arguments: &Value) -> Option<Found> {
    let start = from + text[from..].find(name)?;
    let after = start + name.len();
    let brace = after + text[after..].find('{')?;
    let mut values = serde_json::Deserializer::from_str(&text[brace..]).into_iter::<Value>();
    let value = values.next()?.ok()?;
    (value == *arguments).then(|| Found {
        start,
        end: brace + values.byte_offset(),
        after_name: text[after..brace].to_owned(),
        body: Body::Json,
    })
}

/// A name with keys and values after it, of which the first is a text.
fn pairs(text: &str, from: usize, name: &str, arguments: &Value) -> Option<Found> {
    let start = from + text[from..].find(name)?;
    let after = start + name.len();
    let arguments = arguments.as_object()?;
    let mut positions = Vec::new();
    let mut at = after;
    for (key, value) in arguments {
        let key_at = at + text[at..].find(key.as_str())?;
        at = key_at + key.len();
        // Where a value is no text, its end is found before the next key.
        let Some(value) = value.as_str() else {
            positions.push((key_at, at, None));
            continue;
        };
        let value_at = at + text[at..].find(value)?;
        positions.push((key_at, at, Some((value_at, value_at + value.len()))));
        at = value_at + value.len();
    }
    let (first_key, key_end, first_value) = *positions.first()?;
    let (value_at, value_end) = first_value?;
    let between = &text[key_end..value_at];
    let first = &text[after..first_key];
    let (second_key, ..) = positions.get(1)?;
    let middle = &text[value_end..*second_key];
    let key_len = shared_end(middle, first);
    let (value_end_mark, key_mark) = middle.split_at(middle.len() - key_len);
    if value_end_mark.trim().len() < 2 || between.is_empty() {
        return None;
    }
    let (_, last_key_end, last_value) = *positions.last()?;
    let last_at = last_value.map_or(last_key_end + between.len(), |(_, end)| end);
    let end = last_at + text[last_at..].find(value_end_mark.trim_end())? + value_end_mark.len();
    let pairs = Pairs {
        key: key_mark.to_owned(),
        between: vec![(ANY_TYPE, between.to_owned())],
        end: value_end_mark.to_owned(),
        ..Pairs::default()
    };
    let after_name = first[..first.len() - key_len].to_owned();
    Some(Found { start, end: end.min(text.len()), after_name, body: Body::Pairs(pairs) })
}

/// Bytes that a text begins with as another one does; a mark is not cut.
pub(super) fn shared_start(text: &str, other: &str) -> usize {
    let same: usize =
        text.chars().zip(other.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    match text[..same].rfind('<') {
        Some(mark) if !text[mark..same].contains('>') => mark,
        _ => same,
    }
}

/// Bytes that a text ends with as another one does; a mark is not cut.
fn shared_end(text: &str, other: &str) -> usize {
    let both = text.chars().rev().zip(other.chars().rev());
    let same: usize = both.take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    let start = text.len() - same;
    match text[..start].rfind('<') {
        Some(mark) if !text[mark..start].contains('>') => {
            text[start..].find('>').map_or(0, |end| same - end - 1)
        }
        _ => same,
    }
}
