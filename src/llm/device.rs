//! Which device computes, and with which kernels: requested, or chosen. Never a silent fallback.

use std::str::FromStr;
use std::sync::Arc;

use crate::config::EngineConfig;
use crate::ops::gpu::{ChipClass, Gpu};
use crate::ops::reference::ReferenceBackend;
use crate::weights::FileType;
use crate::{Error, ErrorKind, Result};

/// The requested device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The best device that this build and this machine have.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// An Apple GPU.
    Metal,
    /// The NVIDIA GPU with this number.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name.split_once(':') {
            None if name == "auto" => Ok(Self::Auto),
            None if name == "cpu" => Ok(Self::Cpu),
            None if name == "metal" => Ok(Self::Metal),
            None if name == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", number)) if number.parse::<usize>().is_ok() => {
                Ok(Self::Cuda(number.parse().unwrap_or_default()))
            }
            _ => Err(Error::invalid_request(format!("{name:?} is not a device"))
                .with_hint("use auto, cpu, metal, cuda or cuda:N")),
        }
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Metal => f.write_str("metal"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// Which implementation of the ops computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelChoice {
    /// This program's own kernels.
    #[default]
    Fused,
    /// Every op by its definition, in candle's tensors: slow, and a fallback if a kernel fails on a machine.
    Reference,
}

impl KernelChoice {
    /// Every choice, as spelled in flags.
    pub const NAMES: [&str; 2] = ["fused", "reference"];
}

impl FromStr for KernelChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "fused" => Ok(Self::Fused),
            "reference" => Ok(Self::Reference),
            _ => Err(Error::invalid_request(format!("{name:?} names no kernels"))
                .with_hint(format!("use one of {}", Self::NAMES.join(", ")))),
        }
    }
}

/// Weights that a processor's caches may hold.
const MAX_CACHED_BYTES: u64 = 32 << 20;

/// A device that was found and opened.
#[derive(Debug)]
pub enum OpenedDevice {
    /// The processor; with the problem of this machine's GPU, if the processor was not requested and there is a GPU.
    Cpu(Option<Error>),
    /// A GPU.
    Gpu(Arc<dyn Gpu>),
    /// A device of candle's.
    Reference(ReferenceBackend),
}

impl OpenedDevice {
    /// Tokens of a step that it computes well together: enough of a prompt to keep all of its processors busy.
    pub(super) fn useful_batched_tokens(&self) -> usize {
        match self {
            Self::Gpu(gpu) if gpu.kind() == "cuda" => 4096,
            Self::Gpu(_) | Self::Cpu(_) | Self::Reference(_) => 512,
        }
    }

    /// Positions of keys that its attention kernels read together.
    pub(super) fn key_tile(&self) -> usize {
        match self {
            Self::Gpu(_) => 64,
            Self::Cpu(_) | Self::Reference(_) => 1,
        }
    }

    /// The fixed cost of a step, in generated tokens, for a model with this many bytes of weights.
    pub(super) fn step_cost(&self, weight_bytes: u64) -> usize {
        match self {
            // So large that clients are never skipped: that was not measured there.
            Self::Gpu(_) => 256,
            // Weights that stay in the processor's caches cost no time to read.
            Self::Cpu(_) | Self::Reference(_) if weight_bytes < MAX_CACHED_BYTES => 1,
            Self::Cpu(_) | Self::Reference(_) => EngineConfig::default().step_cost,
        }
    }

    /// The type that it keeps weights of a file as.
    pub(super) fn kept_as(&self, file_type: FileType) -> FileType {
        match self {
            Self::Cpu(_) | Self::Gpu(_) => FileType::Kept(file_type.kept_as()),
            // Weights stay in their file.
            Self::Reference(_) => file_type,
        }
    }

    /// Whether it is a GPU with dedicated memory. Apple's GPUs use the machine's, of which the system limits their
    /// part.
    pub(super) fn has_own_memory(&self) -> bool {
        matches!(self, Self::Gpu(gpu) if gpu.class() == ChipClass::Nvidia)
    }
}

