//! The definition of a device: its types for buffers, weights and the memory of ops, and every op.
//!
//! There are three devices, and this is the only list of them: the CPU with its kernels, GPUs, and candle, which
//! defines the ops. An op is a trait in a file of its own here, with the function that layers call; its implementations
//! have the same file name in `ops/cpu`, `ops/gpu` and `ops/reference`. [`Ops`] names all of them, so a device that
//! lacks one does not compile.
//!
//! [`Held`] is an operand with the type of its device. An implementation gets its own type with [`Held::on`]; an
//! operand of another device is an error.

use std::fmt;
use std::sync::Arc;

use crate::ops::bandwidth::Bandwidth;
use crate::ops::buffer::{NewRows, Rows};
use crate::ops::cpu::CpuBackend;
use crate::ops::embed::Embed;
use crate::ops::expanded_attention::ExpandedAttention;
use crate::ops::experts::ExpertOps;
use crate::ops::gated::Gated;
use crate::ops::gather_rows::GatherRows;
use crate::ops::gpu::GpuBackend;
use crate::ops::heads_linear::HeadsLinear;
use crate::ops::kv_cache::{CacheOps, DevicePools};
use crate::ops::latent_kv_write::LatentKvWrite;
use crate::ops::linear::LinearOps;
use crate::ops::norm_part::NormPart;
use crate::ops::norm_residual::NormResidual;
use crate::ops::paged_attention::PagedAttention;
use crate::ops::reference::ReferenceBackend;
use crate::ops::rope_attention::RopeAttention;
use crate::ops::rope_kv_write::{DeviceTable, RopeKvWrite};
use crate::ops::sample::Sample;
use crate::ops::step_inputs::InputOps;
use crate::ops::weights::{DeviceMatrix, DeviceStack, WeightOps};
use crate::{Error, Result};

/// A device's types for the operands of ops.
pub(crate) trait Device: Sized {
    /// Rows of activations.
    type Buffer: Rows;
    /// A weight matrix.
    type Matrix: DeviceMatrix;
    /// Matrices of one shape and type.
    type Stack: DeviceStack;
    /// A vector of weights; the host always has a copy.
    type Vector: fmt::Debug + Send + Sync;
    /// Memory of matmuls with weights.
    type LinearScratch: fmt::Debug + Send;
    /// The experts of the tokens of a step.
    type Routing: fmt::Debug + Send;
    /// The keys and values of a layer.
    type Pools: DevicePools;
    /// The batch metadata of a step, in the kernels' format.
    type Inputs: fmt::Debug + Send + Sync;
    /// The sampler on the device; uninhabited if the host samples.
    type Sampler: fmt::Debug + Send;
    /// Cosines and sines.
    type Table: DeviceTable;
    /// Memory of attention.
    type AttentionScratch: fmt::Debug + Send;
    /// Memory of latent attention with expanded keys and values.
    type ExpandedScratch: fmt::Debug + Send;

    /// The operand, if it is this device's.
    fn of<K: Kind>(held: &Held<K>) -> Option<&K::Of<Self>>;

    /// The same, for writing.
    fn of_mut<K: Kind>(held: &mut Held<K>) -> Option<&mut K::Of<Self>>;

    /// The same, by value.
    fn into_own<K: Kind>(held: Held<K>) -> Option<K::Of<Self>>;

    /// An operand of this device.
    fn hold<K: Kind>(own: K::Of<Self>) -> Held<K>;
}

/// Every op. A device that lacks one does not compile.
pub(crate) trait Ops:
    Device
    + NewRows
    + WeightOps
    + CacheOps
    + InputOps
    + Bandwidth
    + Embed
    + GatherRows
    + LinearOps
    + Gated
    + NormPart
    + NormResidual
    + HeadsLinear
    + ExpertOps
    + RopeKvWrite
    + PagedAttention
    + RopeAttention
    + LatentKvWrite
    + ExpandedAttention
    + Sample
{
}

impl Ops for CpuBackend {}
impl Ops for Arc<GpuBackend> {}
impl Ops for ReferenceBackend {}

/// A kind of operand: its type on each device, and its name.
pub(crate) trait Kind {
    /// The type.
    type Of<D: Device>: fmt::Debug;

    /// Its name in errors.
    const NAME: &'static str;
}

/// Declares kinds by the name of the associated type.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $form:ident, $name:literal;)*) => {
        $($(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $kind;

        impl Kind for $kind {
            type Of<D: Device> = D::$form;
            const NAME: &'static str = $name;
        })*
    };
}

