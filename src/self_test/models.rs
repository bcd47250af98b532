//! Models on a device beside the CPU.
