//! Tests without a GPU: from the kernels' source to code, with the compiler if there is one.

use std::env;

use cudarc::driver::sys::CUresult;

use super::driver::is_lost;
use super::nvrtc::{Nvrtc, Target};
use super::pipelines::OPTIONS;
use super::source::{HEADERS, program};
use crate::ops::gpu::{CUDA_LIBRARIES, Constant, LIBRARIES, Library};

static SAMPLE: Library = Library {
    name: "sample",
    source: "#include <metal_stdlib>
constant bool IS_LONG [[function_constant(0)]];
constant ushort WIDTH [[function_constant(1)]];
struct Args { uint count; };
template <class T>
[[kernel]] void copy(
    constant Args& a [[buffer(0)]],
    device const T* in [[buffer(1)]],
    device T* out [[buffer(2)]],
    threadgroup float* memory [[threadgroup(0)]],
    uint2 place [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    threadgroup float values[4];
    threadgroup float* other = memory;
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
#pragma clang loop unroll_count(2)
    }
}
[[kernel]] void clear(
    device uint* out [[buffer(1)]]
) {
}
",
};

fn constants(is_long: bool) -> [Constant; 2] {
    [Constant::Bool(0, is_long), Constant::U16(1, 64)]
}

#[test]
fn a_library_becomes_a_program_with_one_kernel() {
    let program = program(&SAMPLE, "copy_f32", &constants(true)).unwrap();
    assert_eq!(program.entry, "msl_copy_f32");
    for line in [
        "#define MSL_WANTED_copy_f32 0, 1",
        "#define MSL_PARAMETERS_copy {0, 0}, {0, 1}, {0, 2}, {1, 0}, {2, 2}, {2, 7}, ",
        "#define MSL_PARAMETERS_clear {0, 1}, ",
        "constexpr bool IS_LONG = true;",
        "constexpr ushort WIDTH = 64;",
        " void copy(",
        "    device const T* in,",
        "    uint lane",
        "    __shared__ float values[4];",
        "    threadgroup float* other = memory;",
        "#pragma unroll",
        "#pragma unroll 2",
        "MSL_PLAIN(clear)",
    ] {
        assert!(program.text.lines().any(|found| found == line), "no line {line:?} in\n{}", program.text);
    }
    // One of another kernel.
    let without = super::source::program(&SAMPLE, "clear", &[]).unwrap();
    assert!(without.text.contains("constexpr bool IS_LONG = 0;"));
    assert!(!program.text.contains("MSL_PLAIN(copy)") && !program.text.contains("metal_stdlib"));
}

#[test]
fn what_is_not_understood_is_an_error() {
    let error = |source: &'static str, constants: &[Constant]| {
        let library: &'static Library = Box::leak(Box::new(Library { name: "wrong", source }));
        program(library, "f", constants).unwrap_err().message().to_owned()
    };
    assert!(
        error("\n[[kernel]] void f(\n    uint a [[no_such_place]]\n) {\n}\n", &[]).contains("no_such_place")
    );
    assert!(error("\n[[kernel]] void f(\n    uint a [[buffer(x)]]\n) {\n}\n", &[]).contains("buffer(x)"));
    assert!(error("constant bool A [[function_constant(x)]];\n", &[]).contains("function constant"));
    assert!(error("#pragma clang loop vectorize(enable)\n", &[]).contains("vectorize"));
    assert!(error("int x [[maybe_unused;\n", &[]).contains("attribute"));
}

