//! The kernels by name.

use super::attention::{DECODE_LATENT_HEADS, PREFILL_THREADS, Variant, max_decode_dim};
use super::backend::Flags;
use super::matmul::MatmulVariant;
use super::matmul::packed_activations::{self, Pairs};
use super::{Constant, Library, Probe};
use crate::ops::KvCacheDType;
use crate::weights::DType;

static MATVEC: Library =
    Library { name: "matvec", source: include_str!("../../../metal_kernels/matvec.metal") };
static MATMUL: Library =
    Library { name: "matmul", source: include_str!("../../../metal_kernels/matmul.metal") };
static ROPE: Library = Library { name: "rope", source: include_str!("../../../metal_kernels/rope.metal") };
static ROWS: Library = Library { name: "rows", source: include_str!("../../../metal_kernels/rows.metal") };
static PAGED_ATTENTION: Library =
    Library { name: "paged_attention", source: include_str!("../../../metal_kernels/paged_attention.metal") };
static LATENT: Library =
    Library { name: "latent", source: include_str!("../../../metal_kernels/latent.metal") };
static LATENT_ATTENTION: Library = Library {
    name: "latent_attention",
    source: include_str!("../../../metal_kernels/latent_attention.metal"),
};
static EXPERTS: Library =
    Library { name: "experts", source: include_str!("../../../metal_kernels/experts.metal") };
static SAMPLING: Library =
    Library { name: "sampling", source: include_str!("../../../metal_kernels/sampling.metal") };
static FLASH_ATTENTION: Library =
    Library { name: "flash_attention", source: include_str!("../../../metal_kernels/flash_attention.metal") };

static EMBED: Library = Library { name: "embed", source: include_str!("device/cuda/kernels/embed.cu") };
static FEW_ROWS: Library =
    Library { name: "few_rows", source: include_str!("device/cuda/kernels/few_rows.cu") };
static SEVERAL_ROWS: Library =
    Library { name: "several_rows", source: include_str!("device/cuda/kernels/several_rows.cu") };
static MANY_ROWS: Library =
    Library { name: "many_rows", source: include_str!("device/cuda/kernels/many_rows.cu") };
static DECODE_ATTENTION: Library =
    Library { name: "decode_attention", source: include_str!("device/cuda/kernels/decode_attention.cu") };
static DECODE_LATENT_ATTENTION: Library = Library {
    name: "decode_latent_attention",
    source: include_str!("device/cuda/kernels/decode_latent_attention.cu"),
};
static PREFILL_ATTENTION: Library =
    Library { name: "prefill_attention", source: include_str!("device/cuda/kernels/prefill_attention.cu") };
static PROBE: Library = Library { name: "probe", source: include_str!("../../../metal_kernels/probe.metal") };

/// Kernels for NVIDIA's GPUs only.
pub static CUDA_LIBRARIES: [&Library; 7] = [
    &EMBED,
    &FEW_ROWS,
    &SEVERAL_ROWS,
    &MANY_ROWS,
    &DECODE_ATTENTION,
    &DECODE_LATENT_ATTENTION,
    &PREFILL_ATTENTION,
];

/// The kernels for all GPUs.
pub static LIBRARIES: [&Library; 11] = [
    &PROBE,
    &MATVEC,
    &MATMUL,
    &EXPERTS,
    &ROPE,
    &ROWS,
    &PAGED_ATTENTION,
    &FLASH_ATTENTION,
    &LATENT,
    &LATENT_ATTENTION,
    &SAMPLING,
];

/// A kernel and its variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    /// `last` is the format of the third matrix if it has another one.
    Matvec {
        format: DType,
        last: Option<DType>,
        columns: usize,
    },
    MatvecSwiglu {
        format: DType,
        columns: usize,
    },
    Matmul {
        format: DType,
        last: Option<DType>,
        tokens: usize,
    },
    MatmulSwiglu {
        format: DType,
        tokens: usize,
    },
    TensorMatmul {
        format: DType,
        last: Option<DType>,
        variant: MatmulVariant,
    },
    /// `next` is the order in which results are packed for a matmul, if they are.
    TensorSwiglu {
        format: DType,
        variant: MatmulVariant,
        next: Option<Pairs>,
    },
    PackRows(Pairs),
    PackInOrder(Pairs),
    ReduceSplits {
        num_k_splits: usize,
    },
    RopeKvWrite(KvCacheDType),
    Embed(DType),
    /// For a table in tiles.
    EmbedTiled(DType),
    GatherRows,
    SiluMul,
    Gated,
    NormPart,
    NormResidual,
    CopyBlock,
    PagedAttention {
        dtype: KvCacheDType,
        heads: usize,
        lanes_per_key: usize,
    },
    PagedAttentionMerge,
    DecodeAttention {
        dtype: KvCacheDType,
        head_dim: usize,
        next: Option<Pairs>,
    },
    DecodeAttentionMerge {
        head_dim: usize,
    },
    FlashAttention {
        dtype: KvCacheDType,
        max_dim: usize,
        keys: usize,
        head_dim: usize,
        value_dim: usize,
    },
    PrefillAttention {
        dtype: KvCacheDType,
        variant: Variant,
        head_dim: usize,
        value_dim: usize,
        next: Option<Pairs>,
    },
    LatentKvWrite(KvCacheDType),
    LatentRead(KvCacheDType),
    LatentAttention(KvCacheDType),
    DecodeLatentAttention {
        dtype: KvCacheDType,
        row_dim: usize,
        value_dim: usize,
    },
    DecodeLatentAttentionMerge,
    ChooseExperts,
    GatedExperts,
    CombineExperts,
    Sample,
    Probe(Probe),
}

