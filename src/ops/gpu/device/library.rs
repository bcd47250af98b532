//! The kernel sources, for compilation on the device.

/// The source of kernels that are compiled together.
#[derive(Debug, PartialEq, Eq)]
pub struct Library {
    /// The name of the file, without its ending: in `metal_kernels`, or of a library for NVIDIA's GPUs only in
    /// `src/ops/gpu/device/cuda/kernels`.
    pub name: &'static str,
    /// The file.
    pub source: &'static str,
}

/// The included files by name.
const HEADERS: [(&str, &str); 15] = [
    ("threads.h", include_str!("../../../../metal_kernels/threads.h")),
    ("codes.h", include_str!("../../../../metal_kernels/codes.h")),
    ("formats.h", include_str!("../../../../metal_kernels/formats.h")),
    ("gated.h", include_str!("../../../../metal_kernels/gated.h")),
    ("groups.h", include_str!("../../../../metal_kernels/groups.h")),
    ("matrices.h", include_str!("../../../../metal_kernels/matrices.h")),
    ("kv_cache.h", include_str!("../../../../metal_kernels/kv_cache.h")),
    ("softmax.h", include_str!("../../../../metal_kernels/softmax.h")),
    ("rope.h", include_str!("../../../../metal_kernels/rope.h")),
    ("fragments.h", include_str!("cuda/kernels/fragments.h")),
    ("prefill.h", include_str!("../../../../metal_kernels/prefill.h")),
    ("matmul.h", include_str!("cuda/kernels/matmul.h")),
    ("slices.h", include_str!("cuda/kernels/slices.h")),
    ("packed.h", include_str!("cuda/kernels/packed.h")),
    ("cached.h", include_str!("cuda/kernels/cached.h")),
];

impl Library {
    /// The language version of the kernels, the first with bfloat.
    pub const LANGUAGE_VERSION: (usize, usize) = (3, 1);

    /// Whether it is for NVIDIA's GPUs only, and not valid Metal.
    #[must_use]
    pub fn is_for_nvidia(&self) -> bool {
        self.source.contains("#define FOR_NVIDIA")
    }

    /// The maximum threads of a threadgroup, if the file gives it: with fewer, each may have more registers on NVIDIA's
    /// GPUs.
    #[must_use]
    pub fn max_threads(&self) -> Option<usize> {
        self.defined("#define MAX_THREADS ")
    }

    /// The number of threadgroups per core that registers should allow, if the file gives it; else NVIDIA's compiler
    /// decides.
    #[must_use]
    pub fn min_threadgroups(&self) -> Option<usize> {
        self.defined("#define MIN_THREADGROUPS ")
    }

    fn defined(&self, start: &str) -> Option<usize> {
        self.source.lines().find_map(|line| line.strip_prefix(start)?.parse().ok())
    }

    /// The name of the file.
    #[must_use]
    pub fn file(&self) -> String {
        format!("{}.{}", self.name, if self.is_for_nvidia() { "cu" } else { "metal" })
    }

    /// The text to compile: the file with its headers instead of `#include "…"`, and `#line` markers, so that a
    /// compiler's messages point to the files of `metal_kernels`.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(2 * self.source.len());
        let mut included = Vec::new();
        expand(&self.file(), self.source, &mut included, &mut text);
        text
    }

    /// Whether this kernel is no instance of a template. Every text has it.
    #[must_use]
    pub fn is_plain(&self, kernel: &str) -> bool {
        self.source.contains(&format!("\n[[kernel]] void {kernel}("))
    }

    /// [`Self::text`] with one instance of a template, or none, instead of all: compiling all takes many times as
    /// long.
    #[must_use]
    pub fn text_of(&self, instance: Option<&str>) -> String {
        let wanted = instance.map(|name| format!("#define WANTED_{name} 0, 1\n")).unwrap_or_default();
        format!("#define SELECTS\n{wanted}{}", self.text())
    }
}

/// Inserts each header once, where it is first included.
fn expand(name: &str, source: &str, included: &mut Vec<&'static str>, text: &mut String) {
    text.push_str(&format!("#line 1 \"{name}\"\n"));
    for (index, line) in source.lines().enumerate() {
        let header = line
            .strip_prefix("#include \"")
            .and_then(|rest| rest.strip_suffix('"'))
            .and_then(|wanted| HEADERS.iter().find(|(header, _)| *header == wanted));
        match header {
            Some((header, _)) if included.contains(header) => text.push('\n'),
            Some((header, source)) => {
                included.push(header);
                expand(header, source, included, text);
                text.push_str(&format!("#line {} \"{name}\"\n", index + 2));
            }
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
}
