//! An engine with tiers whose times are made up, and a cache that notices wrong blocks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::tier::{Contents, Deliver, Fetch};
use super::*;
use crate::config::EngineConfig;
use crate::engine::{Event, ModelLimits, Request};
use crate::kv_cache::{BlockHash, BlockHasher, BlockId, Medium};
use crate::ops::cpu::CpuLevel;
use crate::ops::{Context, KvCacheDType};
use crate::runner::{Runner, SequenceOutput, Step};
use crate::sampling::{SampledToken, SamplingParams};
use crate::self_test::one_layer;
use crate::{Error, Result};

const BLOCK_SIZE: usize = 4;
const NUM_BLOCKS: usize = 32;
const VOCAB_SIZE: u32 = 1_000;

/// Keeps tokens in the blocks of a real cache, and gives a token that follows from all that it reads back.
struct TokenRunner {
    cache: KvCache,
    /// The time of a prompt token.
    token_time: Duration,
}

impl TokenRunner {
    fn tokens(&self, block: BlockId) -> Vec<u32> {
        let mut bytes = vec![0; self.cache.block_bytes()];
        self.cache.read_block(block.0, &mut bytes).unwrap();
        tokens_of(&bytes)
    }

    fn write(&mut self, block: BlockId, offset: usize, token_id: u32) {
        let mut bytes = vec![0; self.cache.block_bytes()];
        self.cache.read_block(block.0, &mut bytes).unwrap();
        bytes[4 * offset..4 * offset + 4].copy_from_slice(&token_id.to_le_bytes());
        self.cache.write_block(block.0, &bytes).unwrap();
    }
}

fn tokens_of(bytes: &[u8]) -> Vec<u32> {
    let numbers = bytes.chunks_exact(4).take(BLOCK_SIZE);
    numbers.map(|number| u32::from_le_bytes(number.try_into().unwrap())).collect()
}

impl Runner for TokenRunner {
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
        let mut outputs = Vec::new();
        for row in &step.sequences {
            assert!(row.copy.is_none() && step.num_steps == 1);
            for position in row.start..row.start + row.len {
                let block = row.block_table[position / BLOCK_SIZE];
                self.write(block, position % BLOCK_SIZE, row.token_ids[position]);
            }
            let read: Vec<u32> = row.block_table.iter().flat_map(|block| self.tokens(*block)).collect();
            let end = row.start + row.len;
            assert_eq!(read[..end], row.token_ids[..end], "a block has other tokens");
            let sum: u32 = read[..end].iter().fold(7, |sum, token| sum.wrapping_mul(31).wrapping_add(*token));
            let token = SampledToken { token_id: sum % VOCAB_SIZE, logprobs: None };
            outputs.push(SequenceOutput {
                samples: row.samples.iter().map(|_| vec![Some(token.clone())]).collect(),
                ..SequenceOutput::default()
            });
            std::thread::sleep(self.token_time * u32::try_from(row.len).unwrap());
        }
        Ok(outputs)
    }

    fn kv_cache(&mut self) -> Option<&mut KvCache> {
        Some(&mut self.cache)
    }
}

/// The name of the block before it, its tokens and its bytes.
type Block = (BlockHash, Vec<u32>, Vec<u8>);

/// A tier's contents and calls.
#[derive(Default)]
struct Shelf {
    blocks: Mutex<HashMap<BlockHash, Block>>,
    num_fetched: AtomicUsize,
    num_dropped: AtomicUsize,
    is_pending: AtomicBool,
    lines: Mutex<Vec<String>>,
}

struct MemoryTier {
    shelf: Arc<Shelf>,
    read_time: Duration,
    put_time: Duration,
    time_left: Option<Duration>,
    opened: Instant,
}

impl MemoryTier {
    fn new(shelf: &Arc<Shelf>, read_time: Duration, put_time: Duration) -> Self {
        Self { shelf: Arc::clone(shelf), read_time, put_time, time_left: None, opened: Instant::now() }
    }

    fn bytes(&self, block: &BlockKey) -> Option<Vec<u8>> {
        let blocks = self.shelf.blocks.lock().unwrap();
        let (parent, token_ids, bytes) = blocks.get(&block.hash)?;
        (*parent == block.parent && *token_ids == block.token_ids).then(|| bytes.clone())
    }
}

