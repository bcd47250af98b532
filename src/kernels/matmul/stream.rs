//! Reads memory as a matmul of one row reads its weights, without arithmetic: the upper bound of read bandwidth.

use std::hint::black_box;

use super::TASK_BYTES;
use super::kernels::prefetch;
use crate::memory::{AlignedBuffer, SharedPointer};
use crate::pool::ThreadPool;
use crate::simd::{CpuLevel, F32x16, Kernel};

/// Memory like that of packed weights.
#[derive(Debug)]
pub struct Stream(AlignedBuffer);

impl Stream {
    /// `num_bytes`, rounded down to whole tasks, in pages of their own, or `None` if there is no memory for them.
    #[must_use]
    pub fn new(num_bytes: usize, pool: &ThreadPool) -> Option<Self> {
        let mut buffer = AlignedBuffer::zeroed(num_bytes / TASK_BYTES * TASK_BYTES)?;
        let start = SharedPointer::new(buffer.as_mut_ptr());
        pool.run(buffer.len() / TASK_BYTES, |task| {
            // SAFETY: each task writes its own range of the buffer. Zeros would not do: the system may map all
            // unwritten pages to the same one.
            unsafe { start.get().add(task * TASK_BYTES).write_bytes(1, TASK_BYTES) };
        });
        Some(Self(buffer))
    }

    /// Bytes that a pass reads.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.0.len()
    }

    /// Reads every byte once, each thread a contiguous share.
    pub fn read(&self, pool: &ThreadPool, level: CpuLevel) {
        let tasks = self.0.as_slice().as_chunks::<TASK_BYTES>().0;
        pool.run(tasks.len(), |task| {
            black_box(level.run(Read(&tasks[task])));
        });
    }
}

struct Read<'a>(&'a [u8; TASK_BYTES]);

impl Kernel for Read<'_> {
    type Output = f32;

    /// The sum of the bytes that four lines together have in the first byte of each word.
    #[inline(always)]
    fn run<V: F32x16>(self) -> f32 {
        let mut sum = V::splat(0.0);
        for lines in self.0.as_chunks::<256>().0 {
            prefetch(lines.as_ptr(), lines.len());
            // SAFETY: there are four lines of 64 bytes.
            let all = unsafe {
                let line = |index: usize| V::load_codes(lines.as_ptr().add(64 * index));
                V::or(V::or(line(0), line(1)), V::or(line(2), line(3)))
            };
            sum = sum.add(V::lowest_byte(all));
        }
        sum.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_read_on_every_level() {
        for &level in CpuLevel::available() {
            let mut bytes = [1; TASK_BYTES];
            let num_words = (TASK_BYTES / 256 * 16) as f32;
            assert_eq!(level.run(Read(&bytes)), num_words, "{level:?}");
            for line in [0, 1, 2, 3, TASK_BYTES / 64 - 1] {
                bytes[64 * line + 4] = 3;
                assert_eq!(level.run(Read(&bytes)), num_words + 2.0, "{level:?} line {line}");
                bytes[64 * line + 4] = 1;
            }
        }
    }

    #[test]
    fn a_stream_has_whole_tasks() {
        let pool = ThreadPool::new(2);
        let stream = Stream::new(3 * TASK_BYTES + 5, &pool).unwrap();
        assert_eq!(stream.num_bytes(), 3 * TASK_BYTES);
        assert!(stream.0.as_slice().iter().all(|byte| *byte == 1));
        stream.read(&pool, CpuLevel::detect());
    }
}
