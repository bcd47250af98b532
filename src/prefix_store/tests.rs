//! Packs, directories and the store as a whole: reads return the written blocks or a miss, for every change of the
//! files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use proptest::prelude::*;

use super::name::Secret;
use super::pack::{PackIndex, PackShape, PackWriter};
use super::*;

const BLOCK_SIZE: usize = 4;
const BLOCK_BYTES: usize = 96;

/// Small numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }
}

fn block(namer: &Namer, parent: BlockName, seed: u32) -> NewBlock {
    let token_ids: Vec<u32> = (0..BLOCK_SIZE as u32).map(|i| seed * 31 + i).collect();
    let bytes = (0..BLOCK_BYTES).map(|i| (seed as usize * 7 + i * 13) as u8).collect();
    let name = namer.child(parent, &token_ids, 2);
    NewBlock { name, parent, num_grouped: 2, is_salted: false, token_ids, bytes }
}

fn chain(namer: &Namer, len: u32) -> Vec<NewBlock> {
    let mut parent = namer.root(None);
    let next = |seed| {
        let block = block(namer, parent, seed);
        parent = block.name;
        block
    };
    (1..=len).map(next).collect()
}

fn wanted(block: &NewBlock) -> Wanted {
    let NewBlock { name, parent, num_grouped, is_salted, token_ids, .. } = block.clone();
    Wanted { name, parent, num_grouped, is_salted, token_ids }
}

struct Opened {
    store: PrefixStore,
    notices: Arc<Mutex<Vec<String>>>,
}

impl Opened {
    fn new(path: &Path, max_bytes: u64, model: u8) -> Self {
        let notices = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&notices);
        let options = StoreOptions {
            directory: path.to_owned(),
            max_bytes,
            reads_always: false,
            on_notice: Arc::new(move |line| heard.lock().unwrap().push(line.to_owned())),
        };
        let fingerprint = move |_: &FingerprintBuilder| Some(Fingerprint([model; 32]));
        let store = PrefixStore::open(&options, BLOCK_SIZE, BLOCK_BYTES, fingerprint).unwrap();
        let start = Instant::now();
        while store.namer().is_none() && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Self { store, notices }
    }

    fn namer(&self) -> Namer {
        *self.store.namer().unwrap()
    }

    /// Waits until this many of these can be read.
    fn wait_for(&self, blocks: &[NewBlock], num_readable: usize) {
        let names: Vec<BlockName> = blocks.iter().map(|block| block.name).collect();
        let start = Instant::now();
        while self.store.num_readable(&names) != num_readable {
            assert!(start.elapsed() < Duration::from_secs(20), "{}", self.store.num_readable(&names));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn read(&self, blocks: &[NewBlock]) -> Vec<Vec<u8>> {
        let (sender, receiver) = channel();
        let deliver = move |fetched| sender.send(fetched).is_ok();
        assert!(self.store.fetch(blocks.iter().map(wanted).collect(), deliver));
        let bytes = |fetched| match fetched {
            Fetched::Block(bytes, _) => Some(bytes),
            Fetched::End => None,
        };
        receiver.into_iter().map_while(bytes).collect()
    }
}

fn packs(path: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "pack")).collect()
}

fn write(path: &Path, num_blocks: u32) -> Vec<NewBlock> {
    let opened = Opened::new(path, 1 << 20, 1);
    let blocks = chain(&opened.namer(), num_blocks);
    blocks.iter().for_each(|block| opened.store.put(block.clone()));
    blocks
}

#[test]
fn a_second_store_reads_what_the_first_has_written() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = write(folder.path(), 5);
    let opened = Opened::new(folder.path(), 1 << 20, 1);
    opened.wait_for(&blocks, 5);
    assert!(opened.read(&blocks).iter().eq(blocks.iter().map(|block| &block.bytes)));
    assert_eq!(opened.store.stats().num_read_blocks, 5);
    // Existing blocks are not written again.
    blocks.iter().for_each(|block| opened.store.put(block.clone()));
    drop(opened);
    assert_eq!(packs(folder.path()).len(), 1);
    let other = Opened::new(folder.path(), 1 << 20, 2);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(other.store.stats().num_packs, 0, "another model");
    assert_ne!(chain(&other.namer(), 1)[0].name, blocks[0].name);
}

