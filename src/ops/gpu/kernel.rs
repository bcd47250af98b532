//! The kernels by name.

use super::attention::{DECODE_LATENT_HEADS, PREFILL_THREADS, Variant, max_decode_dim};
use super::backend::Flags;
use super::matmul::Form;
use super::matmul::rounded::{self, Pairs};
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

/// A kernel and the variant of it.
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
    TensorProduct {
        format: DType,
        last: Option<DType>,
        form: Form,
    },
    /// `next` is for what product results are rounded, if they are.
    TensorSwiglu {
        format: DType,
        form: Form,
        next: Option<Pairs>,
    },
    RoundRows(Pairs),
    RoundInOrder(Pairs),
    AddParts {
        num_parts: usize,
    },
    RopeKvWrite(KvCacheDType),
    Embed(DType),
    /// Of a table in tiles.
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
            Self::TensorProduct { form, .. } | Self::TensorSwiglu { form, .. } => match form {
                Form::Few { .. } => &FEW_ROWS,
                Form::Several { .. } => &SEVERAL_ROWS,
                Form::Many { .. } => &MANY_ROWS,
            },
            Self::RoundRows(_) => &MANY_ROWS,
            Self::RoundInOrder(_) => &FEW_ROWS,
            Self::AddParts { .. } => &SEVERAL_ROWS,
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
            Self::TensorProduct { format, last, form } => {
                let (front, behind) = form.names();
                format!("{front}_{}{behind}", mixed(format, last))
            }
            Self::TensorSwiglu { format, form, .. } => {
                let (front, behind) = form.names();
                format!("{front}_swiglu_{format}{behind}")
            }
            Self::RoundRows(pairs) => format!("round_rows_{}", pairs.name()),
            Self::RoundInOrder(pairs) => format!("round_in_order_{}", pairs.name()),
            Self::AddParts { .. } => "add_parts".to_owned(),
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

    /// Whether any number of threads computes the same, so that a device may have fewer than are asked for. What
    /// other kernels compute is laid out for a certain number, [`Self::MAX_THREADS`] or fewer.
    pub(super) fn takes_any_threads(self) -> bool {
        matches!(self, Self::Sample)
    }

    /// The most that a kernel is launched with if it does not take any number: what every Apple GPU allows, however
    /// many registers a thread takes.
    const MAX_THREADS: usize = 384;

    /// Threads that a device has to allow.
    pub(super) fn threads_needed(self) -> usize {
        match self {
            Self::PrefillAttention { .. } => PREFILL_THREADS,
            Self::TensorProduct { form, .. } | Self::TensorSwiglu { form, .. } => form.num_threads(),
            Self::RoundInOrder(_) => rounded::NUM_THREADS_IN_ORDER,
            _ if self.takes_any_threads() => 32,
            _ => Self::MAX_THREADS,
        }
    }

    /// The values of the kernel's function constants: as many of the flags as it has, and numbers.
    pub(super) fn constants(self, flags: Flags) -> Vec<Constant> {
        let num_flags = match self {
            Self::TensorProduct { form: Form::Few { .. }, .. }
            | Self::TensorSwiglu { form: Form::Few { .. }, .. } => 6,
            Self::TensorProduct { form: Form::Several { .. } | Form::Many { .. }, .. }
            | Self::TensorSwiglu { form: Form::Several { .. } | Form::Many { .. }, .. }
            | Self::AddParts { .. }
            | Self::Matmul { .. }
            | Self::MatmulSwiglu { .. }
            | Self::DecodeAttention { .. }
            | Self::DecodeAttentionMerge { .. } => 5,
            Self::Matvec { .. } | Self::MatvecSwiglu { .. } => 4,
            Self::FlashAttention { .. } | Self::PrefillAttention { .. } => 3,
            Self::RopeKvWrite(_) | Self::PagedAttention { .. } => 2,
            Self::RoundRows(_)
            | Self::RoundInOrder(_)
            | Self::LatentKvWrite(_)
            | Self::PagedAttentionMerge => 1,
            _ => 0,
        };
        let flags = (0..).zip(flags.first(num_flags)).map(|(index, flag)| Constant::Bool(index, flag));
        let numbers = match self {
            Self::FlashAttention { head_dim, value_dim, .. } => vec![head_dim, value_dim],
            Self::PrefillAttention { head_dim, value_dim, next, .. } => {
                vec![head_dim, value_dim, next.map_or(0, Pairs::apart)]
            }
            Self::TensorSwiglu { form: Form::Many { num_parts, cluster, .. }, next, .. } => {
                vec![next.map_or(0, Pairs::apart), num_parts, cluster]
            }
            Self::TensorProduct { form: Form::Many { num_parts, cluster, .. }, .. } => {
                vec![0, num_parts, cluster]
            }
            Self::DecodeLatentAttention { row_dim, value_dim, .. } => vec![row_dim, value_dim],
            Self::TensorProduct { form: Form::Few { num_stages, own_eights, .. }, .. }
            | Self::TensorSwiglu { form: Form::Few { num_stages, own_eights, .. }, .. } => {
                vec![num_stages, own_eights]
            }
            Self::TensorProduct { form: Form::Several { num_stages, num_parts, .. }, .. }
            | Self::TensorSwiglu { form: Form::Several { num_stages, num_parts, .. }, .. } => {
                vec![num_parts, num_stages]
            }
            Self::AddParts { num_parts } => vec![num_parts],
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
