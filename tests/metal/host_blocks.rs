//! Blocks of a GPU's cache in memory of the host, for the emulated GPU and for real ones.

use std::sync::Arc;

use tinyvllm::ErrorKind;
use tinyvllm::ops::gpu::Gpu;
use tinyvllm::ops::{Context, KvCache, KvCacheDType};
use tinyvllm::self_test::one_layer;

/// A cache of three layers, and the bytes of a block by a number.
fn cache(gpu: &Arc<dyn Gpu>, num_blocks: usize, dtype: KvCacheDType) -> (KvCache, impl Fn(usize) -> Vec<u8>) {
    let context = Context::gpu(Arc::clone(gpu));
    let mut config = one_layer(4, 4, 128);
    config.num_layers = 3;
    let cache = KvCache::new(&context, &config, num_blocks, 32, dtype).unwrap();
    let block_bytes = cache.block_bytes();
    let words = move |number: usize| (0..block_bytes / 8).map(move |i| (number << 32 | i) as u64);
    (cache, move |number| words(number).flat_map(u64::to_le_bytes).collect())
}

/// Copies see earlier work, and later work does not change them.
pub(crate) fn copies_are_in_order(gpu: &Arc<dyn Gpu>) {
    [KvCacheDType::F32, KvCacheDType::F16, KvCacheDType::Q8_0, KvCacheDType::Fp8E4m3]
        .into_iter()
        .for_each(|dtype| copies_of_a_type_are_in_order(gpu, dtype));
}

fn copies_of_a_type_are_in_order(gpu: &Arc<dyn Gpu>, dtype: KvCacheDType) {
    let (mut cache, bytes) = cache(gpu, 3, dtype);
    let host = cache.host_allocator().unwrap()(2).unwrap();
    cache.write_block(0, &bytes(1)).unwrap();
    cache.copy_block(0, 1).unwrap();
    cache.copy_out(1, &host, 1).unwrap();
    cache.write_block(1, &bytes(2)).unwrap();
    cache.copy_out(1, &host, 0).unwrap();
    cache.copy_in(2, &host, 1).unwrap();
    // Slots are written again after the copies that read them.
    cache.copy_out(1, &host, 1).unwrap();
    cache.copy_in(0, &host, 0).unwrap();
    let mut found = vec![vec![0; cache.block_bytes()]; 3];
    cache.read_blocks(&[0, 1, 2], &mut found).unwrap();
    assert!(found[0] == bytes(2) && found[1] == bytes(2) && found[2] == bytes(1));
    for copied in [cache.copy_out(3, &host, 0), cache.copy_out(0, &host, 2), cache.copy_in(0, &host, 2)] {
        assert_eq!(copied.unwrap_err().kind(), ErrorKind::Internal);
    }
}

/// Also more than are read at once, in any order and after work that has only been queued.
pub(crate) fn many_are_read_exactly(gpu: &Arc<dyn Gpu>) {
    const NUM_BLOCKS: usize = 70;
    let (mut cache, bytes) = cache(gpu, NUM_BLOCKS + 1, KvCacheDType::F32);
    let host = cache.host_allocator().unwrap()(NUM_BLOCKS).unwrap();
    for block in 0..NUM_BLOCKS {
        cache.write_block(0, &bytes(block)).unwrap();
        cache.copy_block(0, 1 + block as u32).unwrap();
        cache.copy_out(1 + block as u32, &host, block).unwrap();
    }
    let order: Vec<usize> = (0..NUM_BLOCKS).map(|i| i * 29 % NUM_BLOCKS).collect();
    let blocks: Vec<u32> = order.iter().map(|block| 1 + *block as u32).collect();
    for round in 0..2 {
        let mut found = vec![vec![0; cache.block_bytes()]; NUM_BLOCKS];
        cache.read_blocks(&blocks, &mut found).unwrap();
        for (block, found) in order.iter().zip(&found) {
            assert!(*found == bytes(*block), "block {block} in round {round}");
        }
        // The second round copies saved blocks back over other contents.
        for block in 0..NUM_BLOCKS {
            cache.copy_block(0, 1 + block as u32).unwrap();
            cache.copy_in(1 + block as u32, &host, block).unwrap();
        }
    }
}
