//! Products with weights: how a matrix lies in memory, which kernel takes which shape, and the launches.

mod launch;
mod layout;
mod matrix;
mod operands;
mod plan;
pub(super) mod rounded;
mod tensor_cores;
mod tiles;
mod unpack;

pub(super) use launch::{matmul, silu_mul, swiglu};
pub(super) use layout::{Order, Planes};
pub(crate) use matrix::{GpuMatrix, GpuStack};
pub(super) use operands::{Groups, Operands, Part, Stacked};
pub(super) use rounded::Rounded;
pub(super) use tensor_cores::Form;
pub(super) use tiles::tile_columns;
