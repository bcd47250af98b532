//! Batches of a step's experts whose weights are in a file.

use std::sync::OnceLock;

use super::matmul::{PackedMatrix, RowGroup};
use super::pool::ThreadPool;
use crate::Result;

/// Bytes of weights that are read from a file together: enough to keep a disk busy. If memory is short, the system
/// would evict the pages of larger batches before their use, in favour of used ones.
const FETCH_BYTES: usize = 64 << 20;

/// The groups of a step: one batch if the weights are in memory, otherwise batches that are read together.
pub(super) struct Batches<'a, const N: usize> {
    groups: &'a [RowGroup],
    /// Each has a matrix for every expert.
    stacks: [&'a [PackedMatrix]; N],
    /// Groups of a batch; none if all weights are in memory.
    len: Option<usize>,
}

impl<'a, const N: usize> Batches<'a, N> {
    pub(super) fn new(groups: &'a [RowGroup], stacks: [&'a [PackedMatrix]; N]) -> Self {
        let of_an_expert = || stacks.iter().filter_map(|stack| stack.first());
        let num_bytes: usize = of_an_expert().map(PackedMatrix::num_bytes).sum();
        let is_in_file = of_an_expert().any(PackedMatrix::is_in_file);
        Self { groups, stacks, len: is_in_file.then(|| (FETCH_BYTES / num_bytes.max(1)).max(1)) }
    }

    /// Starts to read the weights of a batch.
    pub(super) fn fetch(&self, index: usize, pool: &ThreadPool) {
        let batch = self.len.and_then(|len| self.groups.chunks(len).nth(index)).unwrap_or_default();
        pool.run(batch.len() * N, |task| self.stacks[task % N][batch[task / N].matrix].fetch());
    }

    /// Calls `compute` with the groups of each batch, while the next one's weights are read. The caller has
    /// [fetched](Self::fetch) the first one.
    ///
    /// # Errors
    /// If a matrix in a file is not as it was written.
    pub(super) fn run(&self, pool: &ThreadPool, mut compute: impl FnMut(&[RowGroup])) -> Result<()> {
        let Some(len) = self.len else {
            compute(self.groups);
            return Ok(());
        };
        for (index, batch) in self.groups.chunks(len).enumerate() {
            self.fetch(index + 1, pool);
            self.check(batch, pool)?;
            compute(batch);
        }
        Ok(())
    }

    /// The first error of the matrices of these groups.
    fn check(&self, batch: &[RowGroup], pool: &ThreadPool) -> Result<()> {
        let damaged = OnceLock::new();
        pool.run(batch.len() * N, |task| {
            if let Err(error) = self.stacks[task % N][batch[task / N].matrix].check() {
                // One is enough.
                let _ = damaged.set(error);
            }
        });
        damaged.into_inner().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cpu::matmul::MatrixFile;
    use crate::ops::cpu::simd::CpuLevel;
    use crate::weights::DType;

    #[test]
    fn every_group_is_in_one_batch() {
        let pool = ThreadPool::new(2);
        let (rows, cols) = (1024, 4096);
        let bytes = vec![0; rows * cols * 4];
        let folder = tempfile::tempdir().unwrap();
        let file = MatrixFile::open(folder.path().join("experts"), 0, 1).unwrap();
        let in_file: Vec<_> =
            (0..2).map(|_| file.add(DType::F32, &bytes, rows, cols, &pool).unwrap()).collect();
        file.finish().unwrap();
        let pack = |_| PackedMatrix::pack(DType::F32, &bytes, rows, cols, &pool, CpuLevel::Portable).unwrap();
        let in_memory: Vec<_> = (0..2).map(pack).collect();
        let groups: Vec<_> =
            (0..9).map(|group| RowGroup { first_row: 8 * group, num_rows: 1, matrix: group % 2 }).collect();
        let check = |stacks: [&[PackedMatrix]; 2], num_groups: usize, expected: &[usize]| {
            let groups = &groups[..num_groups];
            let batches = Batches::new(groups, stacks);
            batches.fetch(0, &pool);
            let (mut lens, mut seen) = (Vec::new(), Vec::new());
            batches
                .run(&pool, |batch| {
                    lens.push(batch.len());
                    seen.extend_from_slice(batch);
                })
                .unwrap();
            assert_eq!((&lens[..], &seen[..]), (expected, groups));
        };
        // 32 MiB for both matrices of an expert.
        check([&in_file, &in_file], 9, &[2, 2, 2, 2, 1]);
        check([&in_file, &in_memory], 2, &[2]);
        check([&in_memory, &in_memory], 9, &[9]);
        check([&in_file, &in_file], 0, &[]);
    }
}