#[test]
fn a_block_is_found_by_all_that_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = write(folder.path(), 2);
    let changes: [fn(&mut NewBlock); 4] = [
        |block| block.token_ids[0] += 1,
        |block| block.parent = block.name,
        |block| block.num_grouped += 1,
        |block| block.is_salted = true,
    ];
    for change in changes {
        let opened = Opened::new(folder.path(), 1 << 20, 1);
        opened.wait_for(&blocks, 2);
        let mut other = blocks[0].clone();
        change(&mut other);
        assert!(opened.read(&[other]).is_empty());
    }
    let namer = Opened::new(folder.path(), 1 << 20, 1).namer();
    let roots = [namer.root(None), namer.root(Some("")), namer.root(Some("a")), namer.root(Some("b"))];
    let other = Namer { secret: Secret::new([9; 32]), ..namer };
    for (index, root) in roots.iter().enumerate() {
        assert!(!roots[..index].contains(root));
        assert_ne!(other.root(None), *root);
    }
    assert_ne!(namer.child(roots[0], &[1, 2, 3, 4], 0), namer.child(roots[0], &[1, 2, 3, 4], 1));
}

#[cfg(unix)]
#[test]
fn the_folder_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/cache");
    write(&path, 1);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    for file in fs::read_dir(&path).unwrap() {
        assert_eq!(file.unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}

#[test]
fn a_folder_of_something_else_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("thesis.txt"), "text").unwrap();
    let error = Directory::open(folder.path(), 1).unwrap_err().to_string();
    assert!(error.contains("none is the secret of a cache"), "{error}");
    assert!(inspect_directory(folder.path(), false).is_err());
    assert!(clear_directory(folder.path()).is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn the_least_recently_used_packs_go_first_and_the_limit_holds() {
    let folder = tempfile::tempdir().unwrap();
    let limit = 4_096;
    let mut first = Vec::new();
    for round in 0..30_u32 {
        let opened = Opened::new(folder.path(), limit, 1);
        let namer = opened.namer();
        let block = block(&namer, namer.root(None), 100 + round);
        opened.store.put(block.clone());
        if round == 0 {
            first.push(block);
        } else {
            opened.wait_for(&first, 1);
            assert_eq!(opened.read(&first), [first[0].bytes.clone()], "it is used all the time");
        }
        drop(opened);
        let files = fs::read_dir(folder.path()).unwrap();
        let total: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
        assert!(total <= limit + pack_bytes(limit), "{total} bytes");
        // Times of files may be coarse.
        std::thread::sleep(Duration::from_millis(12));
    }
    assert!(packs(folder.path()).len() < 20);
}

#[test]
fn what_dead_processes_left_is_removed_and_what_living_ones_write_is_not() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 1);
    let directory = Directory::open(folder.path(), 1 << 20).unwrap();
    let own = directory.unfinished_path();
    let old = folder.path().join("4194305-0-0.unfinished");
    let unnamed = folder.path().join("x.unfinished");
    [&own, &old, &unnamed].iter().for_each(|path| fs::write(path, "begun").unwrap());
    let age = |path: &Path, seconds| {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
    };
    directory.evict_packs(0).unwrap();
    assert!(
        own.exists() && old.exists() && unnamed.exists(),
        "a process that is not visible from here may write"
    );
    [&own, &old, &unnamed].iter().for_each(|path| age(path, 10));
    directory.evict_packs(0).unwrap();
    assert!(own.exists() && !unnamed.exists());
    assert_eq!(old.exists(), cfg!(not(unix)));
    age(&own, 7_200);
    directory.evict_packs(0).unwrap();
    assert!(!own.exists(), "no process writes for this long");
}

