//! How long kernels take.
