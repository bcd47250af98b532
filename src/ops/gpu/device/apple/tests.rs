//! Tests of the foundation on the device itself: order, copies, limits, lifetimes.

use std::io::Write;

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{MTLDataType, MTLFunction, MTLLibrary};

use super::pipelines::compile_options;
use super::*;
use crate::ops::gpu::{Binding, LIBRARIES};

static LIBRARY: Library = Library {
    name: "test",
    source: "#include <metal_stdlib>
using namespace metal;
constant bool negate [[function_constant(0)]];
constant ushort factor [[function_constant(1)]];
struct Args { uint count; int addend; };
kernel void scale_add(constant Args &args [[buffer(0)]], device const int *in [[buffer(1)]],
                      device int *out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i < args.count) {
        const int value = in[i] * factor + args.addend;
        out[i] = negate ? -value : value;
    }
}
kernel void reverse(constant Args &args [[buffer(0)]], device int *values [[buffer(1)]],
                    threadgroup int *copy [[threadgroup(0)]], uint i [[thread_position_in_threadgroup]]) {
    copy[i] = values[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    values[i] = copy[args.count - 1 - i];
}
",
};

static BROKEN: Library = Library { name: "broken", source: "kernel void f( {}" };

/// Without a device there is nothing to test: the error of `open` is tested with `--device`.
fn gpu() -> Option<AppleGpu> {
    match AppleGpu::open() {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// The device, even if the kernels cannot run on it: it compiles them all the same. CI's virtual machines have such a
/// device.
fn compiling_device() -> Option<Device> {
    let device = Device::system_default();
    if device.is_none() {
        eprintln!("skipped: the system has no Metal device for this process");
    }
    device
}

/// A library from the system's compiler, and its messages.
fn compile(device: &Device, text: &str) -> (Option<Retained<ProtocolObject<dyn MTLLibrary>>>, String) {
    let (source, options) = (NSString::from_str(text), compile_options());
    let mut said: Option<Retained<NSError>> = None;
    // SAFETY: these are the types of the method's arguments and of its result. Unlike objc2's method, this returns the
    // error of a library that compiled, which has its warnings.
    let library = unsafe {
        objc2::msg_send![device.as_ref(), newLibraryWithSource: &*source, options: &*options, error: &mut said]
    };
    (library, said.map(|said| said.localizedDescription().to_string()).unwrap_or_default())
}

#[test]
fn the_systems_compiler_takes_every_library_without_a_warning() {
    let Some(device) = compiling_device() else { return };
    for library in LIBRARIES {
        let (compiled, said) = compile(&device, &library.text());
        assert!(compiled.is_some() && said.is_empty(), "{}.metal: {said}", library.name);
    }
    // A warning is reported.
    let (compiled, said) = compile(&device, "kernel void k(device int *x [[buffer(0)]]) { int y = x[0]; }\n");
    assert!(compiled.is_some() && said.contains("unused variable"), "{said}");
    let (compiled, said) = compile(&device, BROKEN.source);
    assert!(compiled.is_none() && said.contains("error"), "{said}");
}

/// With none and with all of the flags that it knows.
#[test]
fn every_kernel_becomes_a_pipeline() {
    let Some(gpu) = gpu() else { return };
    for library in LIBRARIES {
        let (compiled, said) = compile(&gpu.device, &library.text());
        let compiled = compiled.unwrap_or_else(|| panic!("{}.metal: {said}", library.name));
        for name in compiled.functionNames() {
            let function = compiled.newFunctionWithName(&name).unwrap();
            let known = function.functionConstantsDictionary().allValues();
            for flag in [false, true] {
                let constants = known.iter().map(|constant| {
                    let index = u32::try_from(constant.index()).unwrap();
                    match constant.r#type() {
                        MTLDataType::Bool => Constant::Bool(index, flag),
                        _ => Constant::U16(index, 64),
                    }
                });
                gpu.pipeline(library, &name.to_string(), &constants.collect::<Vec<_>>()).unwrap();
            }
        }
    }
}

fn bytes_of(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn read(gpu: &AppleGpu, buffer: &GpuBuffer, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xA5; len];
    gpu.read(buffer, offset, &mut bytes).unwrap();
    bytes
}

fn scale_add(gpu: &AppleGpu, factor: u16, addend: i32, input: Binding<'_>, output: Binding<'_>) {
    let constants = [Constant::Bool(0, false), Constant::U16(1, factor)];
    let pipeline = gpu.pipeline(&LIBRARY, "scale_add", &constants).unwrap();
    let args = bytes_of(&[64, addend]);
    let buffers = [input, output];
    let launch = Launch {
        pipeline,
        args: &args,
        buffers: &buffers,
        threadgroup_memory: 0,
        grid: [2, 1, 1],
        num_threads: 32,
    };
    gpu.dispatch(&launch).unwrap();
}

#[test]
fn memory_is_zeroed_and_any_range_can_be_copied() {
    let Some(gpu) = gpu() else { return };
    assert!(gpu.working_set_bytes() > 1 << 28, "{gpu:?} {}", gpu.working_set_bytes());
    for placement in [Placement::Private, Placement::Shared] {
        let buffer = gpu.allocate(1_003, placement).unwrap();
        assert_eq!(buffer.len(), 1_003);
        assert_eq!(buffer.0.host().is_some(), placement == Placement::Shared);
        let mut expected = vec![0; 1_003];
        assert_eq!(read(&gpu, &buffer, 0, 1_003), expected);
        for (offset, len) in [(0, 16), (5, 1), (7, 9), (100, 4), (1_002, 1), (990, 13), (3, 0), (1_003, 0)] {
            let bytes: Vec<u8> = (0..len).map(|i| (offset + i + 1) as u8).collect();
            gpu.write(&buffer, offset, &bytes).unwrap();
            expected[offset..offset + len].copy_from_slice(&bytes);
            assert_eq!(read(&gpu, &buffer, offset, len), bytes);
        }
        assert_eq!(read(&gpu, &buffer, 0, 1_003), expected);
        for (offset, len) in [(1_003, 1), (1_000, 4), (usize::MAX, 2)] {
            assert_eq!(gpu.write(&buffer, offset, &vec![0; len]).unwrap_err().kind(), ErrorKind::Internal);
            assert_eq!(gpu.read(&buffer, offset, &mut vec![0; len]).unwrap_err().kind(), ErrorKind::Internal);
        }
    }
    assert_eq!(gpu.allocate(1 << 50, Placement::Private).unwrap_err().kind(), ErrorKind::Capacity);
    assert_eq!(gpu.allocate(usize::MAX, Placement::Shared).unwrap_err().kind(), ErrorKind::Capacity);
}

#[test]
fn uploads_larger_than_the_staging_memory_arrive() {
    let Some(gpu) = gpu() else { return };
    let bytes: Vec<u8> = (0..STAGING_BYTES * 2 + 4_096).map(|i| (i % 253) as u8).collect();
    let buffer = gpu.allocate(bytes.len(), Placement::Private).unwrap();
    gpu.write(&buffer, 0, &bytes).unwrap();
    assert!(read(&gpu, &buffer, 0, bytes.len()) == bytes, "an upload in chunks differs");
}

#[test]
fn each_dispatch_sees_what_earlier_ones_wrote() {
    let Some(gpu) = gpu() else { return };
    let input = gpu.allocate(256, Placement::Shared).unwrap();
    let [a, b] = [Placement::Private, Placement::Shared].map(|place| gpu.allocate(256, place).unwrap());
    let mut expected: Vec<i32> = (0..64).collect();
    gpu.write(&input, 0, &bytes_of(&expected)).unwrap();
    scale_add(&gpu, 1, 0, Binding::read(&input), Binding::write(&a));
    // More dispatches than a command buffer takes, and some early commits, so that encoders are covered as well.
    let mut tickets = Vec::new();
    for i in 0..2 * 512 {
        let (from, to) = if i % 2 == 0 { (&a, &b) } else { (&b, &a) };
        scale_add(&gpu, (i % 5 == 0).into(), i, Binding::read(from), Binding::write(to));
        for value in &mut expected {
            *value = *value * i32::from(i % 5 == 0) + i;
        }
        if i % 100 == 0 {
            tickets.push(gpu.commit().unwrap());
        }
        if i % 300 == 0 {
            gpu.wait(tickets[tickets.len() / 2]).unwrap();
        }
    }
    assert_eq!(read(&gpu, &a, 0, 256), bytes_of(&expected));
    let last = gpu.commit().unwrap();
    assert!(tickets.is_sorted() && tickets.iter().all(|ticket| *ticket <= last));
    for ticket in tickets.into_iter().rev() {
        gpu.wait(ticket).unwrap();
    }
}

#[test]
fn a_ticket_makes_shared_memory_readable_and_buffers_may_go_early() {
    let Some(gpu) = gpu() else { return };
    let output = gpu.allocate(256, Placement::Shared).unwrap();
    let host = output.0.host().unwrap();
    for round in 0..50 {
        let input = gpu.allocate(256, Placement::Private).unwrap();
        gpu.write(&input, 0, &bytes_of(&[round; 64])).unwrap();
        scale_add(&gpu, 2, 7, Binding::read(&input), Binding::write(&output));
        drop(input);
        let ticket = gpu.commit().unwrap();
        gpu.wait(ticket).unwrap();
        // SAFETY: the buffer is 256 bytes long and lives, and the device has been waited for.
        let bytes = unsafe { std::slice::from_raw_parts(host.as_ptr(), 256) };
        assert_eq!(bytes, bytes_of(&[2 * round + 7; 64]));
    }
}

#[test]
fn threadgroup_memory_is_per_dispatch() {
    let Some(gpu) = gpu() else { return };
    let values = gpu.allocate(256, Placement::Private).unwrap();
    let numbers: Vec<i32> = (0..64).collect();
    gpu.write(&values, 0, &bytes_of(&numbers)).unwrap();
    let reverse = gpu.pipeline(&LIBRARY, "reverse", &[]).unwrap();
    let args = bytes_of(&[64, 0]);
    let buffers = [Binding::read_write(&values)];
    let launch = Launch {
        pipeline: reverse,
        args: &args,
        buffers: &buffers,
        threadgroup_memory: 256,
        grid: [1, 1, 1],
        num_threads: 64,
    };
    gpu.dispatch(&launch).unwrap();
    scale_add(&gpu, 1, 1, Binding::read(&values), Binding::read_write(&values));
    gpu.dispatch(&launch).unwrap();
    gpu.dispatch(&launch).unwrap();
    let expected: Vec<i32> = (1..=64).rev().collect();
    assert_eq!(read(&gpu, &values, 0, 256), bytes_of(&expected));

    let refused = |launch: Launch<'_>| {
        let error = gpu.dispatch(&launch).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
        assert!(error.message().contains("reverse"), "{error}");
    };
    refused(Launch { num_threads: 33, ..launch });
    refused(Launch { num_threads: 2_048, ..launch });
    refused(Launch { grid: [1, 0, 1], ..launch });
    refused(Launch { threadgroup_memory: 1 << 20, ..launch });
    refused(Launch { args: &[0; 4097], ..launch });
    refused(Launch { buffers: &[buffers[0].at(256)], ..launch });
}

