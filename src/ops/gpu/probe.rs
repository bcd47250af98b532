//! Launches of the probes of a GPU, and the compiler's reports on kernels.

use bytemuck::{bytes_of, cast_slice, cast_slice_mut};

use super::backend::{Flags, GpuBackend, Work};
use super::cost::Cost;
use super::kernel::Kernel;
use super::{Binding, PipelineLimits, Placement};
use crate::Result;
use crate::ops::KvCacheDType;
use crate::weights::DType;

/// A function of `metal_kernels/probe.metal`, from words of 32 bits to the same number of words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Probe {
    /// The half in the low bits as a float.
    HalfToFloat,
    /// A float as a half.
    FloatToHalf,
    /// The halves in the low bits times 1,024, by a matmul, as floats.
    Matrices,
    /// Floats unchanged, through a lane's elements of a matrix.
    Cells,
    /// 2ˣ.
    Exp2,
    /// eˣ.
    Exp,
    /// x / (1 + e⁻ˣ).
    Silu,
}

impl Probe {
    pub(super) fn function(self) -> &'static str {
        match self {
            Self::HalfToFloat => "probe_half_to_float",
            Self::FloatToHalf => "probe_float_to_half",
            Self::Matrices => "probe_matrices",
            Self::Cells => "probe_cells",
            Self::Exp2 => "probe_exp2",
            Self::Exp => "probe_exp",
            Self::Silu => "probe_silu",
        }
    }
}

/// The results of a probe for these words.
pub(crate) fn probe(gpu: &GpuBackend, probe: Probe, words: &[u32]) -> Result<Vec<u32>> {
    let device = gpu.device();
    let num_bytes = size_of_val(words);
    let allocate = || device.allocate(num_bytes.max(16), Placement::Private);
    let (input, output) = (allocate()?, allocate()?);
    device.write(&input, 0, cast_slice(words))?;
    let words_of_a_group = if matches!(probe, Probe::Matrices | Probe::Cells) { 64 } else { 32 };
    gpu.launch(
        Kernel::Probe(probe),
        Flags::default(),
        Work {
            args: bytes_of(&(words.len() as u32)),
            buffers: &[Binding::read(&input), Binding::write(&output)],
            threadgroup_memory: 0,
            grid: [words.len().div_ceil(words_of_a_group), 1, 1],
            num_threads: 32,
            cost: Cost::bytes(2 * num_bytes),
        },
    )?;
    let mut results = vec![0; words.len()];
    gpu.read(&output, cast_slice_mut(&mut results))?;
    Ok(results)
}

/// A kernel and its limits on a device.
#[derive(Debug, Clone)]
pub struct KernelLimits {
    /// The kernel's name.
    pub name: String,
    /// The report of its pipeline.
    pub limits: PipelineLimits,
    /// Threads that it may be launched with.
    pub num_threads: usize,
}

/// The largest kernels of each kind.
fn largest() -> [(Kernel, Flags); 14] {
    let (norm, plain) = (Flags::of([true]), Flags::default());
    let (format, last, dtype) = (DType::Q5K, Some(DType::Q6K), KvCacheDType::F32);
    [
        (Kernel::Matvec { format, last, columns: 1 }, norm),
        (Kernel::Matvec { format, last, columns: 4 }, norm),
        (Kernel::MatvecSwiglu { format, columns: 4 }, norm),
        (Kernel::Matmul { format, last, tokens: 32 }, norm),
        (Kernel::MatmulSwiglu { format, tokens: 32 }, norm),
        (Kernel::RopeKvWrite(dtype), norm),
        (Kernel::Embed(DType::Q6K), plain),
        (Kernel::PagedAttention { dtype, heads: 4, lanes_per_key: 16 }, plain),
        (Kernel::PagedAttentionMerge, plain),
        (
            Kernel::FlashAttention {
                dtype: KvCacheDType::F16,
                max_dim: 128,
                keys: 16,
                head_dim: 128,
                value_dim: 128,
            },
            plain,
        ),
        (Kernel::FlashAttention { dtype, max_dim: 256, keys: 8, head_dim: 256, value_dim: 256 }, plain),
        (Kernel::LatentAttention(dtype), plain),
        (Kernel::ChooseExperts, plain),
        (Kernel::Sample, plain),
    ]
}

/// The limits of the largest kernels of each kind on a device, if `wants` accepts their names. Compiles them.
pub(crate) fn kernel_limits(
    gpu: &GpuBackend,
    wants: &mut dyn FnMut(&str) -> bool,
) -> Result<Vec<KernelLimits>> {
    let limits_of = |(kernel, flags): (Kernel, Flags)| {
        Ok(KernelLimits {
            name: kernel.function(),
            limits: gpu.pipeline(kernel, flags)?.limits,
            num_threads: kernel.threads_needed(),
        })
    };
    let mut wanted = largest().to_vec();
    wanted.retain(|(kernel, _)| wants(&kernel.function()));
    gpu.compile(wanted.clone(), &|_, _| true)?;
    wanted.into_iter().map(limits_of).collect()
}