#[test]
fn a_directory_that_cannot_be_written_costs_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    let opened = Opened::new(&path, 1 << 20, 1);
    let blocks = chain(&opened.namer(), 3);
    // Works for the superuser, too.
    fs::remove_dir_all(&path).unwrap();
    for block in &blocks {
        opened.store.put(block.clone());
    }
    let start = Instant::now();
    while opened.store.stats().num_dropped_blocks < 3 && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(opened.store.stats().num_dropped_blocks, 3);
    assert_eq!(opened.notices.lock().unwrap().len(), 1, "{:?}", opened.notices);
    assert!(opened.read(&blocks).is_empty());
}

#[test]
fn packs_of_another_process_are_found_and_removed_ones_are_misses() {
    let folder = tempfile::tempdir().unwrap();
    let late = Opened::new(folder.path(), 1 << 20, 1);
    let blocks = write(folder.path(), 3);
    late.wait_for(&blocks, 3);
    assert_eq!(late.read(&blocks).len(), 3);
    assert_eq!(clear_directory(folder.path()).unwrap().0, 1);
    assert!(late.read(&blocks).is_empty());
    assert!(late.notices.lock().unwrap().is_empty(), "{:?}", late.notices);
}

#[test]
fn the_hash_of_a_file_is_kept_and_follows_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join("weights");
    let cache = folder.path().join("cache");
    let opened = Opened::new(&cache, 1 << 20, 1);
    let parts = FingerprintBuilder::new(&opened.store.shared);
    let loaded = |path: &Path| -> LoadedFile {
        let metadata = fs::metadata(path).unwrap();
        (path.to_owned(), metadata.len(), metadata.modified().ok())
    };
    fs::write(&weights, vec![1; 9 << 20]).unwrap();
    let file = loaded(&weights);
    let first = parts.fingerprint(std::slice::from_ref(&file), &[b"a"]).unwrap();
    let kept = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path());
    let kept: Vec<PathBuf> =
        kept.filter(|path| path.extension().is_some_and(|end| end == "weights")).collect();
    assert_eq!(kept.len(), 1);
    assert_eq!(parts.fingerprint(std::slice::from_ref(&file), &[b"a"]), Some(first));
    assert_ne!(parts.fingerprint(std::slice::from_ref(&file), &[b"b"]), Some(first));
    // Remembered hashes are used under the secret only.
    fs::write(&kept[0], [7; 64]).unwrap();
    assert_eq!(parts.fingerprint(std::slice::from_ref(&file), &[b"a"]), Some(first));
    let copy = folder.path().join("copy");
    fs::copy(&weights, &copy).unwrap();
    assert_eq!(parts.fingerprint(&[loaded(&copy)], &[b"a"]), Some(first), "it is the content that counts");
    let mut bytes = vec![1; 9 << 20];
    bytes[8 << 20] = 2;
    fs::write(&weights, bytes).unwrap();
    assert_ne!(parts.fingerprint(&[loaded(&weights)], &[b"a"]), Some(first));
    fs::write(&weights, [1; 5]).unwrap();
    assert_eq!(parts.fingerprint(&[file], &[b"a"]), None, "it is not what was loaded");
    assert!(opened.notices.lock().unwrap()[0].contains("has changed"));
}

/// A change of a file: its offset and its kind.
fn break_file(bytes: &mut Vec<u8>, random: &mut Random) {
    let len = bytes.len() as u64;
    let at = random.below(len) as usize;
    match random.below(7) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes.truncate(at),
        2 => bytes.extend((0..1 + random.below(300)).map(|_| 7)),
        3 => bytes[at..].fill(0),
        // The numbers of the header.
        4 => bytes[8 + random.below(24) as usize] = random.below(256) as u8,
        5 => {
            let number = if random.below(2) == 0 { u32::MAX } else { random.below(1 << 32) as u32 };
            let field = 8 + 4 * random.below(6) as usize;
            bytes[field..field + 4].copy_from_slice(&number.to_le_bytes());
        }
        _ => {
            let from = random.below(len) as usize;
            let len = random.below(200).min(len - at.max(from) as u64) as usize;
            bytes.copy_within(from..from + len, at);
        }
    }
}