impl Tier for MemoryTier {
    fn medium(&self) -> Medium {
        Medium::Disk
    }

    fn is_ready(&self) -> bool {
        !self.is_pending()
    }

    fn is_pending(&self) -> bool {
        let is_over = self.time_left.is_some_and(|time| self.opened.elapsed() > time);
        self.shelf.is_pending.load(Ordering::Relaxed) && !is_over
    }

    fn time_left(&self) -> Option<Duration> {
        Some(self.time_left?.saturating_sub(self.opened.elapsed()))
    }

    fn num_readable(&self, blocks: &[BlockKey], start: usize) -> usize {
        blocks[start..].iter().take_while(|block| self.bytes(block).is_some()).count()
    }

    fn fetch(&mut self, blocks: Vec<BlockKey>, mut deliver: Deliver) -> Fetch {
        let contents: Vec<_> = blocks.iter().map(|block| self.bytes(block).unwrap()).collect();
        self.shelf.num_fetched.fetch_add(contents.len(), Ordering::Relaxed);
        let time = self.read_time;
        std::thread::spawn(move || {
            for bytes in contents {
                std::thread::sleep(time);
                deliver(Delivery::Block(Contents::Bytes(bytes), time));
            }
            deliver(Delivery::End);
        });
        Fetch::Comes
    }

    fn has(&self, block: &BlockKey) -> Option<bool> {
        Some(self.bytes(block).is_some())
    }

    fn num_free(&self) -> usize {
        usize::MAX
    }

    fn put(&mut self, blocks: Vec<(BlockId, BlockKey)>, cache: &mut KvCache) -> Result<()> {
        for (id, block) in blocks {
            let mut bytes = vec![vec![0; cache.block_bytes()]];
            cache.read_blocks(&[id.0], &mut bytes)?;
            let bytes = bytes.pop().ok_or_else(|| Error::internal("no bytes"))?;
            assert_eq!(tokens_of(&bytes), block.token_ids, "somebody else has the block");
            self.shelf.blocks.lock().unwrap().insert(block.hash, (block.parent, block.token_ids, bytes));
            std::thread::sleep(self.put_time);
        }
        Ok(())
    }

    fn count_dropped(&mut self, num_blocks: usize) {
        self.shelf.num_dropped.fetch_add(num_blocks, Ordering::Relaxed);
    }

    fn record_events(&mut self, _on_change: Box<dyn Fn() + Send>) {}

    fn take_events(&mut self, _hasher: &BlockHasher) -> Vec<CacheEvent> {
        Vec::new()
    }

    fn notice(&self, line: &str) {
        self.shelf.lines.lock().unwrap().push(line.to_owned());
    }

    fn report(&self, _stats: &mut EngineStats) {}
}

fn core(token_time: Duration) -> EngineCore {
    let config = EngineConfig {
        max_model_len: 120,
        max_num_seqs: 2,
        max_num_batched_tokens: 256,
        block_size: BLOCK_SIZE,
        num_blocks: NUM_BLOCKS,
        ..EngineConfig::default()
    };
    let context = Context::cpu(1, CpuLevel::detect());
    let cache =
        KvCache::new(&context, &one_layer(1, 1, 8), NUM_BLOCKS, BLOCK_SIZE, KvCacheDType::F32).unwrap();
    let limits = ModelLimits {
        vocab_size: VOCAB_SIZE as usize,
        eos_token_ids: Vec::new(),
        max_position_embeddings: 1_000,
        broken_logits_hint: None,
    };
    let mut core = EngineCore::new(Box::new(TokenRunner { cache, token_time }), limits, config).unwrap();
    core.keep_pace();
    core
}

fn request(seed: u32, len: u32) -> Request {
    let prompt = (0..len).map(|i| (seed * 101 + i * 7) % VOCAB_SIZE).collect();
    Request::new(prompt, SamplingParams { max_tokens: Some(3), ..SamplingParams::greedy() })
}

/// The answer, and the tokens of its prompt that were read.
fn answer(core: &mut EngineCore, request: Request) -> (Vec<u32>, usize) {
    core.submit(request).unwrap();
    let (mut tokens, mut num_restored) = (Vec::new(), 0);
    while core.has_unfinished() {
        for (_, event) in core.step() {
            match event {
                Event::Token { token_id, .. } => tokens.push(token_id),
                Event::Finished { stats, error, .. } => {
                    assert_eq!(error, None);
                    num_restored = stats.num_disk_tokens;
                }
                _ => {}
            }
        }
        assert_eq!(core.check_integrity(), Ok(()));
    }
    (tokens, num_restored)
}

