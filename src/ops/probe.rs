//! Probes of the GPU kernels' assumptions.

use crate::Result;
use crate::ops::context::Context;
use crate::ops::gpu::{self, KernelLimits, Probe};

/// The results of a probe for these words; none on a device without these kernels.
///
/// # Errors
/// If the device fails.
pub(crate) fn probe(context: &Context, function: Probe, words: &[u32]) -> Result<Option<Vec<u32>>> {
    context.gpu_backend().map(|gpu| gpu::probe(gpu, function, words)).transpose()
}

/// The limits of the largest kernels of each kind on the device, if `wants` accepts their names. Compiles them. Empty
/// on a device without these kernels.
///
/// # Errors
/// The error of the device's compiler.
pub(crate) fn kernel_limits(
    context: &Context,
    wants: &mut dyn FnMut(&str) -> bool,
) -> Result<Vec<KernelLimits>> {
    context.gpu_backend().map_or_else(|| Ok(Vec::new()), |gpu| gpu::kernel_limits(gpu, wants))
}
