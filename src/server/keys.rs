//! API keys: those from flags, and those of a file that can be reloaded.
//!
//! Every key keeps its number for the life of the server, even if it is removed and added again. So what
//! belongs to one key never becomes another's. No error contains a key.
//!
//! Keys are found by their digest under a secret of this process. So a look-up takes the same time for many
//! keys as for few. Its time reveals nothing about a key, because a client cannot choose how much of a digest
//! matches.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::{hmac, rand};

use tinyvllm::engine::Weight;
use tinyvllm::{Error, Result};

/// Limit on the size of a key file.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Whether the character separates words. After files were joined, any line can have a byte-order mark.
fn is_space(character: char) -> bool {
    character.is_whitespace() || character == '\u{feff}'
}

/// A key and its client's weight.
#[derive(Clone, PartialEq, Eq)]
struct Key {
    secret: String,
    weight: Weight,
}

/// The digest of a key.
type Digest = [u8; 32];

/// The valid keys.
pub(super) struct Keys {
    secret: hmac::Key,
    found: HashMap<Digest, FoundKey>,
    /// The number of keys that were ever valid.
    num_known: usize,
}

/// The key of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FoundKey {
    pub(super) number: usize,
    pub(super) weight: Weight,
}

/// The sources of keys, and the keys that were read last. A look-up uses a snapshot.
pub(super) struct KeyRing {
    given: Vec<String>,
    file: Option<PathBuf>,
    secret: hmac::Key,
    /// The numbers of all keys that were ever valid. Locked while keys are read, never during a look-up.
    known: Mutex<HashMap<Digest, usize>>,
    current: Mutex<Arc<Keys>>,
    /// About the file that was read last.
    notice: Mutex<Option<String>>,
}

impl std::fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyRing").field("file", &self.file).finish_non_exhaustive()
    }
}

impl KeyRing {
    /// Reads the keys for the first time.
    ///
    /// # Errors
    /// If a key is empty, the file cannot be read, or one of its lines is not a key.
    pub(super) fn open(given: &[String], file: Option<&Path>) -> Result<Self> {
        let secret = hmac::Key::generate(hmac::HMAC_SHA256, &rand::SystemRandom::new())
            .map_err(|_| Error::internal("the system's random generator failed"))?;
        let none = Arc::new(Keys { secret: secret.clone(), found: HashMap::new(), num_known: 0 });
        let ring = Self {
            given: given.to_vec(),
            file: file.map(Path::to_path_buf),
            secret,
            known: Mutex::default(),
            current: Mutex::new(none),
            notice: Mutex::default(),
        };
        // Now it may be a pipe (`<(command)`).
        ring.read_with(tinyvllm::files::read_any)?;
        Ok(ring)
    }

