//! Matmuls with weights: the layout of matrices in memory, the choice of kernels by shape, and the launches.

mod launch;
mod layout;
mod matrix;
mod operands;
pub(super) mod packed_activations;
mod plan;
mod tensor_cores;
mod tiles;
mod unpack;

pub(super) use launch::{matmul, silu_mul, swiglu};
pub(super) use layout::{Order, Planes};
pub(crate) use matrix::{GpuMatrix, GpuStack};
pub(super) use operands::{GpuProjection, Groups, Operands, Stacked};
pub(super) use packed_activations::PackedActivations;
pub(super) use tensor_cores::MatmulVariant;
pub(super) use tiles::tile_columns;
