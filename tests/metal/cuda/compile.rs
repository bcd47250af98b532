//! From the `.metal` files to modules for a GPU that runs CUDA. It needs clang and two files of the CUDA
//! toolkit, but no GPU, so what it makes can be carried to a machine that has nothing but the driver.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use tinyvllm::ops::metal::{LIBRARIES, Library};
use tinyvllm::{Error, Result};

use crate::emulator::Emulator;

/// Makes for each library a module, `<name>.cubin`, and the list of its function constants, `<name>.constants`;
/// and for all of them `registers.txt`.
pub(super) fn compile(emulator: &Emulator, toolkit: &Path, folder: &Path) -> Result<()> {
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|error| Error::internal(format!("{}: {error}", path.display())))
    };
    fs::create_dir_all(folder).map_err(|error| Error::internal(error.to_string()))?;
    let mut table =
        format!("{:40} {:>9} {:>6} {:>5} {:>6}\n", "kernel", "registers", "spills", "stack", "static");
    for library in LIBRARIES {
        let module = folder.join(format!("{}.cubin", library.name));
        let (source, messages) = emulator.compile_cuda(library, toolkit, &module)?;
        write(&format!("{}.constants", library.name), &constants(&source))?;
        usage(library, &messages, &mut table)?;
    }
    write("registers.txt", &table)
}

/// Lines with the index of a function constant and its name, from the comments that the rewriter leaves.
fn constants(source: &str) -> String {
    let mut lines = String::new();
    for line in source.lines() {
        let Some(line) = line.strip_prefix("// function constant ") else { continue };
        let mut words = line.split(' ');
        if let (Some(index), Some(_kind), Some(name)) = (words.next(), words.next(), words.next()) {
            _ = writeln!(lines, "{index} {name}");
        }
    }
    lines
}

/// A line for each kernel: registers of a thread, bytes that it spills and keeps on its stack, and bytes of
/// threadgroup memory that the kernel declares itself.
fn usage(library: &Library, messages: &str, table: &mut String) -> Result<()> {
    let mut kernel = None;
    let (mut stack, mut spills) = (0, 0);
    let mut num_kernels = 0;
    for line in messages.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function 'msl_") {
            kernel = rest.split('\'').next();
        } else if line.contains("bytes stack frame") {
            let numbers: Vec<usize> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            if let [frame, stores, loads] = numbers[..] {
                (stack, spills) = (frame, stores + loads);
            }
        } else if let Some((_, rest)) = line.split_once("Used ")
            && let Some(kernel) = kernel.take()
        {
            let before = |what: &str| -> usize {
                let end = rest.find(what).unwrap_or(0);
                rest[..end].split_whitespace().next_back().and_then(|word| word.parse().ok()).unwrap_or(0)
            };
            let (registers, fixed) = (before(" registers"), before(" bytes smem"));
            _ = writeln!(table, "{kernel:40} {registers:9} {spills:6} {stack:5} {fixed:6}");
            num_kernels += 1;
        }
    }
    if num_kernels == 0 {
        return Err(Error::internal(format!("the assembler says nothing of {}:\n{messages}", library.name)));
    }
    Ok(())
}