    /// A notice for the operator about the file that was read last. It has no key.
    pub(super) fn take_notice(&self) -> Option<String> {
        self.notice.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether there is a file to reload.
    pub(super) fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Reloads the file, which must be a regular one: a pipe has been read, or has no writer. Returns the number of keys.
    ///
    /// # Errors
    /// As [`Self::open`]. The old keys stay valid then.
    pub(super) fn read(&self) -> Result<usize> {
        self.read_with(tinyvllm::files::read)
    }

    fn read_with(&self, read: fn(&Path, u64) -> std::io::Result<Vec<u8>>) -> Result<usize> {
        let mut keys: Vec<Key> = Vec::new();
        for text in &self.given {
            let secret = text.trim_matches(is_space);
            if secret.is_empty() {
                return Err(
                    Error::invalid_request("an API key is empty").with_hint("omit --api-key to require none")
                );
            }
            keys.push(Key { secret: secret.to_owned(), weight: Weight::default() });
        }
        if let Some(path) = &self.file {
            let text = read(path, MAX_FILE_BYTES)
                .and_then(tinyvllm::files::text)
                .map_err(|source| Error::io(format_args!("cannot read {}", path.display()), source))?;
            let found = parse_file(&text, path)?;
            if found.is_empty() {
                // An empty file must not open the server to everybody.
                return Err(Error::invalid_request(format!("{} has no key", path.display()))
                    .with_hint("write one key a line"));
            }
            keys.extend(found);
            *self.notice.lock().unwrap_or_else(PoisonError::into_inner) = notice(&text, path);
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = HashMap::with_capacity(keys.len());
        for Key { secret, weight } in keys {
            let digest = digest(&self.secret, secret.as_bytes());
            let next = known.len();
            let number = *known.entry(digest).or_insert(next);
            found.insert(digest, FoundKey { number, weight });
        }
        let num_keys = found.len();
        let keys = Arc::new(Keys { secret: self.secret.clone(), found, num_known: known.len() });
        // The old keys are freed outside of the lock.
        let before = std::mem::replace(&mut *self.lock_current(), keys);
        drop(before);
        Ok(num_keys)
    }

    pub(super) fn current(&self) -> Arc<Keys> {
        Arc::clone(&self.lock_current())
    }

    fn lock_current(&self) -> MutexGuard<'_, Arc<Keys>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keys {
    /// Whether no key is needed.
    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// The number of keys that were ever valid, including removed ones.
    pub(super) fn num_known(&self) -> usize {
        self.num_known
    }

    /// Finds a key.
    pub(super) fn find(&self, given: &[u8]) -> Option<FoundKey> {
        self.found.get(&digest(&self.secret, given)).copied()
    }
}

fn digest(secret: &hmac::Key, key: &[u8]) -> Digest {
    let mut digest = [0; 32];
    digest.copy_from_slice(hmac::sign(secret, key).as_ref());
    digest
}

/// One key a line, optionally with a weight: `KEY weight=2`. A word that begins with `#` starts a comment.
fn parse_file(text: &str, path: &Path) -> Result<Vec<Key>> {
    let mut keys = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        let words = text.split(is_space).filter(|word| !word.is_empty());
        let mut words = words.take_while(|word| !word.starts_with('#'));
        let Some(secret) = words.next() else { continue };
        let mut weight = Weight::default();
        for word in words {
            let given = word.strip_prefix("weight=").and_then(|number| Weight::new(number.parse().ok()?));
            weight = given.ok_or_else(|| {
                Error::invalid_request(format!(
                    "line {line} of {} has text after the key that is not a weight",
                    path.display()
                ))
                .with_hint(format!(
                    "write one key a line, followed by weight=N for a weight other than 1, \
                     with N from 1 to {}; comments begin with #",
                    Weight::MAX
                ))
            })?;
        }
        keys.push(Key { secret: secret.to_owned(), weight });
    }
    Ok(keys)
}

/// Names the lines that are comments and look like keys: a single word that begins with `#`.
fn notice(text: &str, path: &Path) -> Option<String> {
    const MAX_LINES: usize = 5;
    let looks_like_key = |line: &str| {
        let mut words = line.split(is_space).filter(|word| !word.is_empty());
        let first =
            words.next().is_some_and(|word| word.starts_with('#') && !word.replace('#', "").is_empty());
        first && words.all(|word| word.starts_with("weight="))
    };
    let lines = (1..).zip(text.lines()).filter(|(_, line)| looks_like_key(line));
    let numbers: Vec<String> = lines.map(|(number, _): (usize, _)| number.to_string()).collect();
    let (first, more) = numbers.split_at(numbers.len().min(MAX_LINES));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let lines = format!("{}{more} of {}", first.join(", "), path.display());
    match numbers.len() {
        0 => None,
        1 => Some(format!("line {lines} is a comment, because it begins with #; no key can begin so")),
        _ => Some(format!("lines {lines} are comments, because they begin with #; no key can begin so")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_that_looks_like_a_key_is_named_by_its_line() {
        let check = |text: &str, expected: Option<&str>| {
            let expected = expected.map(str::to_owned);
            assert_eq!(notice(text, Path::new("keys.txt")), expected, "{text:?}");
        };
        let end = "because it begins with #; no key can begin so";
        check("# ours\n#### \n#of Ann\na\nb # until May\n#\n", None);
        check("a\n\u{feff}#secret\n", Some(&format!("line 2 of keys.txt is a comment, {end}")));
        check("#secret weight=2\n", Some(&format!("line 1 of keys.txt is a comment, {end}")));
        let end = "because they begin with #; no key can begin so";
        check("#a\nb\n#c\n", Some(&format!("lines 1, 3 of keys.txt are comments, {end}")));
        let many = "#a\n".repeat(7);
        check(&many, Some(&format!("lines 1, 2, 3, 4, 5 and 2 more of keys.txt are comments, {end}")));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "key\n#other\n").unwrap();
        let ring = KeyRing::open(&[], Some(file.path())).unwrap();
        let said = ring.take_notice().unwrap();
        assert!(said.starts_with("line 2 of ") && !said.contains("other"), "{said}");
        assert_eq!(ring.take_notice(), None);
    }

    fn parse(text: &str) -> Result<Vec<(String, u32)>> {
        let keys = parse_file(text, Path::new("keys.txt"))?;
        Ok(keys.into_iter().map(|key| (key.secret, key.weight.get())).collect())
    }

    #[test]
    fn files_are_lists_with_comments() {
        let check = |text: &str, expected: &[(&str, u32)]| {
            let expected: Vec<_> =
                expected.iter().map(|(secret, weight)| ((*secret).to_owned(), *weight)).collect();
            assert_eq!(parse(text).unwrap(), expected, "{text:?}");
        };
        check("a\nb\n", &[("a", 1), ("b", 1)]);
        check("\u{feff}a\r\n\r\n  b \r\n", &[("a", 1), ("b", 1)]);
        check("\u{feff}# one\r\na\r\n\u{feff}# two\r\n\u{feff}b weight=2\r\n", &[("a", 1), ("b", 2)]);
        check("\u{feff}\r\n \u{feff} \r\n", &[]);
        check("# ours\na weight=20\n  # theirs\nb # until May\n#c\n", &[("a", 20), ("b", 1)]);
        check("a#b\n", &[("a#b", 1)]);
        check("# nothing\n\n", &[]);
        // A joined file whose last line has no line break.
        for wrong in
            ["a\u{feff}b", "a b", "a weight=0", "a weight=1001", "a weight=x", "a weight = 2", "a weight=-1"]
        {
            let error = parse(&format!("ok\nsecret-{wrong}\n")).unwrap_err();
            let text = format!("{error} {}", error.hint().unwrap());
            assert!(text.contains("line 2 of keys.txt") && text.contains("weight=N"), "{text}");
            assert!(!text.contains("secret"), "{text}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_named_by_their_line_and_not_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"a\n\nsecret\xe9\nb\n").unwrap();
        let error = KeyRing::open(&[], Some(file.path())).unwrap_err().to_string();
        assert!(error.contains("not text in UTF-8, in line 3") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn keys_are_compared_whole_and_keep_their_numbers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "beta weight=2\ngamma").unwrap();
        let ring = KeyRing::open(&["\u{feff}alpha\r\n".to_owned()], Some(file.path())).unwrap();
        let check = |secret: &[u8], expected: Option<(usize, u32)>| {
            let found = ring.current().find(secret).map(|key| (key.number, key.weight.get()));
            assert_eq!(found, expected, "{secret:?}");
        };
        check(b"alpha", Some((0, 1)));
        check(b"beta", Some((1, 2)));
        check(b"gamma", Some((2, 1)));
        for wrong in [&b""[..], b"alph", b"alphaa", b"\xff\xfe", b"beta weight=2"] {
            check(wrong, None);
        }
        let before = ring.current();
        std::fs::write(file.path(), "delta\ngamma weight=3\n").unwrap();
        assert_eq!(ring.read().unwrap(), 3);
        check(b"beta", None);
        check(b"gamma", Some((2, 3)));
        check(b"delta", Some((3, 1)));
        assert!(before.find(b"beta").is_some(), "a look-up from before still sees it");
        // If the file cannot be read, nothing changes. A key that comes back has its old number.
        std::fs::write(file.path(), "# none\n").unwrap();
        assert!(ring.read().unwrap_err().message().contains("has no key"));
        check(b"delta", Some((3, 1)));
        std::fs::write(file.path(), "beta\n").unwrap();
        ring.read().unwrap();
        check(b"beta", Some((1, 1)));
    }

    #[test]
    fn many_keys_are_read_in_a_time_that_grows_with_their_number_while_requests_find_theirs() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let write = |prefix: &str, num_keys: usize| {
            let lines: String = (0..num_keys).map(|number| format!("{prefix}-{number:08}\n")).collect();
            std::fs::write(file.path(), lines).unwrap();
        };
        write("first", 1);
        let ring = KeyRing::open(&["alpha".to_owned()], Some(file.path())).unwrap();
        let mut round = 0;
        let mut time = |num_keys: usize| {
            let times = (0..3).map(|_| {
                round += 1;
                write(&format!("round-{round}"), num_keys);
                let start = std::time::Instant::now();
                assert_eq!(ring.read().unwrap(), num_keys + 1);
                start.elapsed()
            });
            times.min().unwrap()
        };
        // Quadratic time would be 400 times as long.
        let (few, many) = (time(1_000), time(20_000));
        assert!(many < few * 150, "{few:?} and {many:?}");
        // A reload holds this lock while it reads.
        let reading = ring.known.lock().unwrap();
        assert!(
            ring.current().find(b"alpha").is_some() && ring.current().find(b"round-1-00000000").is_none()
        );
        drop(reading);
    }
}
