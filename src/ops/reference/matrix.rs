//! A weight matrix in its file's format, decoded by candle, or by [`blocks`] for types that candle does not support.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{Device, Module, Tensor};

use super::ReferenceBackend;
use super::Result;
use crate::Error;
use crate::weights::{DType, FileType, SharedBytes, blocks};

/// Maximum values that are decoded at once: a matrix is decoded anew for each matmul.
const VALUES_PER_CHUNK: usize = 1 << 24;

/// `[rows, cols]` of any type.
#[derive(Debug)]
pub(crate) struct ReferenceMatrix {
    stored: FileType,
    rows: usize,
    cols: usize,
    /// The rows of the file in sequence.
    bytes: SharedBytes,
    /// The same in memory of a GPU.
    on_device: Option<OnDevice>,
}

#[derive(Debug)]
enum OnDevice {
    Dense(Tensor),
    Quantized(QMatMul),
}

/// candle's name of a type.
enum CandleDType {
    Dense(candle_core::DType),
    Quantized(GgmlDType),
    Unknown,
}

impl From<FileType> for CandleDType {
    fn from(file_type: FileType) -> Self {
        let FileType::Kept(dtype) = file_type else { return Self::Unknown };
        match dtype {
            DType::F32 => Self::Dense(candle_core::DType::F32),
            DType::F16 => Self::Dense(candle_core::DType::F16),
            DType::BF16 => Self::Dense(candle_core::DType::BF16),
            DType::Q4_0 => Self::Quantized(GgmlDType::Q4_0),
            DType::Q4_1 => Self::Quantized(GgmlDType::Q4_1),
            DType::Q5_0 => Self::Quantized(GgmlDType::Q5_0),
            DType::Q5_1 => Self::Quantized(GgmlDType::Q5_1),
            DType::Q8_0 => Self::Quantized(GgmlDType::Q8_0),
            DType::Q4K => Self::Quantized(GgmlDType::Q4K),
            DType::Q5K => Self::Quantized(GgmlDType::Q5K),
            DType::Q6K => Self::Quantized(GgmlDType::Q6K),
            DType::Q2K => Self::Quantized(GgmlDType::Q2K),
            DType::Q3K => Self::Quantized(GgmlDType::Q3K),
            DType::Iq4Nl | DType::Iq4Xs | DType::Mxfp4 | DType::Q8S => Self::Unknown,
        }
    }
}

impl ReferenceMatrix {
    /// Rows in their file's format.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the number of bytes does not match the shape.
    pub(crate) fn new(
        backend: &ReferenceBackend,
        stored: FileType,
        bytes: SharedBytes,
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        if stored.row_bytes(cols)?.checked_mul(rows) != Some(bytes.len()) {
            let num_bytes = bytes.len();
            let message = format!("a {rows} × {cols} matrix of {stored} does not have {num_bytes} bytes");
            return Err(Error::invalid_model(message).into());
        }
        let mut matrix = Self { stored, rows, cols, bytes, on_device: None };
        if !backend.device().is_cpu() {
            matrix.on_device = match matrix.stored.into() {
                CandleDType::Dense(_) => Some(OnDevice::Dense(matrix.load(0..rows, backend.device())?)),
                // Its rows are decoded on the CPU for each matmul.
                CandleDType::Unknown => None,
                CandleDType::Quantized(dtype) => {
                    let blocks = matrix.copy(0..rows)?;
                    let blocks = Cow::Borrowed(bytemuck::cast_slice(&blocks));
                    let storage = QStorage::from_data(blocks, backend.device(), dtype)?;
                    let tensor = QTensor::new(storage, (rows, cols))?;
                    Some(OnDevice::Quantized(QMatMul::from_arc(Arc::new(tensor))?))
                }
            };
        }
        Ok(matrix)
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn num_cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn dtype(&self) -> DType {
        self.stored.kept_as()
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// `x·Wᵀ` for rows `x`, `[n, cols]` → `[n, rows]`.
    pub(super) fn matmul(&self, backend: &ReferenceBackend, x: &Tensor) -> Result<Tensor> {
        // Not on the CPU, where candle would round the activations to eight bits.
        if let Some(OnDevice::Quantized(weights)) = &self.on_device {
            return Ok(weights.forward(&x.contiguous()?)?);
        }
        let step = (VALUES_PER_CHUNK / self.cols.max(1)).max(1);
        let chunks = (0..self.rows).step_by(step).map(|first| {
            let rows = first..self.rows.min(first + step);
            let weights = match &self.on_device {
                Some(OnDevice::Dense(weights)) => {
                    weights.narrow(0, first, rows.len())?.to_dtype(x.dtype())?
                }
                _ => self.rows(backend, rows)?,
            };
            Ok(x.matmul(&weights.t()?)?)
        });
        Ok(Tensor::cat(&chunks.collect::<Result<Vec<_>>>()?, 1)?)
    }

    /// Some rows, `[rows.len(), cols]`.
    pub(super) fn rows(
        &self,
        backend: &ReferenceBackend,
        rows: impl ExactSizeIterator<Item = usize>,
    ) -> Result<Tensor> {
        backend.bring(&self.load(rows, &Device::Cpu)?)
    }

    /// Some rows: decoded on the CPU; dense types unchanged.
    fn load(&self, rows: impl ExactSizeIterator<Item = usize>, device: &Device) -> Result<Tensor> {
        let shape = (rows.len(), self.cols);
        let bytes = self.copy(rows)?;
        let bytes: &[u8] = &bytemuck::cast_slice(&bytes)[..shape.0 * self.stored.row_bytes(self.cols)?];
        Ok(match self.stored.into() {
            CandleDType::Dense(dtype) => Tensor::from_raw_buffer(bytes, dtype, &[shape.0, shape.1], device)?,
            CandleDType::Quantized(dtype) => {
                QTensor::new(QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, dtype)?, shape)?
                    .dequantize(device)?
            }
            CandleDType::Unknown => {
                let mut values = vec![0.0; shape.0 * shape.1];
                blocks::dequantize(self.stored, bytes, &mut values)?;
                Tensor::from_vec(values, shape, device)?
            }
        })
    }

    /// The bytes of some rows, copied to an aligned range for blocks, which may begin at any address in a file, plus at
    /// most one byte.
    fn copy(&self, rows: impl ExactSizeIterator<Item = usize>) -> Result<Vec<u16>> {
        let row_bytes = self.stored.row_bytes(self.cols)?;
        let mut words = vec![0_u16; (rows.len() * row_bytes).div_ceil(2)];
        let targets = bytemuck::cast_slice_mut(&mut words).chunks_exact_mut(row_bytes.max(1));
        for (target, row) in targets.zip(rows) {
            let target: &mut [u8] = target;
            target.copy_from_slice(&self.bytes[row * row_bytes..][..row_bytes]);
        }
        Ok(words)
    }
}
