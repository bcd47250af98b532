//! Which device computes: asked for, or chosen. Never a silent fallback.

use std::str::FromStr;

use crate::{Error, Result};

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

impl DeviceChoice {
    /// The device itself. `Auto` is the CPU: the only device of this version.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] for a device that this build does not have.
    pub fn open(self) -> Result<candle_core::Device> {
        match self {
            Self::Auto | Self::Cpu => Ok(candle_core::Device::Cpu),
            Self::Metal | Self::Cuda(_) => {
                Err(Error::unsupported(format!("--device {self} is not available: this build has cpu only"))
                    .with_hint("leave --device out, or use --device cpu"))
            }
        }
    }
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
        assert!(DeviceChoice::Auto.open().is_ok());
        assert_eq!(DeviceChoice::Metal.open().unwrap_err().kind(), crate::ErrorKind::Unsupported);
        assert_eq!(DeviceChoice::Cuda(0).open().unwrap_err().kind(), crate::ErrorKind::Unsupported);
    }
}
