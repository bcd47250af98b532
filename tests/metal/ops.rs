//! Every kernel against its definition, through the same launches as on a Mac, under every kind of check.

use std::collections::HashMap;
use std::sync::Arc;

use tinyvllm::ops::Context;
use tinyvllm::ops::gpu::{CUDA_LIBRARIES, ChipClass, LIBRARIES, Library};
use tinyvllm::self_test::{Check, Effort, Family};

use crate::emulator::{Barrier, Emulator, Order, Timing, Variant, run_again};
use crate::oracle::Remembering;
use crate::packed::is_of_a_size_for_more_cores;
use crate::planted::{Device, Wanted, small};
use crate::proved::on_its_day;

fn check(gpu: Option<Emulator>) {
    check_libraries(gpu, &Family::ALL, &LIBRARIES);
}

/// The kernels for NVIDIA's GPUs, whose instructions the emulator has functions for.
fn check_of_nvidia(gpu: Option<Emulator>) {
    check_libraries(gpu, &Family::ALL, &CUDA_LIBRARIES);
}

fn of_nvidia(variant: Variant) -> Option<Emulator> {
    Some(Emulator::new(variant)?.with_class(ChipClass::Nvidia))
}

/// Runs these checks, which have to reach every kernel of these libraries.
fn check_libraries(gpu: Option<Emulator>, families: &[Family], libraries: &[&Library]) {
    let Some(gpu) = gpu else { return };
    let gpu = Arc::new(gpu);
    let mut failures = Vec::new();
    let context = Context::gpu(gpu.clone());
    for family in families {
        let mut report = Remembering(|check: Check| {
            if !check.passed {
                failures.push(format!("{}: {}", check.name, check.detail));
            }
        });
        family.check(&context, Effort::Small, &mut report);
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    let run = gpu.num_dispatches();
    let all = libraries.iter().flat_map(|library| gpu.kernels(library).unwrap());
    // Tiles that a device of so few cores never takes have a test of their own.
    let all = all.filter(|kernel| !is_of_a_size_for_more_cores(kernel));
    let missing: Vec<String> = all.filter(|kernel| !run.contains_key(kernel)).collect();
    assert!(missing.is_empty(), "kernels that no check reaches: {missing:?}");
}

#[test]
fn on_tensor_cores() {
    on_its_day("ops::on_tensor_cores", || {
        check_of_nvidia(of_nvidia(Variant::Fast).map(|gpu| gpu.with_timing(Timing::Late)));
    });
}

#[test]
fn on_tensor_cores_checked() {
    on_its_day("ops::on_tensor_cores_checked", || {
        check_of_nvidia(of_nvidia(Variant::Checked).map(|gpu| gpu.with_order(Order::Random(3))));
    });
}

/// Devices for planted defects in addition to one like those above.
#[test]
fn on_smaller_tensor_cores() {
    on_its_day("ops::on_smaller_tensor_cores", || {
        for family in [Family::Experts, Family::Latent] {
            let Some(gpu) = of_nvidia(Variant::Fast) else { return };
            let context = Context::gpu(Arc::new(small(gpu, family)));
            let mut report = Remembering(|check: Check| assert!(check.passed, "{}", check.name));
            family.check(&context, Effort::Small, &mut report);
        }
    });
}

#[test]
fn in_order() {
    check(Emulator::new(Variant::Fast).map(|gpu| gpu.with_timing(Timing::Late)));
}

/// The limit of a kernel that takes all registers.
const FEWEST_THREADS: usize = 384;

/// On a device with the fewest threads of any, into which every kernel fits.
#[test]
fn in_any_order_with_the_fewest_threads() {
    on_its_day("ops::in_any_order_with_the_fewest_threads", || {
        let gpu = Emulator::new(Variant::Fast).map(|gpu| gpu.with_order(Order::Random(1)));
        check(gpu.map(|gpu| gpu.with_max_threads(FEWEST_THREADS)));
    });
}

#[test]
fn checked() {
    on_its_day("ops::checked", || {
        check(Emulator::new(Variant::Checked));
    });
}

#[test]
fn reversed_with_fast_math() {
    on_its_day("ops::reversed_with_fast_math", || {
        check(Emulator::new(Variant::FastMath).map(|gpu| gpu.with_order(Order::Reversed)));
    });
}

#[test]
fn the_sanitizers_find_nothing() {
    on_its_day("ops::the_sanitizers_find_nothing", || {
        if let Some(result) = run_again("ops::in_order") {
            println!("{}", result.unwrap());
        }
    });
}

/// Devices that lack one barrier each, in every order that threads may run in: a barrier that could be left out unseen would be
/// either one too many or one too few checks.
pub(crate) fn barriers() -> impl Iterator<Item = Wanted<'static>> {
    LIBRARIES.into_iter().flat_map(|library| {
        let family = match library.name {
            "matvec" | "matmul" => Family::Matmul,
            "rope" | "paged_attention" | "flash_attention" => Family::Attention,
            "latent" | "latent_attention" => Family::Latent,
            "experts" => Family::Experts,
            "sampling" => Family::Sampling,
            "probe" => Family::Probes,
            _ => Family::Rows,
        };
        let barriers = Emulator::new(Variant::Checked).map(|gpu| gpu.barriers(library).unwrap());
        let mut counts = HashMap::<String, usize>::new();
        barriers.into_iter().flatten().enumerate().map(move |(index, Barrier { call, file, .. })| {
            // Not its line, which changes whenever one is added before it.
            let call = format!("{}: {file}: {call}", library.name);
            let number = counts.entry(call.clone()).or_default();
            *number += 1;
            let device = move |order: Order| -> Device<'static> {
                let name = match order {
                    Order::Forward => "forward",
                    Order::Reversed => "reversed",
                    Order::Random(_) => "random",
                };
                let gpu = move || {
                    Some(Emulator::new(Variant::Checked)?.with_order(order).without_barrier(library, index))
                };
                (name, Box::new(move || Some(Arc::new(gpu()?))))
            };
            Wanted {
                name: format!("barriers: {call} {number}"),
                family,
                devices: [Order::Forward, Order::Reversed, Order::Random(1)].map(device).into(),
                likely: Vec::new(),
            }
        })
    })
}
