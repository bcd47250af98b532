//! The keys and values of a layer, a row for each slot.

use candle_core::{DType, Device, Tensor};

use super::ReferenceBackend;
use super::{Failure, Result};
use crate::ops::KvCacheDType;
use crate::ops::cpu::paged_cache::KvLayout;
use crate::ops::kv_cache::{CacheOps, DevicePools};

/// Keys and values, each `[num_slots, num_kv_heads · head_dim]` of the cache's type; or keys alone, whose first values
/// are the values.
#[derive(Debug)]
pub(crate) struct ReferencePools {
    k: Tensor,
    v: Option<Tensor>,
    block_size: usize,
}

impl CacheOps for ReferenceBackend {
    fn pools(
        &self,
        layout: KvLayout,
        dtype: KvCacheDType,
        num_blocks: usize,
    ) -> crate::Result<ReferencePools> {
        Ok(ReferencePools::new(self, layout, dtype, num_blocks)?)
    }
}

impl DevicePools for ReferencePools {
    fn copy_block(&mut self, source: usize, target: usize) -> crate::Result<()> {
        Ok(self.copy(source, target)?)
    }

    fn block_bytes(&self) -> usize {
        self.tensors().map(|pool| self.block_len(pool) * size_of::<f32>()).sum()
    }

    fn read_block(&self, block: usize, bytes: &mut [u8]) -> crate::Result<()> {
        let mut rest = bytes;
        for pool in self.tensors() {
            let values = self.block_values(pool, block)?;
            let (own, others) = rest.split_at_mut(size_of_val(&values[..]));
            own.copy_from_slice(bytemuck::cast_slice(&values));
            rest = others;
        }
        Ok(())
    }

    fn write_block(&mut self, block: usize, bytes: &[u8]) -> crate::Result<()> {
        let mut rest = bytes;
        for pool in self.tensors() {
            let (own, others) = rest.split_at(self.block_len(pool) * size_of::<f32>());
            let values: Vec<f32> = own.as_chunks().0.iter().map(|value| f32::from_ne_bytes(*value)).collect();
            self.set_block_values(pool, block, &values)?;
            rest = others;
        }
        Ok(())
    }
}

impl ReferencePools {
    fn new(
        backend: &ReferenceBackend,
        layout: KvLayout,
        dtype: KvCacheDType,
        num_blocks: usize,
    ) -> Result<Self> {
        let KvLayout { block_size, num_kv_heads, head_dim, has_values } = layout;
        let dtype = match dtype {
            KvCacheDType::F16 => DType::F16,
            KvCacheDType::Bf16 => DType::BF16,
            KvCacheDType::F32 => DType::F32,
        };
        let shape = (num_blocks * block_size, num_kv_heads * head_dim);
        let zeros = || Tensor::zeros(shape, dtype, backend.device());
        Ok(Self { k: zeros()?, v: has_values.then(zeros).transpose()?, block_size })
    }

    /// Rounds keys and values, `[slots.len(), width]`, and puts them into their slots. No values where there is no room
    /// for them.
    pub(super) fn write(
        &mut self,
        backend: &ReferenceBackend,
        slots: &[usize],
        keys: &Tensor,
        values: Option<&Tensor>,
    ) -> Result<()> {
        let slots = backend.indices(slots.iter().copied())?.unsqueeze(1)?;
        let slots = slots.broadcast_as(keys.shape())?.contiguous()?;
        for (pool, rows) in std::iter::once((&self.k, keys)).chain(self.v.iter().zip(values)) {
            // By way of f32: from f64 directly, bits far behind the half of a unit are overlooked, which is then
            // taken for a tie.
            let rows = rows.to_dtype(DType::F32)?.to_dtype(pool.dtype())?;
            pool.scatter_set(&slots, &rows.contiguous()?, 0)?;
        }
        Ok(())
    }

    /// Keys of some slots, `[slots.len(), width]`, and values, `[slots.len(), value_width]`.
    pub(super) fn read(
        &self,
        backend: &ReferenceBackend,
        slots: &Tensor,
        value_width: usize,
    ) -> Result<[Tensor; 2]> {
        let read = |pool: &Tensor| Ok::<_, Failure>(pool.index_select(slots, 0)?.to_dtype(backend.dtype())?);
        let keys = read(&self.k)?;
        let values = match &self.v {
            Some(values) => read(values)?,
            None => keys.narrow(1, 0, value_width)?,
        };
        Ok([keys, values])
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.k).chain(&self.v)
    }

    /// Values of a block.
    fn block_len(&self, pool: &Tensor) -> usize {
        self.block_size * pool.dims().last().copied().unwrap_or(0)
    }

    /// The values of a block in single precision, which holds those of all types.
    fn block_values(&self, pool: &Tensor, block: usize) -> Result<Vec<f32>> {
        let rows = pool.narrow(0, block * self.block_size, self.block_size)?.to_dtype(DType::F32)?;
        Ok(rows.flatten_all()?.to_device(&Device::Cpu)?.to_vec1()?)
    }

    fn set_block_values(&self, pool: &Tensor, block: usize, values: &[f32]) -> Result<()> {
        let rows =
            Tensor::from_slice(values, (self.block_size, values.len() / self.block_size), &Device::Cpu)?;
        let rows = rows.to_dtype(pool.dtype())?.to_device(pool.device())?;
        Ok(pool.slice_set(&rows, 0, block * self.block_size)?)
    }

    /// Copies the slots of a block to another.
    fn copy(&mut self, source: usize, target: usize) -> Result<()> {
        for pool in std::iter::once(&self.k).chain(&self.v) {
            let rows = pool.narrow(0, source * self.block_size, self.block_size)?.copy()?;
            pool.slice_set(&rows, 0, target * self.block_size)?;
        }
        Ok(())
    }
}