/// The compiler, if this machine has it.
fn compiler() -> Option<&'static Nvrtc> {
    match Nvrtc::load() {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            assert!(env::var_os("TINYVLLM_REQUIRE_NVRTC").is_none(), "{error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn compile(compiler: &Nvrtc, name: &str, constants: &[Constant], target: Target) -> String {
    let libraries = LIBRARIES.iter().chain(&CUDA_LIBRARIES);
    let library =
        libraries.copied().find(|library| library.text().contains(&format!("void {}(", stem(name))));
    let library = library.unwrap_or_else(|| panic!("no library has {name}"));
    let program = program(library, name, constants).unwrap();
    let options = [&OPTIONS[..], &["--ptxas-options=-v"]].concat();
    let compiled = compiler.compile(name, &program.text, &HEADERS, target, &options).unwrap();
    assert!(
        compiled.image.windows(program.entry.len()).any(|part| part == program.entry.as_bytes()),
        "{name}"
    );
    compiled.messages
}

/// The kernel of a name with its arguments.
fn stem(name: &str) -> &str {
    let end = ["_f16", "_Q", "_bf16", "_F16", "_BF16", "_two"]
        .map(|end| name.find(end))
        .into_iter()
        .flatten()
        .min();
    &name[..end.unwrap_or(name.len())]
}

fn attention(has_spans: bool, head_dim: u16, value_dim: u16) -> Vec<Constant> {
    vec![Constant::Bool(0, has_spans), Constant::U16(3, head_dim), Constant::U16(4, value_dim)]
}

/// Bytes that a kernel spills to memory.
fn spills(messages: &str) -> usize {
    let (before, _) = messages.split_once(" bytes spill stores").unwrap();
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Scores and results of all rows take all registers of a thread; the compiler may spill a value or two.
#[test]
fn attention_of_prompts_keeps_everything_in_registers() {
    let Some(compiler) = compiler() else { return };
    for (name, constants) in [
        ("prefill_attention_f16_64", attention(false, 64, 64)),
        ("prefill_attention_bf16_64", attention(false, 64, 64)),
        ("prefill_attention_f16_128", attention(false, 80, 80)),
        ("prefill_attention_f16_128", attention(false, 128, 128)),
        ("prefill_attention_bf16_128", attention(false, 128, 128)),
        ("prefill_attention_f16_128", attention(true, 192, 128)),
        ("prefill_attention_f16_256", attention(true, 256, 256)),
        ("prefill_attention_bf16_256", attention(false, 256, 256)),
    ] {
        let messages = compile(compiler, name, &constants, compiler.target(90));
        assert!(spills(&messages) <= 16, "{name} {constants:?}: {messages}");
    }
}

/// The compiler reports serialised matmuls as a message, not as an error.
#[test]
fn gemms_with_many_rows_stay_in_flight() {
    let Some(compiler) = compiler() else { return };
    let formats = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "Q4_K_Q6_K"];
    let names = formats.iter().map(|format| format!("many_rows_{format}_256"));
    let others = ["many_rows_swiglu_Q4_0_64", "many_rows_swiglu_F16_128", "many_rows_F16_64"];
    // Added to the previous values.
    let constants = |num_k_splits, cluster| {
        let flags = (0..5).map(|index| Constant::Bool(index, index == 2));
        flags.chain([Constant::U16(6, num_k_splits), Constant::U16(7, cluster)]).collect::<Vec<_>>()
    };
    for name in names.chain(others.map(str::to_owned)) {
        let clusters: &[u16] = if name.contains("F16") { &[0, 2] } else { &[0] };
        let all_k_splits: &[u16] = if name.contains("swiglu") { &[1] } else { &[1, 4] };
        for (&num_k_splits, &cluster) in
            all_k_splits.iter().flat_map(|k_splits| clusters.iter().map(move |cluster| (k_splits, cluster)))
        {
            let messages = compile(compiler, &name, &constants(num_k_splits, cluster), compiler.target(90));
            println!("{name} {num_k_splits} {cluster}: {messages}");
            // After the loop, the previous values take more registers than there are.
            assert!(spills(&messages) <= 128 && !messages.contains("serialized"), "{name}: {messages}");
        }
    }
    // GPUs without the instruction, with clusters anyway.
    for (name, cluster) in [("many_rows_Q4_0_128", 0), ("many_rows_F16_128", 2)] {
        for target in [Target::Gpu(80), compiler.target(120)] {
            compile(compiler, name, &constants(1, cluster), target);
        }
    }
}

/// With a norm and all activations in shared memory.
fn few(num_stages: u16) -> Vec<Constant> {
    let flags = (0..6).map(|index| Constant::Bool(index, index == 0 || index == 5));
    flags.chain([Constant::U16(6, num_stages), Constant::U16(7, 4)]).collect()
}

/// The compiler would save registers for a second thread block of an SM, which takes a quarter longer.
#[test]
fn gemvs_have_the_registers_that_they_want() {
    let Some(compiler) = compiler() else { return };
    for format in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16"] {
        for name in [format!("few_rows_{format}_1"), format!("few_rows_swiglu_{format}_1")] {
            let messages = compile(compiler, &name, &few(3), compiler.target(90));
            let registers =
                messages.split(" registers").next().and_then(|start| start.split(' ').next_back());
            let registers: usize = registers.and_then(|number| number.parse().ok()).unwrap();
            assert!(spills(&messages) == 0 && registers > 64, "{name}: {messages}");
        }
    }
}

