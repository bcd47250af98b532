//! The table of a `Precompiled` normaliser, checked before the library uses it, which trusts its contents.
//!
//! It is SentencePiece's: the length of a trie, the trie as a double array of 32-bit units, and texts that end with a zero
//! byte each. A text of the trie is replaced by the one that its leaf names.

use std::collections::{HashSet, VecDeque};

/// The allowed growth factor of a replacement; Unicode's longest is eleven.
const MAX_GROWTH: usize = 16;

/// Looks through all that can be found in the trie.
///
/// # Errors
/// A description of the defect.
pub(super) fn check(base64: &str) -> Result<(), String> {
    let bytes = decode(base64).ok_or("it is not Base64")?;
    let (length, rest) = bytes.split_first_chunk().ok_or("it has no length")?;
    let length = u32::from_le_bytes(*length) as usize;
    let (trie, texts) = rest
        .split_at_checked(length / 4 * 4)
        .ok_or_else(|| format!("its trie has {length} bytes, and there are {}", rest.len()))?;
    let texts = std::str::from_utf8(texts).map_err(|error| error.to_string())?;
    let (units, _) = trie.as_chunks();
    let units: Vec<usize> = units.iter().map(|unit| u32::from_le_bytes(*unit) as usize).collect();
    let outside = || format!("its trie leads out of its {} units", units.len());
    let root = *units.first().ok_or_else(outside)?;
    let mut waiting = VecDeque::from([(offset(root), 1)]);
    let mut seen = HashSet::new();
    while let Some((base, depth)) = waiting.pop_front() {
        if !seen.insert(base) {
            continue;
        }
        for byte in 1..=0xFF {
            let at = base ^ byte;
            let unit = *units.get(at).ok_or_else(outside)?;
            // The bit that marks a leaf's value must not be set.
            if unit & (1 << 31 | 0xFF) != byte {
                continue;
            }
            let next = at ^ offset(unit);
            if unit >> 8 & 1 == 1 {
                let start = units.get(next).ok_or_else(outside)? & ((1 << 31) - 1);
                let text = texts.get(start..).ok_or_else(|| format!("there is no text at {start}"))?;
                let length = text.find('\0').unwrap_or(text.len());
                if length > MAX_GROWTH * depth {
                    return Err(format!(
                        "it makes {length} bytes of {depth}, more than {MAX_GROWTH} times as many"
                    ));
                }
            }
            waiting.push_back((next, depth + 1));
        }
    }
    Ok(())
}

/// The offset between the unit of a node and those of its children.
fn offset(unit: usize) -> usize {
    (unit >> 10) << ((unit & 1 << 9) >> 6)
}

fn decode(base64: &str) -> Option<Vec<u8>> {
    let text = base64.trim_end_matches('=').as_bytes();
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for group in text.chunks(4) {
        let mut bits = 0_u32;
        for digit in group {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        bits <<= 6 * (4 - group.len());
        bytes.extend(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    fn encode(bytes: &[u8]) -> String {
        const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for group in bytes.chunks(3) {
            let mut whole = [0; 4];
            whole[1..=group.len()].copy_from_slice(group);
            let bits = u32::from_be_bytes(whole);
            for digit in 0..4 {
                let value = (bits >> (18 - 6 * digit) & 63) as usize;
                text.push(if digit <= group.len() { char::from(DIGITS[value]) } else { '=' });
            }
        }
        text
    }

    /// A table in which "a" has a leaf with this value.
    fn table(num_units: usize, leaf: u32, texts: &[u8]) -> Vec<u8> {
        let mut units = vec![0_u32; num_units];
        // The root's children begin at 256, those of "a" at 512.
        units[0] = 256 << 10;
        units[256 ^ 0x61] = 0x61 | 1 << 8 | (((256 ^ 0x61) ^ 512) << 10);
        units[512] = leaf | 1 << 31;
        let mut bytes = (num_units as u32 * 4).to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(texts);
        bytes
    }

    #[test]
    fn tables_are_looked_through() {
        let check = |bytes: &[u8]| super::check(&encode(bytes));
        check(&table(768, 2, b"x\0bc\0")).unwrap();
        assert!(check(&table(768, 99, b"x\0bc\0")).unwrap_err().contains("no text at 99"));
        assert!(check(&table(768, 1, "é\0".as_bytes())).unwrap_err().contains("no text at 1"));
        assert!(check(&table(768, 0, &[b'x'; 17])).unwrap_err().contains("17 bytes of 1"));
        assert!(check(&table(600, 2, b"x\0bc\0")).unwrap_err().contains("out of its 600 units"));
        assert!(check(&[0; 8]).unwrap_err().contains("out of its 0 units"));
        assert!(check(&u32::MAX.to_le_bytes()).unwrap_err().contains("4294967295 bytes"));
        assert!(check(&[1]).is_err() && super::check("?").is_err());
        // A node that is its own child is visited once.
        let mut knot = table(768, 0, b"x\0");
        let own = 0x61 | 1 << 8 | (0x61 << 10);
        knot[4 + 4 * (256 ^ 0x61)..][..4].copy_from_slice(&u32::to_le_bytes(own));
        knot[4 + 4 * 256..][..4].copy_from_slice(&[0; 4]);
        check(&knot).unwrap();
    }
}
