//! The keys and values of a layer in the host's memory, which the system allocates on the first write.

use memmap2::MmapMut;

use super::CpuBackend;
use super::paged_cache::{CachePools, CachePoolsMut, KvLayout};
use crate::Result;
use crate::ops::kv_cache::{CacheOps, DevicePools, no_memory};

/// The blocks of a layer.
#[derive(Debug)]
pub(crate) struct CpuPools {
    layout: KvLayout,
    k: MmapMut,
    /// None if the values are the first ones of the keys.
    v: Option<MmapMut>,
}

impl CpuPools {
    /// The view for kernels that read.
    pub(crate) fn view(&self) -> CachePools<'_> {
        CachePools { layout: self.layout, k: &self.k, v: self.v.as_deref() }
    }

    /// The view for kernels that write.
    pub(crate) fn view_mut(&mut self) -> CachePoolsMut<'_> {
        CachePoolsMut { layout: self.layout, k: &mut self.k, v: self.v.as_deref_mut() }
    }
}

impl DevicePools for CpuPools {
    fn copy_block(&mut self, source: usize, target: usize) -> Result<()> {
        let copy = |pool: &mut MmapMut, len: usize| {
            pool.copy_within(source * len..(source + 1) * len, target * len);
        };
        copy(&mut self.k, self.layout.k_block_bytes());
        if let Some(v) = &mut self.v {
            copy(v, self.layout.v_block_bytes());
        }
        Ok(())
    }

    fn block_bytes(&self) -> usize {
        self.layout.block_bytes()
    }

    fn read_block(&self, block: usize, bytes: &mut [u8]) -> Result<()> {
        let k_len = self.layout.k_block_bytes();
        let (k, v) = bytes.split_at_mut(k_len);
        k.copy_from_slice(&self.k[block * k_len..][..k_len]);
        if let Some(values) = &self.v {
            v.copy_from_slice(&values[block * v.len()..][..v.len()]);
        }
        Ok(())
    }

    fn write_block(&mut self, block: usize, bytes: &[u8]) -> Result<()> {
        let k_len = self.layout.k_block_bytes();
        let (k, v) = bytes.split_at(k_len);
        self.k[block * k_len..][..k_len].copy_from_slice(k);
        if let Some(values) = &mut self.v {
            values[block * v.len()..][..v.len()].copy_from_slice(v);
        }
        Ok(())
    }
}

impl CacheOps for CpuBackend {
    fn pools(&self, layout: KvLayout, num_blocks: usize, num_layers: usize) -> Result<Vec<CpuPools>> {
        let map = |block_bytes: usize| {
            MmapMut::map_anon(block_bytes * num_blocks)
                .map_err(|error| no_memory(num_blocks, layout.block_size, error))
        };
        let layer = |_| {
            let v = layout.has_values.then(|| map(layout.v_block_bytes())).transpose()?;
            Ok(CpuPools { layout, k: map(layout.k_block_bytes())?, v })
        };
        (0..num_layers).map(layer).collect()
    }
}
