//! The types of files that have no kernels, taken apart: whole numbers under one factor, which other types can hold.
//!
//! Each value is `d · scale · code / units`. The factors have so few bits that every order of multiplication is exact
//! in f32.

use half::f16;

use super::code_books::{
    IQ1, IQ1_LEVELS, IQ2_LEVELS, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_S_LEVELS, IQ3_XXS, IQ3_XXS_LEVELS,
    even_signs,
};
use crate::RepackedType;

/// One block of a type without kernels.
pub(super) struct ScaledBlock {
    /// The factor of the block.
    pub(super) d: f16,
    /// A scale for each sixteen values.
    pub(super) scales: [i8; 16],
    /// The codes of a block.
    pub(super) codes: [i8; 256],
    /// Codes are multiples of its inverse: 1, or 8 for types that become [`crate::DType::Q8S`].
    pub(super) units: f32,
}

impl ScaledBlock {
    /// `block` is one of the type's.
    pub(super) fn take_apart(repacked: RepackedType, block: &[u8]) -> Self {
        let units = match repacked.kept_as() {
            crate::DType::Q8S => 8.0,
            _ => 1.0,
        };
        let mut taken = Self { d: half_at(block, 0), scales: [1; 16], codes: [0; 256], units };
        match repacked {
            RepackedType::Iq2Xxs => taken.iq2_xxs(block),
            RepackedType::Iq2Xs => taken.iq2_xs(block),
            RepackedType::Iq2S => taken.iq2_s(block),
            RepackedType::Iq3Xxs => taken.iq3_xxs(block),
            RepackedType::Iq3S => taken.iq3_s(block),
            RepackedType::Iq1S => taken.iq1_s(block),
            RepackedType::Iq1M => taken.iq1_m(block),
            RepackedType::Tq1_0 => taken.tq1_0(block),
            RepackedType::Tq2_0 => taken.tq2_0(block),
            RepackedType::Q1_0 => taken.packed_bits(&block[2..], 1, [-1, 1, 0, 0]),
            RepackedType::Q2_0 => taken.packed_bits(&block[2..], 2, [-1, 0, 1, 2]),
        }
        taken
    }

    /// Fills `values` from the start.
    pub(super) fn values(&self, out: &mut [f32]) {
        let d = self.d.to_f32() / self.units;
        for (k, out) in out.iter_mut().enumerate() {
            *out = d * f32::from(self.scales[k / 16]) * f32::from(self.codes[k]);
        }
    }

    /// `d: f16`, and for each 32 values `numbers: [u8; 4], signs and scale: u32`: four times seven signs, and four bits.
    fn iq2_xxs(&mut self, block: &[u8]) {
        for (index, part) in block[2..].chunks_exact(8).enumerate() {
            let signs = word_at(part, 4);
            self.scales[2 * index..][..2].fill(odd_scale(signs >> 28));
            for (group, number) in part[..4].iter().enumerate() {
                let signs = even_signs(signs >> (7 * group));
                self.eight(4 * index + group, IQ2_XXS[usize::from(*number)], &IQ2_LEVELS, signs);
            }
        }
    }

    /// `d: f16, numbers of 9 bits and 7 signs: [u16; 32], scales: [u8; 8]`, nibbles.
    fn iq2_xs(&mut self, block: &[u8]) {
        self.nibble_scales(&block[66..], 16);
        for (group, bytes) in block[2..66].as_chunks().0.iter().enumerate() {
            let number = u16::from_le_bytes(*bytes);
            let signs = even_signs(u32::from(number >> 9));
            self.eight(group, IQ2_XS[usize::from(number & 511)], &IQ2_LEVELS, signs);
        }
    }

    /// `d: f16, numbers: [u8; 32], signs: [u8; 32], upper bits of numbers: [u8; 8], scales: [u8; 8]`.
    fn iq2_s(&mut self, block: &[u8]) {
        self.nibble_scales(&block[74..], 16);
        for group in 0..32 {
            let upper = usize::from(block[66 + group / 4] >> (2 * (group % 4)) & 3);
            let entry = IQ2_S[usize::from(block[2 + group]) | upper << 8];
            self.eight(group, entry, &IQ2_LEVELS, block[34 + group]);
        }
    }

    /// `d: f16, numbers: [u8; 64], signs and scales: [u32; 8]`, as those of `IQ2_XXS`. Codes are in eighths, levels in
    /// quarters.
    fn iq3_xxs(&mut self, block: &[u8]) {
        for index in 0..8 {
            let signs = word_at(block, 66 + 4 * index);
            self.scales[2 * index..][..2].fill(odd_scale(signs >> 28));
            for group in 0..4 {
                let numbers = &block[2 + 8 * index + 2 * group..][..2];
                let entries = [0, 1].map(|half: usize| IQ3_XXS[usize::from(numbers[half])]);
                let levels = IQ3_XXS_LEVELS.map(|level| 2 * level);
                self.two_fours(4 * index + group, entries, &levels, even_signs(signs >> (7 * group)));
            }
        }
    }

    /// `d: f16, numbers: [u8; 64], upper bits of numbers: [u8; 8], signs: [u8; 32], scales: [u8; 4]`.
    fn iq3_s(&mut self, block: &[u8]) {
        self.nibble_scales(&block[106..], 32);
        for group in 0..32 {
            let entries = [0, 1].map(|half: usize| {
                let at = 2 * group + half;
                let upper = usize::from(block[66 + at / 8] >> (at % 8) & 1);
                IQ3_S[usize::from(block[2 + at]) | upper << 8]
            });
            self.two_fours(group, entries, &IQ3_S_LEVELS, block[74 + group]);
        }
    }

