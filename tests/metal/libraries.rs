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

/// What a Mac compiles to run one kernel.
#[test]
fn a_text_has_one_instance_and_every_kernel_that_is_none() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    for library in LIBRARIES {
        let (plain, instances): (Vec<String>, Vec<String>) =
            gpu.kernels(library).unwrap().into_iter().partition(|kernel| library.is_plain(kernel));
        assert_eq!(gpu.kernels_with(library, None).unwrap(), plain);
        // Names that begin with the same letters are at the ends of the list.
        for instance in instances.first().into_iter().chain(instances.last()) {
            let expected = [std::slice::from_ref(instance), &plain].concat();
            assert_eq!(gpu.kernels_with(library, Some(instance)).unwrap(), expected);
        }
        // Without a kernel of this name there is nothing to find.
        assert_eq!(gpu.kernels_with(library, Some("no_such_kernel")).unwrap(), plain);
    }
}