#[test]
fn ten_thousand_faults_give_no_wrong_byte() {
    let folder = tempfile::tempdir().unwrap();
    let secret = Secret::new([3; 32]);
    let shape = PackShape {
        fingerprint: Fingerprint([5; 32]),
        block_size: BLOCK_SIZE as u32,
        block_bytes: BLOCK_BYTES as u64,
    };
    let namer = Namer { secret, fingerprint: shape.fingerprint };
    let blocks = chain(&namer, 6);
    let mut writer = PackWriter::create(folder.path().join("good"), shape, secret).unwrap();
    for block in &blocks {
        let Wanted { name, parent, num_grouped, is_salted, token_ids } = wanted(block);
        let record = BlockRecord { name, parent, num_grouped: num_grouped as u32, is_salted, token_ids };
        writer.append(&record, &block.bytes).unwrap();
    }
    let num_bytes = writer.num_bytes();
    writer.finish().unwrap();
    let good = fs::read(folder.path().join("good")).unwrap();
    assert_eq!(good.len() as u64, num_bytes);
    let path = folder.path().join("broken");
    let mut random = Random(1);
    let (mut num_refused, mut num_missed, mut num_right) = (0, 0, 0);
    for _ in 0..10_000 {
        let mut bytes = good.clone();
        break_file(&mut bytes, &mut random);
        fs::write(&path, &bytes).unwrap();
        let mut file = fs::File::open(&path).unwrap();
        let Ok(index) = PackIndex::read(&mut file, &secret) else {
            num_refused += 1;
            continue;
        };
        // Every block that is accepted equals the written one.
        assert_eq!((index.shape, index.records.len()), (shape, blocks.len()));
        for (at, block) in blocks.iter().enumerate() {
            assert_eq!(
                (index.records[at].name, &index.records[at].token_ids),
                (block.name, &block.token_ids)
            );
            match index.read_block(&mut file, at, &secret) {
                Ok(read) => {
                    assert!(read == block.bytes);
                    num_right += 1;
                }
                Err(_) => num_missed += 1,
            }
        }
    }
    assert!(
        num_refused > 1_000 && num_missed > 500 && num_right > 500,
        "{num_refused} {num_missed} {num_right}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// A store over files that are damaged after its scan, or before.
    #[test]
    fn a_store_over_broken_files_gives_right_blocks_or_none(seed in 0_u64..u64::MAX, before in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let blocks = write(folder.path(), 4);
        let path = packs(folder.path()).remove(0);
        let breaking = || {
            let mut bytes = fs::read(&path).unwrap();
            break_file(&mut bytes, &mut Random(seed));
            fs::write(&path, bytes).unwrap();
        };
        if before {
            breaking();
        }
        let opened = Opened::new(folder.path(), 1 << 20, 1);
        if !before {
            opened.wait_for(&blocks, 4);
            breaking();
        }
        for (read, block) in opened.read(&blocks).iter().zip(&blocks) {
            prop_assert!(*read == block.bytes);
        }
        // It continues, and writes missing blocks.
        blocks.iter().for_each(|block| opened.store.put(block.clone()));
        prop_assert!(opened.notices.lock().unwrap().len() <= 2);
    }

    #[test]
    fn any_bytes_are_refused_as_a_pack(mut bytes in proptest::collection::vec(any::<u8>(), 0..400), is_marked in any::<bool>()) {
        if is_marked && bytes.len() > 12 {
            bytes[..12].copy_from_slice(b"tvprefix\x01\0\0\0");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("any");
        fs::write(&path, bytes).unwrap();
        let read = PackIndex::read(&mut fs::File::open(&path).unwrap(), &Secret::new([3; 32]));
        prop_assert!(read.is_err());
    }
}
