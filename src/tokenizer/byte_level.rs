//! The reversible mapping of bytes to printable characters that byte-level vocabularies are written in.

/// The character of `byte`.
pub(super) const fn char_of_byte(byte: u8) -> char {
    // Printable bytes map to themselves; the other 68 map to U+0100 and up, in ascending order.
    let code = match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => byte as u32,
        0..=0x20 => 0x100 + byte as u32,
        0x7F..=0xA0 => 0x121 + (byte - 0x7F) as u32,
        0xAD => 0x143,
    };
    match char::from_u32(code) {
        Some(c) => c,
        None => char::REPLACEMENT_CHARACTER,
    }
}

/// The byte of `c`.
pub(super) const fn byte_of_char(c: char) -> Option<u8> {
    match c as u32 {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The bytes of a token, or the token's own UTF-8 if one of its characters has no byte.
pub(super) fn decode_token(token: &str) -> Vec<u8> {
    token.chars().map(byte_of_char).collect::<Option<_>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

/// `text` in the vocabulary's characters.
pub(super) fn encode_text(text: &str) -> String {
    text.bytes().map(char_of_byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_printable_character() {
        let mut characters: Vec<_> = (0..=255).map(char_of_byte).collect();
        for (byte, c) in characters.iter().enumerate() {
            assert_eq!(byte_of_char(*c), Some(byte as u8));
            assert!(!c.is_whitespace() && !c.is_control(), "{byte}");
        }
        characters.sort_unstable();
        characters.dedup();
        assert_eq!(characters.len(), 256);
    }

    #[test]
    fn known_characters() {
        assert_eq!(encode_text(" \n\u{7f}\u{a0}A"), "ĠĊġÂłA");
        assert_eq!(decode_token("ĠA"), b" A");
        assert_eq!(decode_token("｜"), "｜".as_bytes());
    }
}
