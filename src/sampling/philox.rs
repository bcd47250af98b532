//! Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as
//! 1, 2, 3" (SC 2011).
//!
//! A draw is a function of a key and a counter, with no state in between. So the n-th token of a sequence gets the same
//! number in every schedule, also after preemption, and a device can compute it.

/// Four random words for a counter under a key.
pub(super) fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let product0 = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let product1 = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (product1 >> 32) as u32 ^ counter[1] ^ key[0],
            product1 as u32,
            (product0 >> 32) as u32 ^ counter[3] ^ key[1],
            product0 as u32,
        ];
    }
    counter
}

/// A number in [0, 1) with 53 random bits, for token `index` of sequence `stream` under `seed`.
pub(super) fn uniform(seed: u64, stream: u32, index: u64) -> f64 {
    let counter = [index as u32, (index >> 32) as u32, stream, 0];
    let words = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
    bits as f64 * (1.0 / (1_u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vectors that the authors publish with their library.
    #[test]
    fn known_answers() {
        let check = |counter, key, wanted: [u32; 4]| assert_eq!(philox4x32(counter, key), wanted);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn uniform_numbers_fill_the_interval() {
        let mut counts = [0; 10];
        for index in 0..10_000 {
            let u = uniform(5, 3, index);
            assert!((0.0..1.0).contains(&u));
            counts[(u * 10.0) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
