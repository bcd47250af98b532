//! From the `.metal` files to modules for a GPU that runs CUDA. It needs clang and two files of the CUDA
//! toolkit, but no GPU, so what it makes can be carried to a machine that has nothing but the driver.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use tinyvllm::ops::gpu::LIBRARIES;
use tinyvllm::{Error, Result};

use crate::emulator::{Emulator, KernelUsage, usage_of_kernels};

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
        let mut all: BTreeMap<String, KernelUsage> = BTreeMap::new();
        for (set, module) in emulator.compile_cuda(library, toolkit)? {
            write(&format!("{}-{set}.cubin", library.name), &module.image)?;
            for (kernel, usage) in usage_of_kernels(&module.messages) {
                let most = all.entry(kernel).or_default();
                *most = KernelUsage {
                    registers: most.registers.max(usage.registers),
                    spills: most.spills.max(usage.spills),
                    stack: most.stack.max(usage.stack),
                    fixed: most.fixed.max(usage.fixed),
                };
            }
        }
        if all.is_empty() {
            return Err(Error::internal(format!("the assembler says nothing of {}", library.name)));
        }
        for (kernel, KernelUsage { registers, spills, stack, fixed }) in all {
            _ = writeln!(table, "{kernel:40} {registers:9} {spills:6} {stack:5} {fixed:6}");
        }
    }
    write("registers.txt", table.as_bytes())
}