kinds! {
    /// [`Device::Buffer`].
    Buffers = Buffer, "a buffer";
    /// [`Device::Matrix`].
    Matrices = Matrix, "a matrix";
    /// [`Device::Stack`].
    Stacks = Stack, "a stack of matrices";
    /// [`Device::Vector`].
    Vectors = Vector, "a vector";
    /// [`Device::LinearScratch`].
    LinearScratches = LinearScratch, "the memory of projected";
    /// [`Device::Routing`].
    Routings = Routing, "the experts of a step";
    /// [`Device::Pools`].
    LayerPools = Pools, "the KV cache";
    /// [`Device::Inputs`].
    MetadataBuffers = Inputs, "the batch metadata";
    /// [`Device::Sampler`].
    Samplers = Sampler, "a sampler";
    /// [`Device::Table`].
    Tables = Table, "a rope table";
    /// [`Device::AttentionScratch`].
    AttentionScratches = AttentionScratch, "the memory of attention";
    /// [`Device::ExpandedScratch`].
    ExpandedScratches = ExpandedScratch, "the memory of latent attention";
}

/// An operand on one of the devices.
pub(crate) enum Held<K: Kind> {
    /// On the CPU, for its kernels.
    Cpu(K::Of<CpuBackend>),
    /// On a GPU.
    Gpu(K::Of<Arc<GpuBackend>>),
    /// On candle's device.
    Reference(K::Of<ReferenceBackend>),
}

impl<K: Kind> Held<K> {
    /// The operand, if it is on `device`.
    pub(crate) fn new<D: Ops>(_device: &D, own: K::Of<D>) -> Self {
        D::hold(own)
    }

    /// The operand on `device`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if it is on another device.
    pub(crate) fn on<D: Ops>(&self, _device: &D) -> Result<&K::Of<D>> {
        D::of(self).ok_or_else(elsewhere::<K>)
    }

    /// The same, for writing.
    pub(crate) fn on_mut<D: Ops>(&mut self, _device: &D) -> Result<&mut K::Of<D>> {
        D::of_mut(self).ok_or_else(elsewhere::<K>)
    }

    /// The same, by value.
    pub(crate) fn take<D: Ops>(self, _device: &D) -> Result<K::Of<D>> {
        D::into_own(self).ok_or_else(elsewhere::<K>)
    }
}

impl<K: Kind> fmt::Debug for Held<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(own) => own.fmt(f),
            Self::Gpu(own) => own.fmt(f),
            Self::Reference(own) => own.fmt(f),
        }
    }
}

fn elsewhere<K: Kind>() -> Error {
    Error::internal(format!("{} is used on another device than it is on", K::NAME))
}

/// Implements [`Device`] except for its types.
macro_rules! device_access {
    ($variant:ident) => {
        fn of<K: $crate::ops::device::Kind>(held: &$crate::ops::device::Held<K>) -> Option<&K::Of<Self>> {
            match held {
                $crate::ops::device::Held::$variant(own) => Some(own),
                _ => None,
            }
        }

        fn of_mut<K: $crate::ops::device::Kind>(
            held: &mut $crate::ops::device::Held<K>,
        ) -> Option<&mut K::Of<Self>> {
            match held {
                $crate::ops::device::Held::$variant(own) => Some(own),
                _ => None,
            }
        }

        fn into_own<K: $crate::ops::device::Kind>(held: $crate::ops::device::Held<K>) -> Option<K::Of<Self>> {
            match held {
                $crate::ops::device::Held::$variant(own) => Some(own),
                _ => None,
            }
        }

        fn hold<K: $crate::ops::device::Kind>(own: K::Of<Self>) -> $crate::ops::device::Held<K> {
            $crate::ops::device::Held::$variant(own)
        }
    };
}

/// Runs the same code for an operand of any device.
macro_rules! with_held {
    ($held:expr, |$own:ident| $body:expr) => {
        match $held {
            $crate::ops::device::Held::Cpu($own) => $body,
            $crate::ops::device::Held::Gpu($own) => $body,
            $crate::ops::device::Held::Reference($own) => $body,
        }
    };
}

/// Runs the same code on any device: the only dispatch on a device.
macro_rules! on_device {
    ($backend:expr, |$device:ident| $body:expr) => {
        match $backend {
            $crate::ops::context::Backend::Cpu($device) => $body,
            $crate::ops::context::Backend::Gpu($device) => $body,
            $crate::ops::context::Backend::Reference($device) => $body,
        }
    };
}

pub(crate) use {device_access, on_device, with_held};