/// Sums of slices, of quarters, of halves and of all.
#[test]
fn gemms_of_several_rows_fit_in_registers() {
    let Some(compiler) = compiler() else { return };
    let flags = || (0..5).map(|index| Constant::Bool(index, index == 0));
    for format in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "Q4_K_Q6_K"] {
        for num_k_splits in [1, 4] {
            let constants: Vec<_> =
                flags().chain([Constant::U16(5, num_k_splits), Constant::U16(6, 4)]).collect();
            let name = format!("several_rows_{format}_8");
            let messages = compile(compiler, &name, &constants, compiler.target(90));
            println!("{name} {num_k_splits}: {messages}");
            // Once per slice, not for each matmul.
            assert!(spills(&messages) <= 128, "{name}: {messages}");
        }
    }
}

#[test]
fn kernels_compile_for_gpus_that_it_knows_and_that_it_does_not() {
    let Some(compiler) = compiler() else { return };
    let flags = |len: u32| (0..len).map(|index| Constant::Bool(index, index == 0)).collect::<Vec<_>>();
    let flash = attention(false, 64, 64);
    for (name, constants) in [
        ("matvec_Q4_0_1", flags(4)),
        ("matvec_swiglu_Q6_K_2", flags(4)),
        ("matmul_Q8_0_32", flags(5)),
        ("few_rows_Q4_K_Q6_K_2", few(2)),
        ("few_rows_swiglu_F16_2", few(3)),
        ("several_rows_swiglu_Q8_0_4", few(4)),
        ("reduce_splits", vec![Constant::U16(5, 2)]),
        ("pack_in_order_two_apart", flags(1)),
        ("pack_rows_two_apart", flags(1)),
        ("flash_attention_f16_64_32", flash),
        ("paged_attention_bf16_4_16", Vec::new()),
        ("paged_attention_merge", Vec::new()),
        ("decode_attention_f16_128", vec![Constant::Bool(2, true), Constant::U16(5, 64)]),
        ("decode_attention_merge", vec![Constant::U16(5, 64)]),
        ("decode_latent_attention_f16_16", vec![Constant::U16(0, 576), Constant::U16(1, 512)]),
        ("decode_latent_attention_merge", Vec::new()),
        ("latent_attention_f16", Vec::new()),
        ("latent_kv_write_f16", flags(1)),
        ("rope_kv_write_bf16", flags(2)),
        ("norm_residual", Vec::new()),
        ("embed_Q4_K", Vec::new()),
        ("embed_tiled_Q6_K", Vec::new()),
        ("choose_experts", Vec::new()),
        ("sample", Vec::new()),
        ("probe_matrices", Vec::new()),
    ] {
        let messages = compile(compiler, name, &constants, compiler.target(90));
        assert!(messages.contains(" registers"), "{name}: {messages}");
        println!("{name}: {messages}");
    }
    assert_eq!(compiler.target(90), Target::Gpu(90));
    let Target::From(known) = compiler.target(999) else { panic!("a GPU of the far future is known") };
    compile(compiler, "silu_mul", &[], Target::From(known));
    let library = LIBRARIES.iter().find(|library| library.name == "rows").unwrap();
    let program = program(library, "silu_mul", &[]).unwrap();
    let broken =
        program.text.replace("[[kernel]]", "").replace("void silu_mul(", "void silu_mul(no_such_type x, ");
    let error = compiler.compile("broken", &broken, &HEADERS, Target::Gpu(90), &OPTIONS).unwrap_err();
    assert!(error.message().contains("no_such_type") && error.message().contains("rows.metal("), "{error}");
}

/// The engine continues after the others, and ends after these.
#[test]
fn a_gpu_is_lost_for_good_or_not_at_all() {
    for lost in [
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_LAUNCH_FAILED,
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
        CUresult::CUDA_ERROR_UNKNOWN,
    ] {
        assert!(is_lost(lost), "{lost:?}");
    }
    for passing in [
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        CUresult::CUDA_ERROR_INVALID_VALUE,
        CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
    ] {
        assert!(!is_lost(passing), "{passing:?}");
    }
}