/// Fills the cache with something else.
fn evict(core: &mut EngineCore) {
    [50, 51].into_iter().for_each(|seed| drop(answer(core, request(seed, 100))));
}

#[test]
fn what_is_read_slowly_is_computed_but_for_a_trial() {
    let shelf = Arc::new(Shelf::default());
    let mut core = core(Duration::from_micros(20));
    let tier = MemoryTier::new(&shelf, Duration::from_millis(20), Duration::ZERO);
    core.add_tier(Box::new(tier), 1e-9, [1e-6, 0.0]);
    let wanted = answer(&mut core, request(1, 80)).0;
    evict(&mut core);
    // The estimate is wrong, and so this is read.
    assert_eq!(answer(&mut core, request(1, 80)), (wanted.clone(), 76));
    let num_fetched = shelf.num_fetched.load(Ordering::Relaxed);
    for _ in 0..3 {
        evict(&mut core);
        assert_eq!(answer(&mut core, request(1, 80)), (wanted.clone(), 0));
    }
    assert_eq!(shelf.num_fetched.load(Ordering::Relaxed), num_fetched, "30 seconds are not over");
    let lines = shelf.lines.lock().unwrap();
    assert!(lines.iter().any(|line| line.contains("are computed and not read")), "{lines:?}");
}

#[test]
fn a_wrong_first_estimate_is_tried_with_a_few_blocks() {
    let shelf = Arc::new(Shelf::default());
    let mut core = core(Duration::from_micros(500));
    let tier = MemoryTier::new(&shelf, Duration::ZERO, Duration::ZERO);
    core.add_tier(Box::new(tier), 0.1, [1e-6, 0.0]);
    let wanted = answer(&mut core, request(1, 80)).0;
    evict(&mut core);
    let num_tried = price::TRIAL_BLOCKS;
    assert_eq!(answer(&mut core, request(1, 80)), (wanted.clone(), num_tried * BLOCK_SIZE));
    evict(&mut core);
    assert_ne!(answer(&mut core, request(1, 80)).1, num_tried * BLOCK_SIZE, "one trial is enough for now");
}

/// Whether the host waits for copies, or the device does them later.
#[test]
fn what_is_kept_is_copied_a_little_at_a_time_and_all_in_the_end() {
    for (host, device) in [(2, 0), (0, 2)] {
        is_kept_a_little_at_a_time(Duration::from_millis(host), Duration::from_millis(device));
    }
}

fn is_kept_a_little_at_a_time(host: Duration, device: Duration) {
    let shelf = Arc::new(Shelf::default());
    let mut core = core(Duration::ZERO);
    let copying = [host, device].map(|time| time.as_secs_f64());
    core.add_tier(Box::new(MemoryTier::new(&shelf, Duration::ZERO, host)), 1e-6, copying);
    core.submit(request(1, 100)).unwrap();
    core.step();
    let num_kept = || shelf.blocks.lock().unwrap().len();
    assert!((1..=3).contains(&num_kept()), "{}", num_kept());
    while core.has_unfinished() {
        core.step();
    }
    assert_eq!((num_kept(), shelf.num_dropped.load(Ordering::Relaxed)), (25, 0));
}

#[test]
fn what_is_evicted_before_its_turn_is_not_kept() {
    let shelf = Arc::new(Shelf::default());
    let mut core = core(Duration::ZERO);
    let put_time = Duration::from_millis(2);
    core.add_tier(
        Box::new(MemoryTier::new(&shelf, Duration::ZERO, put_time)),
        1e-6,
        [put_time.as_secs_f64(), 0.0],
    );
    // One after the other, without a rest.
    for seed in 0..6 {
        core.submit(request(seed, 100)).unwrap();
    }
    while core.has_unfinished() {
        core.step();
        assert_eq!(core.check_integrity(), Ok(()));
    }
    let num_kept = shelf.blocks.lock().unwrap().len();
    let num_dropped = shelf.num_dropped.load(Ordering::Relaxed);
    assert!(num_dropped > 0 && num_kept > 0);
    assert_eq!(num_kept + num_dropped, 6 * 25);
}

