//! Dot products of 8-bit codes, the integer half of a quantised matmul.
//!
//! A vector of codes has sixteen lanes of four bytes: lane r holds row r of a weight tile at four consecutive columns.
//! One [`Int8Dot::dot`] adds the dot product of every lane to its sum. Integer sums are exact, so these operations give
//! the same result at every level.

/// Integer vectors that go with a vector of sixteen f32.
///
/// # Safety
/// As for [`super::F32x16`]: only reached through [`super::CpuLevel::run`], and pointers are valid for
/// the elements that a method names, without alignment.
#[expect(clippy::missing_safety_doc, reason = "the contract of every method is the trait's")]
pub unsafe trait Int8Dot: Copy {
    /// Sixteen lanes of four bytes.
    type Codes: Copy;
    /// Sixteen i32.
    type Sums: Copy;
    /// The offset that [`Int8Dot::dot_signed`] adds to every code; the sums must start with minus this many times the
    /// sum of the activations.
    const SIGNED_BIAS: i32;

    /// Reads 64 bytes.
    unsafe fn load_codes(source: *const u8) -> Self::Codes;
    /// Writes 64 bytes.
    unsafe fn store_codes(codes: Self::Codes, target: *mut u8);
    /// Reads sixteen u16, each into the lower half of a lane.
    unsafe fn load_u16(source: *const u16) -> Self::Codes;
    /// Each byte, which is below 16, becomes that one of the table.
    fn lookup(codes: Self::Codes, table: &[u8; 16]) -> Self::Codes;
    /// Each byte `& mask`.
    fn and(codes: Self::Codes, mask: u8) -> Self::Codes;
    /// Each byte `a | b`.
    fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes;
    /// Each byte `- value`, wrapping.
    fn sub_bytes(codes: Self::Codes, value: u8) -> Self::Codes;
    /// Each lane, as a u32, `<< count`.
    fn shift_left(codes: Self::Codes, count: u32) -> Self::Codes;
    /// Each lane, as a u32, `>> count`.
    fn shift_right(codes: Self::Codes, count: u32) -> Self::Codes;
    /// The lowest byte of each lane, unsigned.
    fn lowest_byte(codes: Self::Codes) -> Self;

    /// All sums equal to `value`.
    fn splat_sum(value: i32) -> Self::Sums;
    /// Reads sixteen i32.
    unsafe fn load_sums(source: *const i32) -> Self::Sums;
    /// Adds to each lane's sum its four codes, 0..=63, times the four i8 at `activations`. Where there is a
    /// [bias](Int8Dot::SIGNED_BIAS), codes may be any u8.
    unsafe fn dot(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums;
    /// The same for codes that are i8 (−128 included); activations are above −128.
    unsafe fn dot_signed(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums;
    /// The sums of two rows of activations, in the order of the machine's instruction.
    type PairSums: Copy;
    /// All sums of the first row equal to `first`, of the second to `second`.
    fn splat_pair(first: i32, second: i32) -> Self::PairSums;
    /// Adds the dot products of two words of codes, as for [`Int8Dot::dot`], with the eight i8 at `first` and at `second`.
    unsafe fn dot_pair(
        sums: Self::PairSums,
        codes: [Self::Codes; 2],
        first: *const i8,
        second: *const i8,
    ) -> Self::PairSums;
    /// The same for codes that are i8 (−128 included); activations are above −128.
    unsafe fn dot_pair_signed(
        sums: Self::PairSums,
        codes: [Self::Codes; 2],
        first: *const i8,
        second: *const i8,
    ) -> Self::PairSums;
    /// The sums of the first row and of the second.
    fn split_pair(sums: Self::PairSums) -> (Self::Sums, Self::Sums);

    /// The sums as f32.
    fn from_sums(sums: Self::Sums) -> Self;
    /// The same for sums of magnitude below 2²², next to a matrix unit at work: it may leave a machine less space for
    /// conversions than for additions.
    #[inline(always)]
    fn from_small_sums(sums: Self::Sums) -> Self {
        Self::from_sums(sums)
    }

    /// Reads sixteen i8.
    unsafe fn load_i8(source: *const i8) -> Self;
    /// Writes sixteen i8, and returns their sum; the lanes hold integers in −127..=127.
    unsafe fn store_i8(self, target: *mut i8) -> i32;
}

/// The operations on pairs of rows, for machines that multiply one row at a time.
macro_rules! pairs_of_rows {
    () => {
        type PairSums = (Self::Sums, Self::Sums);

        #[inline(always)]
        fn splat_pair(first: i32, second: i32) -> Self::PairSums {
            (Self::splat_sum(first), Self::splat_sum(second))
        }
        #[inline(always)]
        unsafe fn dot_pair(
            (mut a, mut b): Self::PairSums,
            codes: [Self::Codes; 2],
            first: *const i8,
            second: *const i8,
        ) -> Self::PairSums {
            for (word, codes) in codes.into_iter().enumerate() {
                // SAFETY: the caller guarantees eight readable i8 at both.
                unsafe {
                    a = Self::dot(a, codes, first.add(4 * word));
                    b = Self::dot(b, codes, second.add(4 * word));
                }
            }
            (a, b)
        }
        #[inline(always)]
        unsafe fn dot_pair_signed(
            (mut a, mut b): Self::PairSums,
            codes: [Self::Codes; 2],
            first: *const i8,
            second: *const i8,
        ) -> Self::PairSums {
            for (word, codes) in codes.into_iter().enumerate() {
                // SAFETY: the caller guarantees eight readable i8 at both.
                unsafe {
                    a = Self::dot_signed(a, codes, first.add(4 * word));
                    b = Self::dot_signed(b, codes, second.add(4 * word));
                }
            }
            (a, b)
        }
        #[inline(always)]
        fn split_pair(sums: Self::PairSums) -> (Self::Sums, Self::Sums) {
            sums
        }
    };
}
pub(super) use pairs_of_rows;
