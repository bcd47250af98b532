//! Every library of `metal_kernels` compiles, also as the languages that are stricter than C++.

use tinyvllm::ops::gpu::LIBRARIES;

use crate::emulator::{Emulator, Variant};

#[test]
fn the_language_accepts_them() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    for library in LIBRARIES {
        gpu.check_language(library).unwrap();
    }
}

#[test]
fn kernels_have_names_of_their_own() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let mut names: Vec<String> = LIBRARIES.iter().flat_map(|library| gpu.kernels(library).unwrap()).collect();
    let num_names = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), num_names);
    assert!(num_names > LIBRARIES.len());
}
