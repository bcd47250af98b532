//! The language and its library as the emulator has them: kernels whose results are easy to check, in every
//! build and every order of threads.

use bytemuck::Pod;
use half::{bf16, f16};
use tinyvllm::Result;
use tinyvllm::ops::gpu::{Binding, ChipClass, Constant, Gpu, Launch, Library, Placement, Ticket};

use crate::buffers::{buffer, values};
use crate::emulator::{Barrier, Emulator, Order, Timing, Variant, barriers_without_need, run_again};

static LANGUAGE: Library = Library { name: "language", source: include_str!("kernels/language.metal") };

/// Every build and every order, with work done early and late.
fn everywhere(check: impl Fn(&Emulator) -> Result<()>) {
    let orders = [Order::Forward, Order::Reversed, Order::Random(1), Order::Random(2)];
    for variant in [Variant::Fast, Variant::FastMath, Variant::Checked] {
        for order in orders {
            for timing in [Timing::Early, Timing::Late] {
                let Some(gpu) = Emulator::new(variant) else { return };
                let gpu = gpu.with_order(order).with_timing(timing);
                check(&gpu).unwrap_or_else(|error| panic!("{variant:?}, {order:?}, {timing:?}: {error}"));
            }
        }
    }
}

/// Dispatches a kernel without constants and arguments, and waits for it.
fn dispatch(
    gpu: &Emulator,
    kernel: &str,
    buffers: &[Binding<'_>],
    threadgroup_memory: usize,
    [grid, num_threads]: [usize; 2],
) -> Result<Ticket> {
    let pipeline = gpu.pipeline(&LANGUAGE, kernel, &[])?;
    let grid = [grid, 1, 1];
    gpu.dispatch(&Launch { pipeline, args: &[], buffers, threadgroup_memory, grid, num_threads })?;
    gpu.commit()
}

fn row_sums<T: Pod>(gpu: &Emulator, kernel: &str, of: impl Fn(f32) -> T) -> Result<()> {
    // Small whole numbers: every order of additions gives the same sum, in every type.
    let (num_rows, num_columns) = (3_usize, 132_usize);
    let rows: Vec<f32> = (0..num_rows * num_columns).map(|i| (i % 7) as f32 - 2.0).collect();
    let x = buffer(gpu, &rows.iter().map(|&value| of(value)).collect::<Vec<T>>());
    let out = gpu.allocate(16, Placement::Shared)?;
    for (doubled, offset) in [(false, 0), (true, 300)] {
        let constants = [Constant::Bool(3, doubled), Constant::U16(4, offset)];
        let pipeline = gpu.pipeline(&LANGUAGE, kernel, &constants)?;
        assert_eq!(gpu.pipeline(&LANGUAGE, kernel, &constants)?, pipeline);
        let mut args = u32::try_from(num_columns).unwrap().to_ne_bytes().to_vec();
        args.extend(0.5_f32.to_ne_bytes());
        gpu.dispatch(&Launch {
            pipeline,
            args: &args,
            buffers: &[Binding::read(&x), Binding::write(&out)],
            threadgroup_memory: 0,
            grid: [num_rows, 1, 1],
            num_threads: 64,
        })?;
        gpu.wait(gpu.commit()?)?;
        let factor = if doubled { 1.0 } else { 0.5 };
        let sum = |row: &[f32]| factor * row.iter().sum::<f32>() + f32::from(offset);
        let expected: Vec<f32> = rows.chunks(num_columns).map(sum).collect();
        assert_eq!(values::<f32>(gpu, &out, num_rows), expected, "{kernel}");
    }
    assert_eq!(gpu.num_dispatches()[kernel], 2);
    Ok(())
}

fn matrix_matmul(gpu: &Emulator) -> Result<()> {
    let a: Vec<f16> = (0..64_u8).map(|i| f16::from(i % 5)).collect();
    let b: Vec<f32> = (0..64_u8).map(|i| f32::from(i % 11) - 4.0).collect();
    let (left, right) = (buffer(gpu, &a), buffer(gpu, &b));
    let out = gpu.allocate(256, Placement::Private)?;
    let buffers = [Binding::read(&left), Binding::read(&right), Binding::write(&out)];
    gpu.wait(dispatch(gpu, "matrix_matmul", &buffers, 256, [1, 32])?)?;
    let element = |i: usize| -> f32 {
        let (row, column) = (i / 8, i % 8);
        1.0 + (0..8).map(|k| f32::from(a[row * 8 + k]) * b[column * 8 + k]).sum::<f32>()
    };
    assert_eq!(values::<f32>(gpu, &out, 64), (0..64).map(element).collect::<Vec<_>>());
    Ok(())
}

fn histogram(gpu: &Emulator) -> Result<()> {
    let numbers: Vec<u8> = (0..192_u32).map(|i| (i * i % 16) as u8).collect();
    let (x, counts) = (buffer(gpu, &numbers), buffer(gpu, &[1_u32; 16]));
    let buffers = [Binding::read(&x), Binding::read_write(&counts)];
    gpu.wait(dispatch(gpu, "histogram", &buffers, 0, [3, 64])?)?;
    let count = |value: u8| 1 + numbers.iter().filter(|number| **number == value).count() as u32;
    assert_eq!(values::<u32>(gpu, &counts, 16), (0..16).map(count).collect::<Vec<_>>());
    Ok(())
}

fn exchanges(gpu: &Emulator) -> Result<()> {
    let out = gpu.allocate(128 * 8 * 4, Placement::Private)?;
    gpu.wait(dispatch(gpu, "exchanges", &[Binding::write(&out)], 0, [2, 64])?)?;
    let of_lane = |lane: u32| {
        let square = |lane: u32| lane * lane;
        let next = if lane < 31 { lane + 1 } else { lane };
        let ballot = (0..32).filter(|lane| lane % 3 == 0).map(|lane| 1 << lane).sum();
        let before: u32 = (0..lane).map(square).sum();
        [square(lane ^ 5), before, before + square(lane), ballot, square(31), square(7), square(next), 1]
    };
    let expected: Vec<u32> = (0..128).flat_map(|thread| of_lane(thread % 32)).collect();
    assert_eq!(values::<u32>(gpu, &out, 128 * 8), expected);
    Ok(())
}

fn bits(gpu: &Emulator) -> Result<()> {
    let numbers: Vec<f32> = (0..96_u8).map(|i| f32::from(i) * 0.37).collect();
    let x = buffer(gpu, &numbers);
    let bytes = gpu.allocate(128, Placement::Private)?;
    let pairs = gpu.allocate(128, Placement::Private)?;
    let buffers = [Binding::read(&x), Binding::write(&bytes), Binding::write(&pairs)];
    gpu.wait(dispatch(gpu, "bits", &buffers, 0, [1, 32])?)?;
    let last: Vec<u8> = numbers.chunks(3).flat_map(|three| three[2].to_ne_bytes()).collect();
    assert_eq!(values::<u8>(gpu, &bytes, 128), last);
    let pair = |three: &[f32]| [f16::from_f32(three[0]), f16::from_f32(1.5)].map(f16::to_bits);
    let first: Vec<u16> = numbers.chunks(3).flat_map(pair).collect();
    assert_eq!(values::<u16>(gpu, &pairs, 64), first);
    Ok(())
}

fn all(gpu: &Emulator) -> Result<()> {
    row_sums(gpu, "row_sums_f32", |value| value)?;
    row_sums(gpu, "row_sums_f16", f16::from_f32)?;
    row_sums(gpu, "row_sums_bf16", bf16::from_f32)?;
    matrix_matmul(gpu)?;
    histogram(gpu)?;
    exchanges(gpu)?;
    bits(gpu)
}

#[test]
fn every_kernel_gives_what_the_language_says() {
    everywhere(|gpu| {
        all(gpu)?;
        let run: Vec<String> = gpu.num_dispatches().into_keys().collect();
        let mut known = gpu.kernels(&LANGUAGE)?;
        known.sort();
        assert_eq!(run, known);
        Ok(())
    });
}

#[test]
fn late_work_is_not_seen_before_the_host_waits() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let gpu = gpu.with_timing(Timing::Late);
    let out = gpu.allocate(128 * 8 * 4, Placement::Shared).unwrap();
    let ticket = dispatch(&gpu, "exchanges", &[Binding::write(&out)], 0, [2, 64]).unwrap();
    let first = out.0.host().unwrap().cast::<u32>();
    // SAFETY: the buffer is longer, and no work is being done.
    assert_eq!(unsafe { first.read() }, 0);
    gpu.wait(ticket).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { first.read() }, 25);
    assert!(gpu.allocate(16, Placement::Private).unwrap().0.host().is_none());
    assert!(gpu.wait(tinyvllm::ops::gpu::Ticket(2)).is_err());
}

#[test]
fn the_device_appears_as_configured() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let gpu = gpu.with_class(ChipClass::Ultra).with_working_set(1 << 20);
    assert_eq!((gpu.class(), gpu.working_set_bytes()), (ChipClass::Ultra, 1 << 20));
}

#[test]
fn the_library_compiles_as_the_stricter_languages() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    gpu.check_language(&LANGUAGE).unwrap();
}

#[test]
fn every_barrier_is_needed() {
    let Some(gpu) = Emulator::new(Variant::Checked) else { return };
    let calls: Vec<Barrier> = gpu.barriers(&LANGUAGE).unwrap();
    assert_eq!(calls.len(), 4);
    assert!(calls.iter().all(|barrier| barrier.file == "language.metal"), "{calls:?}");
    assert_eq!(barriers_without_need(&LANGUAGE, |gpu| all(gpu)), []);
    // Cases that test nothing miss every barrier.
    assert_eq!(barriers_without_need(&LANGUAGE, |_| Ok(())), calls);
}

#[test]
fn the_sanitizers_find_nothing() {
    let Some(output) = run_again("language::every_kernel") else { return };
    let output = output.unwrap();
    assert!(output.contains("1 passed"), "{output}");
}
