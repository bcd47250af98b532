//! Recognises files that are not weights but are often found instead.

use crate::{Error, ErrorKind};

/// The error for a file that does not start like `expected`; names the format that the file seems to have instead.
///
/// `bytes` is the file or its beginning.
pub(super) fn not_a(expected: &str, bytes: &[u8]) -> Error {
    match recognise(bytes) {
        Some((what, hint)) => {
            Error::new(ErrorKind::InvalidModel, format!("this is {what}, not a {expected}")).with_hint(hint)
        }
        None => Error::invalid_model(format!(
            "this is not a {expected}: it starts with the bytes {:02x?}",
            &bytes[..bytes.len().min(8)]
        ))
        .with_hint("check that the path is right and the download complete"),
    }
}

fn recognise(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    let text_start = bytes.trim_ascii_start();
    let starts_with = |prefix: &[u8]| {
        text_start.len() >= prefix.len() && text_start[..prefix.len()].eq_ignore_ascii_case(prefix)
    };
    if bytes.is_empty() {
        Some(("an empty file", "the download failed; fetch the file again"))
    } else if bytes.starts_with(b"version https://git-lfs") {
        Some(("a git-lfs pointer", "run `git lfs pull` in its folder, or download the file itself"))
    } else if starts_with(b"<!doctype") || starts_with(b"<html") {
        Some(("an HTML page", "the download got an error page; fetch the file again"))
    } else if bytes.starts_with(b"GGUF") {
        Some(("a GGUF file", "give it the extension .gguf and pass its path"))
    } else if bytes.starts_with(b"PK\x03\x04") {
        Some(("a zip archive or PyTorch checkpoint", "convert it to safetensors or GGUF"))
    } else if [b"lmgg", b"fmgg", b"tjgg", b"algg"].iter().any(|magic| bytes.starts_with(*magic)) {
        Some(("a ggml file from before GGUF", "convert the original model to GGUF"))
    } else if bytes.len() > 8 && bytes[8] == b'{' && bytes[4..8] == [0; 4] {
        Some(("a safetensors file", "pass the folder that holds it and its config.json"))
    } else if starts_with(b"{") {
        Some(("a JSON text", "the download may have got an error message; fetch the file again"))
    } else {
        None
    }
}
