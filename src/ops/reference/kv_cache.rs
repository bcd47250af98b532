//! The keys and values of a layer, a row for each slot.

use candle_core::{DType, Device, Tensor};
use half::f16;

use super::ReferenceBackend;
use super::{Failure, Result};
use crate::ops::KvCacheDType;
use crate::ops::cpu::paged_cache::{GROUP, KvLayout};
use crate::ops::kv_cache::{CacheOps, DevicePools};

/// Keys and values, each `[num_slots, num_kv_heads · head_dim]`, of the cache's type or as f32 values rounded to it; or
/// keys alone, whose first values are the values.
#[derive(Debug)]
pub(crate) struct ReferencePools {
    k: Tensor,
    v: Option<Tensor>,
    layout: KvLayout,
}

impl CacheOps for ReferenceBackend {
    fn pools(
        &self,
        layout: KvLayout,
        num_blocks: usize,
        num_layers: usize,
    ) -> crate::Result<Vec<ReferencePools>> {
        (0..num_layers).map(|_| Ok(ReferencePools::new(self, layout, num_blocks)?)).collect()
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
    fn new(backend: &ReferenceBackend, layout: KvLayout, num_blocks: usize) -> Result<Self> {
        let KvLayout { dtype, block_size, num_kv_heads, head_dim, has_values } = layout;
        let dtype = match dtype {
            KvCacheDType::F16 => DType::F16,
            KvCacheDType::Bf16 => DType::BF16,
            KvCacheDType::F32 | KvCacheDType::Q8_0 | KvCacheDType::Fp8E4m3 => DType::F32,
        };
        let shape = (num_blocks * block_size, num_kv_heads * head_dim);
        let zeros = || Tensor::zeros(shape, dtype, backend.device());
        Ok(Self { k: zeros()?, v: has_values.then(zeros).transpose()?, layout })
    }

    /// Rounds keys and values, `[slots.len(), width]`, and writes them to their slots. Values are skipped if the cache
    /// has none.
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
            // Through f32: candle's conversion from f64 ignores low bits and mistakes a value near a tie for one.
            let rows = rows.to_dtype(DType::F32)?;
            let rows = match self.layout.dtype {
                KvCacheDType::Q8_0 => {
                    self.round_heads(backend, &rows, |head| head.chunks_mut(GROUP).for_each(round_group))?
                }
                KvCacheDType::Fp8E4m3 => {
                    let round = |value: &mut f32| *value = nearest_e4m3(*value);
                    self.round_heads(backend, &rows, |head| head.iter_mut().for_each(round))?
                }
                _ => rows.to_dtype(pool.dtype())?,
            };
            pool.scatter_set(&slots, &rows.contiguous()?, 0)?;
        }
        Ok(())
    }

    /// Heads of f32, each rounded.
    fn round_heads(
        &self,
        backend: &ReferenceBackend,
        rows: &Tensor,
        round: impl Fn(&mut [f32]),
    ) -> Result<Tensor> {
        let mut values: Vec<f32> = rows.flatten_all()?.to_vec1()?;
        values.chunks_exact_mut(self.layout.head_dim).for_each(round);
        Ok(Tensor::from_vec(values, rows.shape(), &Device::Cpu)?.to_device(backend.device())?)
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
        self.layout.block_size * pool.dims().last().copied().unwrap_or(0)
    }

    /// The values of a block in single precision, which represents those of all types.
    fn block_values(&self, pool: &Tensor, block: usize) -> Result<Vec<f32>> {
        let rows =
            pool.narrow(0, block * self.layout.block_size, self.layout.block_size)?.to_dtype(DType::F32)?;
        Ok(rows.flatten_all()?.to_device(&Device::Cpu)?.to_vec1()?)
    }

    fn set_block_values(&self, pool: &Tensor, block: usize, values: &[f32]) -> Result<()> {
        let rows = Tensor::from_slice(
            values,
            (self.layout.block_size, values.len() / self.layout.block_size),
            &Device::Cpu,
        )?;
        let rows = rows.to_dtype(pool.dtype())?.to_device(pool.device())?;
        Ok(pool.slice_set(&rows, 0, block * self.layout.block_size)?)
    }

    /// Copies the slots of a block to another.
    fn copy(&mut self, source: usize, target: usize) -> Result<()> {
        for pool in std::iter::once(&self.k).chain(&self.v) {
            let rows = pool.narrow(0, source * self.layout.block_size, self.layout.block_size)?.copy()?;
            pool.slice_set(&rows, 0, target * self.layout.block_size)?;
        }
        Ok(())
    }
}

