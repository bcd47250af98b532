//! The thread that reads blocks and checks them.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::directory::touch;
use super::name::BlockName;
use super::pack::PackFault;
use super::{Shared, file_name};

/// A block to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub name: BlockName,
    /// The name of the block before it, or of the empty prefix.
    pub parent: BlockName,
    /// Of its tokens those that are computed in groups of a prompt.
    pub num_grouped: usize,
    /// Whether the prefix has a salt.
    pub is_salted: bool,
    /// The bytes of a block.
    pub token_ids: Vec<u32>,
}

/// A result of a fetch.
#[derive(Debug, PartialEq, Eq)]
pub enum Fetched {
    /// The bytes of the next block, and the time of reading and verifying them.
    Block(Vec<u8>, Duration),
    /// The end: all blocks were delivered, or one could not be read.
    End,
}

/// Blocks that a request waits for.
pub(super) struct FetchJob {
    pub(super) wanted: Vec<Wanted>,
    pub(super) deliver: Box<dyn FnMut(Fetched) -> bool + Send>,
}

/// Serves until all senders are gone.
pub(super) fn run(shared: &Arc<Shared>, jobs: &Receiver<FetchJob>) {
    for FetchJob { wanted, mut deliver } in jobs {
        let mut open = None;
        for block in &wanted {
            if shared.is_closed() {
                break;
            }
            let start = Instant::now();
            let Some(bytes) = read(shared, block, &mut open) else { break };
            if !deliver(Fetched::Block(bytes, start.elapsed())) {
                break;
            }
        }
        deliver(Fetched::End);
    }
}

/// The bytes of a block, if it exists and is verified.
fn read(shared: &Shared, block: &Wanted, open: &mut Option<(PathBuf, File)>) -> Option<Vec<u8>> {
    let location = shared.shelf.location(block.name)?;
    let (pack, path) = (&location.pack.index, &location.pack.path);
    let record = &pack.records[location.index];
    let is_same = record.token_ids == block.token_ids
        && record.parent == block.parent
        && record.num_grouped as usize == block.num_grouped
        && record.is_salted == block.is_salted;
    let bytes = match is_same {
        false => Err(PackFault::Damaged),
        true => open_pack(path, open)
            .and_then(|file| pack.read_block(file, location.index, &shared.directory.secret)),
    };
    match bytes {
        Ok(bytes) => {
            shared.count(|counters| &counters.read_blocks, 1);
            shared.count(|counters| &counters.read_bytes, bytes.len() as u64);
            Some(bytes)
        }
        Err(fault) => {
            *open = None;
            shared.count(|counters| &counters.failed_reads, 1);
            // Its other blocks may be as damaged; and so there is one line.
            shared.shelf.drop_blocks(path);
            let is_gone = matches!(&fault, PackFault::Io(error) if error.kind() == io::ErrorKind::NotFound);
            if !is_gone {
                shared.notice(&format!("{} is ignored from now on: {fault}", file_name(path)));
            }
            None
        }
    }
}

/// Opens a pack, if it is not the one that is open, and notes that it is used.
fn open_pack<'a>(path: &PathBuf, open: &'a mut Option<(PathBuf, File)>) -> Result<&'a mut File, PackFault> {
    let file = match open.take().filter(|(open, _)| open == path) {
        Some((_, file)) => file,
        None => {
            let file = File::open(path)?;
            touch(&file);
            file
        }
    };
    Ok(&mut open.insert((path.clone(), file)).1)
}
