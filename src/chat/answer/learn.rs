//! Learns a form from what a template writes of known calls: what differs between two calls is their names and
//! arguments, and the rest is marks.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::form::{ANY_TYPE, Body, Form, LINE_END, NUMBER, ObjectText, Pairs};

/// Characters of a mark that no other text has.
const MIN_MARK: usize = 4;

/// Where a call stands in a text, and what it consists of.
struct Found {
    start: usize,
    end: usize,
    /// What is between the name and the arguments, if these are not one object.
    after_name: String,
    body: Body,
}

/// Finds a call behind a place in a text.
type Find = fn(&str, usize, &str, &Value) -> Option<Found>;

/// The forms that the text may be in, with these calls and nothing else between what a template writes `around` an
/// answer.
pub(super) fn forms(
    text: &str,
    calls: &[(&'static str, Value)],
    ids: &[&str],
    around: (&str, &str),
) -> Vec<Form> {
    let find: [Find; 3] = [object, named, pairs];
    let forms = find.into_iter().filter_map(|find| {
        let mut found: Vec<Found> = Vec::new();
        for (name, arguments) in calls {
            let from = found.last().map_or(0, |last| last.end);
            found.push(find(text, from, name, arguments)?);
        }
        form(text, found, ids, around)
    });
    forms.collect()
}

/// A form of what stands before the calls, between them and behind.
fn form(text: &str, found: Vec<Found>, ids: &[&str], (before, behind): (&str, &str)) -> Option<Form> {
    let (first, last) = (found.first()?, found.last()?);
    let head = &text[..first.start];
    let head = &head[shared_start(head, before)..];
    let tail = &text[last.end..];
    let tail = &tail[..tail.len() - shared_end(tail, behind)];
    let between = found.windows(2).next().map(|pair| &text[pair[0].end..pair[1].start]);
    // These mean something else in a form.
    if [head, tail, between.unwrap_or_default()].iter().any(|text| text.contains([NUMBER, LINE_END])) {
        return None;
    }
    // Of two calls, what is before both and what is behind both belongs to each.
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
    let mut form = Form { after_name: clean(&after_name), separator: clean(separator), ..Form::default() };
    match &body {
        // Such a call has nothing before it but the group that it is in.
        Body::Object(_) if begin.trim().is_empty() => {
            form.group = [clean(open), clean(close)];
            form.is_each = true;
        }
        Body::Object(_) => form.group = [clean(&(begin.to_owned() + open)), clean(&(close.to_owned() + end))],
        _ => {
            form.group =
                if begin.trim().is_empty() { Default::default() } else { [clean(begin), clean(end)] };
            (form.open, form.close) = (clean(open), clean(close));
        }
    }
    form.body = body;
    let start = [&form.group[0], &form.open].into_iter().find(|mark| !mark.trim().is_empty())?;
    let start = start.trim().trim_end_matches('[').to_owned();
    // A mark that any text could have is none, and one with digits of an identifier is not always the same.
    if start.len() < MIN_MARK || form.group.iter().chain([&form.open]).any(|mark| mark.contains("call#")) {
        return None;
    }
    form.name = format!("as in the template, {start}…");
    Some(form)
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

/// A name with arguments in JSON behind it.
fn named(text: &str, from: usize, name: &str, arguments: &Value) -> Option<Found> {
    let start = from + text[from..].find(name)?;
    let behind = start + name.len();
    let brace = behind + text[behind..].find('{')?;
    let mut values = serde_json::Deserializer::from_str(&text[brace..]).into_iter::<Value>();
    let value = values.next()?.ok()?;
    (value == *arguments).then(|| Found {
        start,
        end: brace + values.byte_offset(),
        after_name: text[behind..brace].to_owned(),
        body: Body::Json,
    })
}

/// A name with keys and values behind it, of which the first is a text.
fn pairs(text: &str, from: usize, name: &str, arguments: &Value) -> Option<Found> {
    let start = from + text[from..].find(name)?;
    let behind = start + name.len();
    let arguments = arguments.as_object()?;
    let mut places = Vec::new();
    let mut at = behind;
    for (key, value) in arguments {
        let key_at = at + text[at..].find(key.as_str())?;
        at = key_at + key.len();
        // Where a value is no text, its end is found before the next key.
        let Some(value) = value.as_str() else {
            places.push((key_at, at, None));
            continue;
        };
        let value_at = at + text[at..].find(value)?;
        places.push((key_at, at, Some((value_at, value_at + value.len()))));
        at = value_at + value.len();
    }
    let (first_key, key_end, first_value) = *places.first()?;
    let (value_at, value_end) = first_value?;
    let between = &text[key_end..value_at];
    let first = &text[behind..first_key];
    let (second_key, ..) = places.get(1)?;
    let middle = &text[value_end..*second_key];
    let key_len = shared_end(middle, first);
    let (value_end_mark, key_mark) = middle.split_at(middle.len() - key_len);
    if value_end_mark.trim().len() < 2 || between.is_empty() {
        return None;
    }
    let (_, last_key_end, last_value) = *places.last()?;
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