/// Rounds values to integers up to 127 times the smallest scale in half precision that reaches the largest of them. A
/// group with NaN, or with values beyond every scale, becomes NaN.
fn round_group(values: &mut [f32]) {
    let is_finite = values.iter().all(|value| value.is_finite());
    let largest = values.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    let nearest = f16::from_f32(largest / 127.0);
    let is_below = nearest.to_f32() * 127.0 < largest;
    let scale = if is_below { f16::from_bits(nearest.to_bits() + 1) } else { nearest };
    let scale = if is_finite && scale.is_finite() { scale.to_f32() } else { f32::NAN };
    if scale != 0.0 {
        values.iter_mut().for_each(|value| *value = (*value / scale).round_ties_even() * scale);
    }
}

/// The nearest float with three bits after its leading one, of two equally near ones the even one. Steps are 2⁻⁹ at
/// least, magnitudes 448 at most. What is no number, or infinite, becomes NaN.
fn nearest_e4m3(value: f32) -> f32 {
    if !value.is_finite() {
        return f32::NAN;
    }
    let exponent = (value.to_bits() >> 23 & 0xFF) as i32 - 127;
    let step = 2_f32.powi(exponent.max(-6) - 3);
    ((value / step).round_ties_even() * step).clamp(-448.0, 448.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cpu::fp8::E4m3;

    #[test]
    fn eight_bits_are_those_of_the_kernels() {
        for bits in 0..=u16::MAX {
            let value = f16::from_bits(bits).to_f32();
            for value in [value, value.next_up(), value.next_down(), 7.7 * value] {
                let (own, kernels) = (nearest_e4m3(value), E4m3::from_f32(value).to_f32());
                assert!(own == kernels || own.is_nan() && kernels.is_nan(), "{value:e}: {own}, {kernels}");
            }
        }
        assert_eq!(
            [17.0, 19.0, 0.001, 464.1, -1e9].map(nearest_e4m3),
            [16.0, 20.0, 2.0 / 2048.0 * 2.0, 448.0, -448.0]
        );
    }

    fn rounded<const N: usize>(mut values: [f32; N]) -> [f32; N] {
        round_group(&mut values);
        values
    }

    #[test]
    fn groups_are_rounded_by_their_largest_value() {
        assert_eq!(rounded([127.0, -3.4, 3.5, 4.5, 0.0]), [127.0, -3.0, 4.0, 4.0, 0.0]);
        // 1/127 lies between two halves: the scale is the larger one.
        let scale = f16::from_bits(f16::from_f32(1.0 / 127.0).to_bits() + 1).to_f32();
        assert!(f16::from_f32(1.0 / 127.0).to_f32() * 127.0 < 1.0);
        assert_eq!(rounded([-1.0, 0.3]), [-127.0 * scale, (0.3 / scale).round() * scale]);
        assert_eq!(rounded([0.0, -0.0]), [0.0, 0.0]);
        // The smallest possible scales in halves: no value is clamped.
        let tiny = 100.0 * f16::from_bits(1).to_f32();
        assert_eq!(
            rounded([tiny, 0.6 * tiny]),
            [tiny, 0.6 * tiny].map(|value| {
                let unit = f16::from_bits(1).to_f32();
                (value / unit).round() * unit
            })
        );
    }

    #[test]
    fn what_no_scale_reaches_is_no_number() {
        let most = 65_504.0 * 127.0;
        assert_eq!(rounded([most, 1.0]), [most, 0.0]);
        for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, most * 1.001] {
            assert!(rounded([1.0, broken, 2.0]).iter().all(|value| value.is_nan()), "{broken}");
        }
    }
}
