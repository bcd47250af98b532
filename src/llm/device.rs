//! Which device computes: asked for, or chosen. Never a silent fallback.

use std::str::FromStr;
use std::sync::Arc;

use crate::ops::metal::Gpu;
use crate::{Error, ErrorKind, Result};

/// The device that was asked for.
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

/// A device that was found and opened.
#[derive(Debug, Clone)]
pub enum OpenedDevice {
    /// The processor.
    Cpu,
    /// A GPU.
    Gpu(Arc<dyn Gpu>),
}

impl DeviceChoice {
    /// Opens the device. `Auto` is Metal where this build and this machine have it, and the CPU elsewhere.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a device that this build or this machine does not have.
    pub fn open(self) -> Result<OpenedDevice> {
        match self {
            Self::Cpu => Ok(OpenedDevice::Cpu),
            Self::Metal => open_metal().map(OpenedDevice::Gpu),
            // Not a silent fallback: nobody asked for a GPU, and the summary line names the device.
            Self::Auto => match open_metal() {
                Ok(gpu) => Ok(OpenedDevice::Gpu(gpu)),
                Err(error) if error.kind() == ErrorKind::Unsupported => Ok(OpenedDevice::Cpu),
                Err(error) => Err(error),
            },
            Self::Cuda(_) => Err(Error::unsupported(format!(
                "--device {self} is not available: there are kernels for cpu and metal only"
            ))
            .with_hint("leave --device out, or use --device cpu")),
        }
    }
}

#[cfg(all(target_os = "macos", feature = "metal"))]
fn open_metal() -> Result<Arc<dyn Gpu>> {
    Ok(Arc::new(crate::ops::metal::AppleGpu::open()?))
}

#[cfg(not(all(target_os = "macos", feature = "metal")))]
fn open_metal() -> Result<Arc<dyn Gpu>> {
    Err(Error::unsupported("--device metal is not available: this build has no metal")
        .with_hint("build with --features metal on a Mac, or use --device cpu"))
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
        assert_eq!(DeviceChoice::Cuda(0).open().unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn auto_is_metal_where_there_is_metal() {
        assert!(matches!(DeviceChoice::Cpu.open().unwrap(), OpenedDevice::Cpu));
        let auto = DeviceChoice::Auto.open().unwrap();
        match DeviceChoice::Metal.open() {
            Ok(opened) => {
                let both = (&opened, &auto);
                assert!(matches!(both, (OpenedDevice::Gpu(_), OpenedDevice::Gpu(_))), "{both:?}");
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                assert!(error.hint().is_some_and(|hint| hint.contains("--device cpu")));
                assert!(matches!(auto, OpenedDevice::Cpu));
            }
        }
    }
}