#[test]
fn pipelines_are_compiled_once_and_errors_name_the_kernel() {
    let Some(gpu) = gpu() else { return };
    let constants = |negate, factor| [Constant::Bool(0, negate), Constant::U16(1, factor)];
    let first = gpu.pipeline(&LIBRARY, "scale_add", &constants(true, 3)).unwrap();
    assert_eq!(gpu.pipeline(&LIBRARY, "scale_add", &constants(true, 3)).unwrap(), first);
    assert_ne!(gpu.pipeline(&LIBRARY, "scale_add", &constants(true, 4)).unwrap(), first);
    // Also for threads that request one at the same time.
    let compile = || gpu.pipeline(&LIBRARY, "scale_add", &constants(false, 5)).unwrap();
    let compiled: Vec<Pipeline> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(compile)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(compiled.iter().all(|pipeline| *pipeline == compiled[0] && *pipeline != first), "{compiled:?}");
    let error = gpu.pipeline(&LIBRARY, "absent", &[]).unwrap_err();
    assert!(error.message().contains("absent of test.metal"), "{error}");
    let error = gpu.pipeline(&BROKEN, "f", &[]).unwrap_err();
    assert!(error.message().contains("broken.metal"), "{error}");
}

#[test]
fn a_mapped_file_is_read_in_place_and_not_written() {
    let Some(gpu) = gpu() else { return };
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let values: Vec<i32> = (0..20_000).collect();
    file.write_all(&bytes_of(&values)).unwrap();
    let bytes = SharedBytes::of_file(file.path(), 40_000..40_000 + 256);
    let (buffer, offset) = gpu.wrap(&bytes).unwrap().expect("the device reads mapped files");
    assert_eq!((buffer.len() % (16 << 10), offset), (0, 40_000 % (16 << 10)));
    // The buffer keeps the file mapped, and queued work keeps the buffer.
    drop(bytes);
    assert_eq!(read(&gpu, &buffer, offset, 256), bytes_of(&values[10_000..10_064]));
    let output = gpu.allocate(256, Placement::Shared).unwrap();
    scale_add(&gpu, 1, 5, Binding::read(&buffer).at(offset), Binding::write(&output));
    let pipeline = gpu.pipeline(&LIBRARY, "reverse", &[]).unwrap();
    let buffers = [Binding::read_write(&buffer)];
    let written = Launch {
        pipeline,
        args: &[0; 8],
        buffers: &buffers,
        threadgroup_memory: 256,
        grid: [1; 3],
        num_threads: 64,
    };
    assert_eq!(gpu.dispatch(&written).unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(gpu.write(&buffer, offset, &[0; 4]).unwrap_err().kind(), ErrorKind::Internal);
    drop(buffer);
    let expected: Vec<i32> = (10_005..10_069).collect();
    assert_eq!(read(&gpu, &output, 0, 256), bytes_of(&expected));
}