    /// `d: f16, numbers: [u8; 32]`, and for each 32 values a u16: four times three upper bits of numbers, a scale of three
    /// bits, and whether an eighth is subtracted from all values or added to them.
    fn iq1_s(&mut self, block: &[u8]) {
        for index in 0..8 {
            let upper = half_word_at(block, 34 + 2 * index);
            self.scales[2 * index..][..2].fill(odd_scale(u32::from(upper >> 12 & 7)));
            for group in 0..4 {
                let number =
                    usize::from(block[2 + 4 * index + group]) | usize::from(upper >> (3 * group) & 7) << 8;
                self.shifted(4 * index + group, number, upper & 0x8000 != 0);
            }
        }
    }

    /// `numbers: [u8; 32]`, for each eight values a nibble of three upper bits of the number and whether an eighth is
    /// subtracted, and four u16 of which each has four scales of three bits and four bits of the factor.
    fn iq1_m(&mut self, block: &[u8]) {
        let words: [u16; 4] = std::array::from_fn(|index| half_word_at(block, 48 + 2 * index));
        let factor = words.iter().rev().fold(0, |bits, word| bits << 4 | word >> 12);
        self.d = f16::from_bits(factor);
        for (index, scale) in self.scales.iter_mut().enumerate() {
            *scale = odd_scale(u32::from(words[index / 4] >> (3 * (index % 4)) & 7));
        }
        for group in 0..32 {
            let upper = block[32 + group / 2] >> (4 * (group % 2)) & 15;
            let number = usize::from(block[group]) | usize::from(upper & 7) << 8;
            self.shifted(group, number, upper & 8 != 0);
        }
    }

    /// `codes: [u8; 52], d: f16`; a byte is a fraction of 256 whose digits in base three are five values, in the last four
    /// bytes four. Bytes come in groups of 32, 16 and 4, of which all first values precede all second ones.
    fn tq1_0(&mut self, block: &[u8]) {
        self.d = half_at(block, 52);
        let groups = [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)];
        let digits = groups.into_iter().flat_map(|(bytes, num_digits)| {
            (0..num_digits).flat_map(move |digit| {
                // The integer part holds the previous digits.
                bytes
                    .iter()
                    .map(move |byte| ((u16::from(byte.wrapping_mul(3_u8.pow(digit))) * 3) >> 8) as i8 - 1)
            })
        });
        for (code, digit) in self.codes.iter_mut().zip(digits) {
            *code = digit;
        }
    }

    /// `codes: [u8; 64], d: f16`, in the order of those of `Q2_K`.
    fn tq2_0(&mut self, block: &[u8]) {
        self.d = half_at(block, 64);
        for (k, code) in self.codes.iter_mut().enumerate() {
            *code = (block[32 * (k / 128) + k % 32] >> (2 * (k % 128 / 32)) & 3) as i8 - 1;
        }
    }

    /// Neighbouring values in neighbouring bits.
    fn packed_bits(&mut self, bytes: &[u8], bits: usize, levels: [i8; 4]) {
        let in_byte = 8 / bits;
        for (k, code) in self.codes[..in_byte * bytes.len()].iter_mut().enumerate() {
            let number = usize::from(bytes[k / in_byte]) >> (bits * (k % in_byte)) & ((1 << bits) - 1);
            *code = levels[number];
        }
    }

    /// Low nibbles first, each for `len` values.
    fn nibble_scales(&mut self, bytes: &[u8], len: usize) {
        for (index, scale) in self.scales.iter_mut().enumerate() {
            let at = 16 * index / len;
            *scale = odd_scale(u32::from(bytes[at / 2] >> (4 * (at % 2)) & 15));
        }
    }

    /// Values 8·`group`.. by an entry of a book with two bits for each.
    fn eight(&mut self, group: usize, entry: u16, levels: &[i8; 4], signs: u8) {
        for (index, code) in self.codes[8 * group..][..8].iter_mut().enumerate() {
            let level = levels[usize::from(entry >> (2 * index) & 3)];
            *code = if signs >> index & 1 == 1 { -level } else { level };
        }
    }

    /// The same by two entries with three bits for each.
    fn two_fours(&mut self, group: usize, entries: [u16; 2], levels: &[i8; 8], signs: u8) {
        for (index, code) in self.codes[8 * group..][..8].iter_mut().enumerate() {
            let level = levels[usize::from(entries[index / 4] >> (3 * (index % 4)) & 7)];
            *code = if signs >> index & 1 == 1 { -level } else { level };
        }
    }

    /// The same by an entry of the book of −1, 0 and 1, in eighths, one of them added to each or subtracted.
    fn shifted(&mut self, group: usize, number: usize, is_below: bool) {
        let levels = IQ1_LEVELS.map(|level| 8 * level + if is_below { -1 } else { 1 });
        self.eight(group, IQ1[number], &levels, 0);
    }
}

/// 2 · `bits` + 1, of at most four bits.
fn odd_scale(bits: u32) -> i8 {
    2 * (bits & 15) as i8 + 1
}

fn half_at(block: &[u8], at: usize) -> f16 {
    f16::from_bits(half_word_at(block, at))
}

fn half_word_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}
