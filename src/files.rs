//! Files that are read whole. Each has a limit, because a device or a pipe that a link points to may have no end.
//! Also JSON in files as Python reads it.

use std::fs::{self, File, FileType};
use std::io::{self, Read};
use std::path::Path;

use serde::de::DeserializeOwned;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Opens a file of a model. Only regular files are opened: to open a pipe would wait for a writer.
///
/// # Errors
/// Those of the system, and if it is another kind of file.
pub fn open(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    if !kind.is_file() {
        let error = if kind.is_dir() { io::ErrorKind::IsADirectory } else { io::ErrorKind::InvalidInput };
        return Err(io::Error::new(error, format!("it is a {}, not a file", kind_name(kind))));
    }
    File::open(path)
}

/// All bytes of a file of a model, `max_bytes` at most.
///
/// # Errors
/// As [`open`], and if there are more.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    read_up_to(open(path)?, max_bytes)
}

/// The same of what a user names, which may be a pipe (`<(command)`).
///
/// # Errors
/// Those of the system, and if there are more bytes.
pub fn read_any(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    read_up_to(File::open(path)?, max_bytes)
}

/// The text of what a user names.
///
/// # Errors
/// As [`read_any`], and if it is not UTF-8.
pub fn read_any_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    text(read_any(path, max_bytes)?)
}

/// All that a reader has, `max_bytes` at most.
///
/// # Errors
/// Those of the reader, and if there are more bytes.
pub fn read_up_to(reader: impl Read, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let message = format!("it has more than {max_bytes} bytes, which is the limit");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Bytes as text, without the byte order mark that some editors write.
///
/// # Errors
/// If they are not UTF-8, with the first line that is not.
pub fn text(mut bytes: Vec<u8>) -> io::Result<String> {
    if bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        io::Error::new(io::ErrorKind::InvalidData, format!("it is not text in UTF-8, in line {line}"))
    })
}

/// JSON as Python reads it. `NaN`, `Infinity` and `-Infinity` become texts: a key that is not read may have them, and
/// where a number is read, the error shows what is there instead. A byte order mark is skipped, as editors write it.
///
/// # Errors
/// Those of `serde_json`.
pub fn json<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    serde_json::from_slice(bytes).or_else(|error| match quoted_constants(bytes) {
        Some(bytes) => serde_json::from_slice(&bytes),
        None => Err(error),
    })
}

/// The text with quotes around each constant of Python's, outside strings. None if there is none.
fn quoted_constants(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut quoted = Vec::with_capacity(bytes.len());
    let (mut is_string, mut is_found, mut at) = (false, false, 0);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let constant = ["NaN", "Infinity", "-Infinity"].iter().find(|word| rest.starts_with(word.as_bytes()));
        let len = match (rest[0], constant) {
            (b'\\', _) if is_string => 2.min(rest.len()),
            (_, Some(word)) if !is_string => {
                is_found = true;
                quoted.push(b'"');
                quoted.extend_from_slice(word.as_bytes());
                quoted.push(b'"');
                at += word.len();
                continue;
            }
            (byte, _) => {
                is_string ^= byte == b'"';
                1
            }
        };
        quoted.extend_from_slice(&rest[..len]);
        at += len;
    }
    is_found.then_some(quoted)
}

fn kind_name(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "pipe";
        }
        if kind.is_socket() {
            return "socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "device";
        }
    }
    if kind.is_dir() { "folder" } else { "special file" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_read_than_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("five");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        assert_eq!(read_any_text(&path, 5).unwrap(), "12345");
        fs::write(&path, "\u{FEFF}a\u{FEFF}").unwrap();
        assert_eq!(read_any_text(&path, 10).unwrap(), "a\u{FEFF}");
        fs::write(&path, "12345").unwrap();
        let error = read(&path, 4).unwrap_err();
        assert!(error.to_string().contains("more than 4 bytes"), "{error}");
        assert_eq!(read(&folder.path().join("none"), 4).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&path, b"\xFF").unwrap();
        assert_eq!(read_any_text(&path, 5).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn json_of_python_and_of_editors_is_read() {
        let read = |text: &str| json::<serde_json::Value>(text.as_bytes());
        assert_eq!(
            read(r#"{"limit": [0.0, Infinity], "least": -Infinity, "NaN": NaN, "t": "a \" NaN \\"}"#)
                .unwrap(),
            serde_json::json!({
                "limit": [0.0, "Infinity"], "least": "-Infinity", "NaN": "NaN", "t": "a \" NaN \\",
            })
        );
        assert_eq!(read("\u{FEFF}[1]").unwrap(), serde_json::json!([1]));
        for text in ["", "NaNa", "[Infinity", "{\"a\": nan}", "\"NaN\\", "\\NaN", "Inf"] {
            assert!(read(text).is_err(), "{text}");
        }
        assert!(json::<serde_json::Value>(b"\"\\").is_err());
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for (path, kind) in [(&*pipe, "pipe"), (Path::new("/dev/zero"), "device"), (folder.path(), "folder")]
        {
            let error = read(path, 10).unwrap_err().to_string();
            assert!(error.contains(&format!("it is a {kind}")), "{error}");
        }
        let error = read_any(Path::new("/dev/zero"), 10).unwrap_err();
        assert!(error.to_string().contains("more than 10 bytes"), "{error}");
    }
}
