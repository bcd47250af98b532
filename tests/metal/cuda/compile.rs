//! From the `.metal` files to modules for a GPU that runs CUDA. It needs clang and two files of the CUDA
//! toolkit, but no GPU, so what it makes can be carried to a machine that has nothing but the driver.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use tinyvllm::ops::metal::{LIBRARIES, Library};
use tinyvllm::{Error, Result};

use crate::emulator::Emulator;

/// Makes modules for each library, `<name>-<set>.cubin` with the number of the set of its function constants;
/// and for all kernels `registers.txt`, with the largest numbers of all sets.
pub(super) fn compile(emulator: &Emulator, toolkit: &Path, folder: &Path) -> Result<()> {
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(|error| Error::internal(format!("{}: {error}", path.display())))
    };
    fs::create_dir_all(folder).map_err(|error| Error::internal(error.to_string()))?;
    let mut table =
        format!("{:40} {:>9} {:>6} {:>5} {:>6}\n", "kernel", "registers", "spills", "stack", "static");
    for library in LIBRARIES {
        let mut all = BTreeMap::new();
        for (set, module) in emulator.compile_cuda(library, toolkit)?.into_iter().enumerate() {
            write(&format!("{}-{set}.cubin", library.name), &module.image)?;
            usage(library, &module.messages, &mut all)?;
        }
        for (kernel, Usage { registers, spills, stack, fixed }) in all {
            _ = writeln!(table, "{kernel:40} {registers:9} {spills:6} {stack:5} {fixed:6}");
        }
    }
    write("registers.txt", table.as_bytes())
}

/// What a thread of a kernel takes: registers, and bytes that it spills and keeps on its stack; and bytes of
/// threadgroup memory that the kernel declares itself.
#[derive(Debug, Clone, Copy, Default)]
struct Usage {
    registers: usize,
    spills: usize,
    stack: usize,
    fixed: usize,
}

/// Adds what the assembler says of each kernel of a module.
fn usage(library: &Library, messages: &str, all: &mut BTreeMap<String, Usage>) -> Result<()> {
    let mut kernel = None;
    let mut usage = Usage::default();
    for line in messages.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function 'msl_") {
            kernel = rest.split('\'').next();
        } else if line.contains("bytes stack frame") {
            let numbers: Vec<usize> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            if let [frame, stores, loads] = numbers[..] {
                (usage.stack, usage.spills) = (frame, stores + loads);
            }
        } else if let Some((_, rest)) = line.split_once("Used ")
            && let Some(kernel) = kernel.take()
        {
            let before = |what: &str| -> usize {
                let end = rest.find(what).unwrap_or(0);
                rest[..end].split_whitespace().next_back().and_then(|word| word.parse().ok()).unwrap_or(0)
            };
            (usage.registers, usage.fixed) = (before(" registers"), before(" bytes smem"));
            let most = all.entry(kernel.to_owned()).or_default();
            *most = Usage {
                registers: most.registers.max(usage.registers),
                spills: most.spills.max(usage.spills),
                stack: most.stack.max(usage.stack),
                fixed: most.fixed.max(usage.fixed),
            };
        }
    }
    if all.is_empty() {
        return Err(Error::internal(format!("the assembler says nothing of {}:\n{messages}", library.name)));
    }
    Ok(())
}