#[test]
fn an_end_before_a_tier_is_ready_waits_shortly_or_is_reported() {
    for (time_left, num_kept) in
        [(Some(Duration::from_millis(300)), 25), (Some(Duration::from_secs(9)), 0), (None, 0)]
    {
        let shelf = Arc::new(Shelf::default());
        shelf.is_pending.store(true, Ordering::Relaxed);
        let mut core = core(Duration::ZERO);
        let tier = MemoryTier::new(&shelf, Duration::ZERO, Duration::ZERO);
        core.add_tier(Box::new(MemoryTier { time_left, ..tier }), 1e-6, [1e-6, 0.0]);
        let start = Instant::now();
        answer(&mut core, request(1, 100));
        assert!(start.elapsed() < Duration::from_secs(3));
        assert_eq!(shelf.blocks.lock().unwrap().len(), num_kept, "{time_left:?}");
        let lines = shelf.lines.lock().unwrap();
        assert_eq!(lines.len(), usize::from(num_kept == 0), "{lines:?}");
        assert!(lines.iter().all(|line| line.contains("25 blocks of prefixes are not kept")), "{lines:?}");
    }
}

#[test]
fn a_prefix_may_come_from_several_tiers() {
    let shelves = [Arc::new(Shelf::default()), Arc::new(Shelf::default())];
    let mut core = core(Duration::from_micros(500));
    for shelf in &shelves {
        core.add_tier(Box::new(MemoryTier::new(shelf, Duration::ZERO, Duration::ZERO)), 1e-9, [1e-6, 0.0]);
    }
    let wanted = answer(&mut core, request(1, 80)).0;
    evict(&mut core);
    // The first tier has the beginning, the other one the rest.
    let names = {
        let blocks = shelves[0].blocks.lock().unwrap();
        let child =
            |parent: &BlockHash| blocks.iter().find(|(_, block)| block.0 == *parent).map(|found| *found.0);
        let tokens: Vec<u32> = request(1, 80).prompt_token_ids[..BLOCK_SIZE].to_vec();
        let first = blocks.iter().find(|(_, block)| block.1 == tokens).map(|(name, _)| *name);
        std::iter::successors(first, child).take(19).collect::<Vec<_>>()
    };
    shelves[0].blocks.lock().unwrap().retain(|name, _| !names[8..].contains(name));
    shelves[1].blocks.lock().unwrap().retain(|name, _| !names[..8].contains(name));
    let before = shelves.each_ref().map(|shelf| shelf.num_fetched.load(Ordering::Relaxed));
    assert_eq!(answer(&mut core, request(1, 80)), (wanted, 76));
    let fetched = shelves.each_ref().map(|shelf| shelf.num_fetched.load(Ordering::Relaxed));
    assert_eq!([fetched[0] - before[0], fetched[1] - before[1]], [8, 11]);
}

/// Two sequences that do not fit together: blocks that one releases are not computed again.
#[test]
fn a_preempted_sequence_finds_its_blocks() {
    let requests = || {
        [1, 2].map(|seed| {
            let params = SamplingParams { max_tokens: Some(60), ..SamplingParams::greedy() };
            Request { params, ..request(seed, 48) }
        })
    };
    let mut alone = core(Duration::ZERO);
    let wanted = requests().map(|request| answer(&mut alone, request).0);
    let shelf = Arc::new(Shelf::default());
    let mut core = core(Duration::from_micros(500));
    core.add_tier(Box::new(MemoryTier::new(&shelf, Duration::ZERO, Duration::ZERO)), 1e-9, [1e-6, 0.0]);
    let ids = requests().map(|request| core.submit(request).unwrap());
    let mut tokens = [Vec::new(), Vec::new()];
    while core.has_unfinished() {
        for (id, event) in core.step() {
            if let Event::Token { token_id, .. } = event {
                tokens[usize::from(id == ids[1])].push(token_id);
            }
        }
        assert_eq!(core.check_integrity(), Ok(()));
    }
    assert_eq!(tokens, wanted);
    let stats = core.stats();
    assert!(stats.scheduler.num_preemptions > 0);
    // The cache was empty when they arrived.
    assert!(stats.num_external_hits > 0, "{stats:?}");
}
