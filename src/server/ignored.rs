//! Fields of a body that were not read. They are reported to their sender, and once in the log.
//!
//! What a client sends goes into a header and a log, so it is shortened and only plain characters are kept.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::{HeaderName, HeaderValue};

/// Names the bytes (`0x07`) and characters (`U+4E00`) of a prompt for which the vocabulary has no token. They
/// are dropped.
pub(super) const DROPPED_HEADER: HeaderName = HeaderName::from_static("x-dropped-bytes");
/// Names the fields of a request that have no meaning here.
pub(super) const HEADER: HeaderName = HeaderName::from_static("x-ignored-fields");
/// Most names that are reported for one request.
const MAX_NAMES: usize = 16;
/// Most characters of a name.
const MAX_CHARS: usize = 64;
/// Most names that are logged during the server's life.
const MAX_LOGGED: usize = 256;

/// The fields of a body that were not read.
#[derive(Debug, Clone, Default)]
pub(super) struct Ignored(Arc<Mutex<Found>>);

#[derive(Debug, Default)]
struct Found {
    names: Vec<String>,
    /// The same names without the indices of lists.
    known: HashSet<String>,
    num_more: usize,
}

impl Ignored {
    /// Adds a field that was not read. Of the items of a list, only the first one with the field is reported.
    pub(super) fn add(&self, name: &str) {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '[' | ']');
        let name: String = name.chars().take(MAX_CHARS).map(|c| if is_plain(c) { c } else { '?' }).collect();
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if found.known.contains(&anywhere(&name)) {
            return;
        }
        if found.names.len() == MAX_NAMES {
            found.num_more += 1;
        } else {
            found.known.insert(anywhere(&name));
            found.names.push(name);
        }
    }

    /// The names in their order. If there were too many, the last entry gives the number of the rest.
    pub(super) fn take(&self) -> Vec<String> {
        let mut found = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        found.names.sort_unstable();
        let more = (found.num_more > 0).then(|| format!("and {} more", found.num_more));
        found.names.into_iter().chain(more).collect()
    }
}

/// The name without the indices of lists.
fn anywhere(name: &str) -> String {
    let mut is_path = false;
    let mut keep = |c: char| {
        is_path = c == '[' || is_path && c.is_ascii_digit();
        c == '[' || !is_path
    };
    name.chars().filter(|c| keep(*c)).collect()
}

/// The value of the header.
pub(super) fn header(names: &[String]) -> Option<HeaderValue> {
    (!names.is_empty()).then(|| HeaderValue::from_str(&names.join(", ")).ok())?
}

/// Names that are in the log already.
#[derive(Debug, Default)]
pub(super) struct LoggedNames(Mutex<HashSet<String>>);

impl LoggedNames {
    fn new_names(&self, names: &[String]) -> Vec<String> {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut new = Vec::new();
        for name in names.iter().map(|name| anywhere(name)) {
            if logged.len() < MAX_LOGGED && logged.insert(name.clone()) {
                new.push(name);
            }
        }
        new
    }

    /// The notice about bytes and characters that were dropped from prompts, if there is one.
    pub(super) fn dropped_notice(&self, names: &[String]) -> Option<String> {
        let new = self.new_names(names);
        (!new.is_empty()).then(|| {
            let names = new.join(", ");
            format!("prompts have characters without a token, which are dropped: {names}")
        })
    }

    /// The notice about ignored fields, if any of these names is new.
    pub(super) fn notice(&self, names: &[String]) -> Option<String> {
        let new = self.new_names(names);
        let (what, them) = match new.len() {
            0 => return None,
            1 => ("a field that has no effect here and is", "it"),
            _ => ("fields that have no effect here and are", "them"),
        };
        let names = new.join(", ");
        Some(format!("requests have {what} ignored: {names} (--strict-fields refuses {them})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_and_few() {
        let ignored = Ignored::default();
        for name in ["b", "a\r\nx: 1", &"é".repeat(100), "b", "c.d", "e[10].f[0].g", "e[2].f[17].g", "e[3].g"]
        {
            ignored.add(name);
        }
        let names = ignored.take();
        assert_eq!(names, [&"?".repeat(64), "a??x??1", "b", "c.d", "e[10].f[0].g", "e[3].g"]);
        assert_eq!(header(&names[1..3]).unwrap(), "a??x??1, b");
        assert!(LoggedNames::default().notice(&names[4..]).unwrap().contains(": e[].f[].g, e[].g ("));
        assert_eq!(header(&ignored.take()), None);
        (0..100).for_each(|index| ignored.add(&format!("n{index}")));
        let names = ignored.take();
        assert_eq!((names.len(), names[16].as_str()), (17, "and 84 more"));
        assert!(header(&names).is_some());
        let logged = LoggedNames::default();
        assert!(logged.notice(&names[..2]).unwrap().contains("n0, n1 ("));
        assert!(logged.notice(&names[..3]).unwrap().contains(": n10 ("));
        assert_eq!(logged.notice(&names[..3]), None);
        let notice = logged.notice(&["x".to_owned()]).unwrap();
        assert_eq!(
            notice,
            "requests have a field that has no effect here and is ignored: x (--strict-fields refuses it)"
        );
        let many: Vec<String> = (0..1_000).map(|index| index.to_string()).collect();
        assert!(logged.notice(&many).is_some());
        assert_eq!(logged.notice(&["another".to_owned()]), None);
        let logged = LoggedNames::default();
        let dropped = ["0x07".to_owned(), "U+4E00".to_owned()];
        assert!(logged.dropped_notice(&dropped[..1]).unwrap().ends_with(": 0x07"));
        assert!(logged.dropped_notice(&dropped).unwrap().ends_with(": U+4E00"));
        assert_eq!(logged.dropped_notice(&dropped), None);
    }
}
