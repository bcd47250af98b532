//! Checks received data against the Hub's, as far as the name of the content allows.
//!
//! The Hub names large files by their SHA-256 (64 digits) and small ones as Git does: the SHA-1 of a header and the
//! content (40 digits). Package proxies for the Hub use the SHA-1 of the content alone, so that is accepted as well.
//! Other names, which some mirrors use, prove nothing.

use ring::digest::{Context, Digest, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// A running checksum over a file from its first byte on.
#[derive(Clone)]
pub(super) struct Checksum {
    expected: Option<String>,
    /// Of each of them, one has to give `expected`.
    contexts: Vec<Context>,
}

impl Checksum {
    /// `size` in bytes is an input of Git's hash.
    pub(super) fn new(etag: &str, size: Option<u64>) -> Self {
        let is_hex = etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        let contexts = match (etag.len(), size) {
            (64, _) if is_hex => vec![Context::new(&SHA256)],
            (40, Some(size)) if is_hex => {
                let plain = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                let mut git = plain.clone();
                git.update(format!("blob {size}\0").as_bytes());
                vec![git, plain]
            }
            _ => Vec::new(),
        };
        Self { expected: (!contexts.is_empty()).then(|| etag.to_ascii_lowercase()), contexts }
    }

    /// Whether the name of the content is one that can be checked.
    pub(super) fn is_known(&self) -> bool {
        self.expected.is_some()
    }

    /// Its name in messages.
    pub(super) fn name(&self) -> &'static str {
        if self.contexts.len() == 1 { "SHA-256" } else { "SHA-1" }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.contexts.iter_mut().for_each(|context| context.update(bytes));
    }

    /// Whether the data so far is the content; true if that cannot be checked.
    pub(super) fn matches(&self) -> bool {
        let digests = self.contexts.iter().map(|context| hex(&context.clone().finish()));
        self.expected.as_ref().is_none_or(|expected| digests.into_iter().any(|digest| digest == *expected))
    }
}

fn hex(digest: &Digest) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(etag: &str, content: &[u8]) -> bool {
        let mut checksum = Checksum::new(etag, Some(content.len() as u64));
        content.chunks(3).for_each(|part| checksum.update(part));
        checksum.matches()
    }

    #[test]
    fn the_names_that_the_hub_and_proxies_use_are_checked() {
        // sha256sum, git hash-object, sha1sum
        for etag in [
            "916f0027a575074ce72a331777c3478d6513f786a591bd892da1a577bf2335f9",
            "916F0027A575074CE72A331777C3478D6513F786A591BD892DA1A577BF2335F9",
            "0aa6fb54678c17a33af5295b7d161709f29b2680",
            "f48dd853820860816c75d54d0f584dc863327a7c",
        ] {
            assert!(Checksum::new(etag, Some(9)).is_known());
            assert!(matches(etag, b"test data"), "{etag}");
            assert!(!matches(etag, b"test dAta"), "{etag}");
            assert!(!matches(etag, b"test dat"), "{etag}");
        }
    }

    #[test]
    fn other_names_prove_nothing() {
        for etag in ["", "5f5c1b-gzip", "d41d8cd98f00b204e9800998ecf8427e", &"g".repeat(64), &"0".repeat(63)]
        {
            assert!(!Checksum::new(etag, Some(9)).is_known(), "{etag}");
            assert!(matches(etag, b"anything"), "{etag}");
        }
        assert!(!Checksum::new(&"0".repeat(40), None).is_known());
    }
}