impl Kernel {
    pub(super) fn library(self) -> &'static Library {
        match self {
            Self::Matvec { .. } | Self::MatvecSwiglu { .. } => &MATVEC,
            Self::Matmul { .. } | Self::MatmulSwiglu { .. } => &MATMUL,
            Self::TensorMatmul { variant, .. } | Self::TensorSwiglu { variant, .. } => match variant {
                MatmulVariant::Few { .. } => &FEW_ROWS,
                MatmulVariant::Several { .. } => &SEVERAL_ROWS,
                MatmulVariant::Many { .. } => &MANY_ROWS,
            },
            Self::PackRows(_) => &MANY_ROWS,
            Self::PackInOrder(_) => &FEW_ROWS,
            Self::ReduceSplits { .. } => &SEVERAL_ROWS,
            Self::RopeKvWrite(_) => &ROPE,
            Self::EmbedTiled(_) => &EMBED,
            Self::Embed(_)
            | Self::GatherRows
            | Self::SiluMul
            | Self::Gated
            | Self::NormPart
            | Self::NormResidual
            | Self::CopyBlock => &ROWS,
            Self::PagedAttention { .. } | Self::PagedAttentionMerge => &PAGED_ATTENTION,
            Self::DecodeAttention { .. } | Self::DecodeAttentionMerge { .. } => &DECODE_ATTENTION,
            Self::FlashAttention { .. } => &FLASH_ATTENTION,
            Self::PrefillAttention { .. } => &PREFILL_ATTENTION,
            Self::LatentKvWrite(_) | Self::LatentRead(_) => &LATENT,
            Self::LatentAttention(_) => &LATENT_ATTENTION,
            Self::DecodeLatentAttention { .. } | Self::DecodeLatentAttentionMerge => &DECODE_LATENT_ATTENTION,
            Self::ChooseExperts | Self::GatedExperts | Self::CombineExperts => &EXPERTS,
            Self::Sample => &SAMPLING,
            Self::Probe(_) => &PROBE,
        }
    }

    /// The name in the library.
    pub(super) fn function(self) -> String {
        let mixed = |format: DType, last: Option<DType>| match last {
            Some(last) => format!("{format}_{last}"),
            None => format.to_string(),
        };
        match self {
            Self::Matvec { format, last, columns } => format!("matvec_{}_{columns}", mixed(format, last)),
            Self::MatvecSwiglu { format, columns } => format!("matvec_swiglu_{format}_{columns}"),
            Self::Matmul { format, last, tokens } => format!("matmul_{}_{tokens}", mixed(format, last)),
            Self::MatmulSwiglu { format, tokens } => format!("matmul_swiglu_{format}_{tokens}"),
            Self::TensorMatmul { format, last, variant } => {
                let (prefix, suffix) = variant.names();
                format!("{prefix}_{}{suffix}", mixed(format, last))
            }
            Self::TensorSwiglu { format, variant, .. } => {
                let (prefix, suffix) = variant.names();
                format!("{prefix}_swiglu_{format}{suffix}")
            }
            Self::PackRows(pairs) => format!("pack_rows_{}", pairs.name()),
            Self::PackInOrder(pairs) => format!("pack_in_order_{}", pairs.name()),
            Self::ReduceSplits { .. } => "reduce_splits".to_owned(),
            Self::RopeKvWrite(dtype) => format!("rope_kv_write_{dtype}"),
            Self::Embed(format) => format!("embed_{format}"),
            Self::EmbedTiled(format) => format!("embed_tiled_{format}"),
            Self::GatherRows => "gather_rows".to_owned(),
            Self::SiluMul => "silu_mul".to_owned(),
            Self::Gated => "gated".to_owned(),
            Self::NormPart => "norm_part".to_owned(),
            Self::NormResidual => "norm_residual".to_owned(),
            Self::CopyBlock => "copy_block".to_owned(),
            Self::PagedAttention { dtype, heads, lanes_per_key } => {
                format!("paged_attention_{dtype}_{heads}_{lanes_per_key}")
            }
            Self::PagedAttentionMerge => "paged_attention_merge".to_owned(),
            Self::DecodeAttention { dtype, head_dim, .. } => {
                format!("decode_attention_{dtype}_{}", max_decode_dim(head_dim))
            }
            Self::DecodeAttentionMerge { .. } => "decode_attention_merge".to_owned(),
            Self::LatentKvWrite(dtype) => format!("latent_kv_write_{dtype}"),
            Self::LatentRead(dtype) => format!("latent_read_{dtype}"),
            Self::LatentAttention(dtype) => format!("latent_attention_{dtype}"),
            Self::DecodeLatentAttention { dtype, .. } => {
                format!("decode_latent_attention_{dtype}_{DECODE_LATENT_HEADS}")
            }
            Self::DecodeLatentAttentionMerge => "decode_latent_attention_merge".to_owned(),
            Self::ChooseExperts => "choose_experts".to_owned(),
            Self::GatedExperts => "gated_experts".to_owned(),
            Self::CombineExperts => "combine_experts".to_owned(),
            Self::Sample => "sample".to_owned(),
            Self::FlashAttention { dtype, max_dim, keys, .. } => {
                format!("flash_attention_{dtype}_{max_dim}_{keys}")
            }
            Self::PrefillAttention { dtype, variant, .. } => {
                format!("prefill_attention_{dtype}_{}", variant.max_dim)
            }
            Self::Probe(probe) => probe.function().to_owned(),
        }
    }

    /// Whether results are the same for any number of threads, so that a device may run fewer than requested. Other
    /// kernels need their number of threads, which is [`Self::MAX_THREADS`] or less.
    pub(super) fn takes_any_threads(self) -> bool {
        matches!(self, Self::Sample)
    }

    /// The maximum threads of kernels that need a fixed number: the limit that every Apple GPU allows, for any number
    /// of registers per thread.
    const MAX_THREADS: usize = 384;

    /// Threads that a device must allow.
    pub(super) fn threads_needed(self) -> usize {
        match self {
            Self::PrefillAttention { .. } => PREFILL_THREADS,
            Self::TensorMatmul { variant, .. } | Self::TensorSwiglu { variant, .. } => variant.num_threads(),
            Self::PackInOrder(_) => packed_activations::NUM_THREADS_IN_ORDER,
            _ if self.takes_any_threads() => 32,
            _ => Self::MAX_THREADS,
        }
    }

    /// The values of the kernel's function constants: its flags, and numbers.
    pub(super) fn constants(self, flags: Flags) -> Vec<Constant> {
        let num_flags = match self {
            Self::TensorMatmul { variant: MatmulVariant::Few { .. }, .. }
            | Self::TensorSwiglu { variant: MatmulVariant::Few { .. }, .. } => 6,
            Self::TensorMatmul {
                variant: MatmulVariant::Several { .. } | MatmulVariant::Many { .. },
                ..
            }
            | Self::TensorSwiglu {
                variant: MatmulVariant::Several { .. } | MatmulVariant::Many { .. },
                ..
            }
            | Self::ReduceSplits { .. }
            | Self::Matmul { .. }
            | Self::MatmulSwiglu { .. }
            | Self::DecodeAttention { .. }
            | Self::DecodeAttentionMerge { .. } => 5,
            Self::Matvec { .. } | Self::MatvecSwiglu { .. } => 4,
            Self::FlashAttention { .. } | Self::PrefillAttention { .. } => 3,
            Self::RopeKvWrite(_) | Self::PagedAttention { .. } => 2,
            Self::PackRows(_) | Self::PackInOrder(_) | Self::LatentKvWrite(_) | Self::PagedAttentionMerge => {
                1
            }
            _ => 0,
        };
        let flags = (0..).zip(flags.first(num_flags)).map(|(index, flag)| Constant::Bool(index, flag));
        let numbers = match self {
            Self::FlashAttention { head_dim, value_dim, .. } => vec![head_dim, value_dim],
            Self::PrefillAttention { head_dim, value_dim, next, .. } => {
                vec![head_dim, value_dim, next.map_or(0, Pairs::apart)]
            }
            Self::TensorSwiglu {
                variant: MatmulVariant::Many { num_k_splits, cluster, .. }, next, ..
            } => {
                vec![next.map_or(0, Pairs::apart), num_k_splits, cluster]
            }
            Self::TensorMatmul { variant: MatmulVariant::Many { num_k_splits, cluster, .. }, .. } => {
                vec![0, num_k_splits, cluster]
            }
            Self::DecodeLatentAttention { row_dim, value_dim, .. } => vec![row_dim, value_dim],
            Self::TensorMatmul { variant: MatmulVariant::Few { num_stages, own_eights, .. }, .. }
            | Self::TensorSwiglu { variant: MatmulVariant::Few { num_stages, own_eights, .. }, .. } => {
                vec![num_stages, own_eights]
            }
            Self::TensorMatmul {
                variant: MatmulVariant::Several { num_stages, num_k_splits, .. }, ..
            }
            | Self::TensorSwiglu {
                variant: MatmulVariant::Several { num_stages, num_k_splits, .. }, ..
            } => {
                vec![num_k_splits, num_stages]
            }
            Self::ReduceSplits { num_k_splits } => vec![num_k_splits],
            Self::DecodeAttention { head_dim, next, .. } => {
                vec![head_dim, next.map_or(0, Pairs::apart)]
            }
            Self::DecodeAttentionMerge { head_dim } => vec![head_dim],
            _ => Vec::new(),
        };
        let numbers = (num_flags as u32..).zip(numbers);
        flags.chain(numbers.map(|(index, number)| Constant::U16(index, number as u16))).collect()
    }
}