impl DeviceChoice {
    /// Opens the device. `Auto` is a GPU where this build and this machine have one, and the CPU elsewhere.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a device that this build or this machine does not have.
    pub fn open(self, kernels: KernelChoice) -> Result<OpenedDevice> {
        let cpu = |unused_gpu| match kernels {
            KernelChoice::Fused => OpenedDevice::Cpu(unused_gpu),
            KernelChoice::Reference => OpenedDevice::Reference(ReferenceBackend::cpu()),
        };
        let metal = || match kernels {
            KernelChoice::Fused => open_metal().map(OpenedDevice::Gpu),
            KernelChoice::Reference => ReferenceBackend::metal().map(OpenedDevice::Reference),
        };
        let cuda = |ordinal| match kernels {
            KernelChoice::Fused => open_cuda(ordinal).map(OpenedDevice::Gpu),
            KernelChoice::Reference => Err(no_reference_on_cuda(ordinal)),
        };
        match self {
            Self::Cpu => Ok(cpu(None)),
            Self::Metal => metal(),
            // Not a silent fallback: no GPU was requested, and the summary line names the device. If a GPU exists, the
            // reason is kept for the caller, who reports it to the user.
            Self::Auto => match metal().or_else(|_| cuda(0)) {
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    Ok(cpu(is_cuda_present().then_some(error)))
                }
                opened => opened,
            },
            Self::Cuda(ordinal) => cuda(ordinal),
        }
    }
}

fn no_reference_on_cuda(ordinal: usize) -> Error {
    Error::unsupported(format!(
        "--kernels reference is not available on cuda:{ordinal}: candle's CUDA device needs NVIDIA's compiler to build"
    ))
    .with_hint("leave --kernels out, or use --device cpu")
}

#[cfg(all(target_os = "macos", feature = "metal"))]
fn open_metal() -> Result<Arc<dyn Gpu>> {
    Ok(Arc::new(crate::ops::gpu::AppleGpu::open()?))
}

#[cfg(not(all(target_os = "macos", feature = "metal")))]
fn open_metal() -> Result<Arc<dyn Gpu>> {
    Err(Error::unsupported("--device metal is not available: this build has no metal")
        .with_hint("build with --features metal on a Mac, or use --device cpu"))
}

#[cfg(target_os = "linux")]
fn open_cuda(ordinal: usize) -> Result<Arc<dyn Gpu>> {
    let cache = super::cache_folder("kernels");
    Ok(Arc::new(crate::ops::gpu::CudaGpu::open(ordinal, cache.as_deref())?))
}

#[cfg(target_os = "linux")]
fn is_cuda_present() -> bool {
    crate::ops::gpu::CudaGpu::is_present()
}

#[cfg(not(target_os = "linux"))]
fn is_cuda_present() -> bool {
    false
}

#[cfg(not(target_os = "linux"))]
fn open_cuda(ordinal: usize) -> Result<Arc<dyn Gpu>> {
    Err(Error::unsupported(format!(
        "--device cuda:{ordinal} is not available: NVIDIA GPUs are used on Linux only"
    ))
    .with_hint("leave --device out, or use --device cpu"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_absent_devices_are_errors() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Metal, DeviceChoice::Cuda(3)] {
            assert_eq!(choice.to_string().parse::<DeviceChoice>().unwrap(), choice);
        }
        assert_eq!("cuda".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cuda(0));
        for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU:1", "cpu:0"] {
            assert!(name.parse::<DeviceChoice>().is_err(), "{name}");
        }
        assert_eq!(
            DeviceChoice::Cuda(99).open(KernelChoice::Fused).unwrap_err().kind(),
            ErrorKind::Unsupported
        );
    }

    #[test]
    fn auto_is_metal_where_there_is_metal() {
        let kind = |device: &OpenedDevice| match device {
            OpenedDevice::Cpu(_) => "cpu".to_owned(),
            OpenedDevice::Gpu(_) => "metal".to_owned(),
            OpenedDevice::Reference(backend) => backend.description(),
        };
        for (kernels, cpu) in [
            (KernelChoice::Fused, "cpu"),
            (KernelChoice::Reference, "cpu (reference kernels: candle in f32)"),
        ] {
            assert_eq!(kind(&DeviceChoice::Cpu.open(kernels).unwrap()), cpu);
            let auto = DeviceChoice::Auto.open(kernels).unwrap();
            match DeviceChoice::Metal.open(kernels) {
                Ok(opened) => {
                    assert_eq!(kind(&opened), kind(&auto));
                    assert!(kind(&opened).starts_with("metal"));
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unsupported);
                    assert!(error.hint().is_some_and(|hint| hint.contains("--device cpu")));
                    assert_eq!(kind(&auto), cpu);
                }
            }
        }
        assert!("candle".parse::<KernelChoice>().unwrap_err().hint().unwrap().contains("reference"));
    }
}
