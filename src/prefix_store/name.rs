//! Names and checksums, under the secret of a directory.
//!
//! A user that can write files but does not know the secret can neither forge a block nor learn which prefix a block
//! belongs to. Hashed data begins with its kind, so that no name is a checksum of other data.

use std::fmt;

/// Bytes of secrets, fingerprints, names and checksums.
pub(super) const HASH_BYTES: usize = 32;

/// The secret of a directory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Secret([u8; HASH_BYTES]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    pub(super) fn new(bytes: [u8; HASH_BYTES]) -> Self {
        Self(bytes)
    }

    /// The keyed hash of these byte strings in sequence. `what` fixes the lengths of all but the last.
    pub(super) fn hash(&self, what: &str, parts: &[&[u8]]) -> [u8; HASH_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&(what.len() as u64).to_le_bytes()).update(what.as_bytes());
        for part in parts {
            hasher.update(part);
        }
        hasher.finalize().into()
    }
}

/// All that decides which bytes a block has, in addition to its tokens: 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; HASH_BYTES]);

/// The name of a full block together with everything before it. It outlives the process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockName(pub(super) [u8; HASH_BYTES]);

impl fmt::Debug for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Names the blocks of a model in a directory.
#[derive(Debug, Clone, Copy)]
pub struct Namer {
    pub(super) secret: Secret,
    pub(super) fingerprint: Fingerprint,
}

impl Namer {
    /// The name of the empty prefix for this salt: requests with different salts have no blocks in common.
    #[must_use]
    pub fn root(&self, cache_salt: Option<&str>) -> BlockName {
        let (has_salt, salt) = ([u8::from(cache_salt.is_some())], cache_salt.unwrap_or_default());
        BlockName(self.secret.hash("root", &[&self.fingerprint.0, &has_salt, salt.as_bytes()]))
    }

    /// The name of a block with these tokens after `parent`, of which the first `num_grouped` are computed in groups of a
    /// prompt.
    #[must_use]
    pub fn child(&self, parent: BlockName, token_ids: &[u32], num_grouped: usize) -> BlockName {
        let tokens: Vec<u8> = token_ids.iter().flat_map(|token| token.to_le_bytes()).collect();
        let num_grouped = (num_grouped as u64).to_le_bytes();
        BlockName(self.secret.hash("block", &[&self.fingerprint.0, &parent.0, &num_grouped, &tokens]))
    }
}
