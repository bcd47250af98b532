//! The rules of the kernels' language that clang does not check: Apple's compiler rejects violations that C++ would
//! accept. Each has one defect, which has to be found, and a correct source next to it.
//!
//! They follow the published specification of version 3.1 and known messages of the compiler. Where the language allows
//! constructs that this project's kernels do not need (buffers without numbers, other function constants), the rule is
//! stricter than the language.

mod code;
mod compiled;
mod kernels;

use super::outline::Outline;
use super::tokens::Token;

/// The violation, and its location.
pub(super) struct Finding {
    location: String,
    what: String,
}

impl Finding {
    fn at(token: &Token<'_>, what: impl Into<String>) -> Self {
        Self { location: token.location(), what: what.into() }
    }
}

pub(super) struct Rule {
    /// The requirement on a source.
    pub(super) demand: &'static str,
    find: fn(&Outline<'_>) -> Vec<Finding>,
    /// It breaks this rule and no other.
    pub(super) defect: &'static str,
    /// It is like the defect and breaks none.
    pub(super) right: &'static str,
}

/// The findings of the rules in a source, one line each.
pub(super) fn findings(outline: &Outline<'_>) -> Vec<String> {
    let found = RULES.iter().flat_map(|rule| {
        let findings = (rule.find)(outline).into_iter();
        findings.map(|Finding { location, what }| format!("{location}: {}: {what}", rule.demand))
    });
    found.collect()
}

pub(super) static RULES: [Rule; 32] = [
    Rule {
        demand: "the positions and sizes of a kernel are all scalars or all vectors of one length",
        find: kernels::positions_alike,
        defect: "kernel void k(uint3 g [[threadgroup_position_in_grid]], uint n [[threads_per_threadgroup]]) {}",
        right:
            "kernel void k(uint3 g [[threadgroup_position_in_grid]], ushort3 n [[threads_per_threadgroup]],
                uint lane [[thread_index_in_simdgroup]]) {}",
    },
    Rule {
        demand: "a position or size is a ushort, a uint or two or three of them",
        find: kernels::types_of_positions,
        defect: "kernel void k(int i [[thread_position_in_grid]]) {}",
        right: "kernel void k(ushort2 i [[thread_position_in_grid]]) {}",
    },
    Rule {
        demand: "an index or a number of threads is a ushort or a uint",
        find: kernels::types_of_indices,
        defect: "kernel void k(uint3 lane [[thread_index_in_simdgroup]]) {}",
        right: "kernel void k(ushort lane [[thread_index_in_simdgroup]]) {}",
    },
    Rule {
        demand: "a parameter of a kernel has one attribute",
        find: kernels::one_attribute,
        defect: "kernel void k(device float* x) {}",
        right: "kernel void k(device float* x [[buffer(0)]]) {}",
    },
    Rule {
        demand: "an attribute is one that kernels have",
        find: code::known_attributes,
        defect: "[[kernel]] [[gnu::hot]] void k(device float* x [[buffer(0)]]) {}",
        right: "[[kernel, max_total_threads_per_threadgroup(256)]] void k(device float* x [[buffer(0)]]) {}",
    },
    Rule {
        demand: "a buffer or threadgroup memory has a number from 0 to 30",
        find: kernels::numbers_in_range,
        defect: "kernel void k(device float* x [[buffer(31)]]) {}",
        right: "kernel void k(device float* x [[buffer(30)]]) {}",
    },
    Rule {
        demand: "a buffer or threadgroup memory has a number of its own",
        find: kernels::numbers_differ,
        defect: "kernel void k(device float* x [[buffer(1)]], device float* y [[buffer(1)]]) {}",
        right: "kernel void k(device float* x [[buffer(1)]], threadgroup float* y [[threadgroup(1)]]) {}",
    },
    Rule {
        demand: "a buffer points to device or constant memory, and [[threadgroup]] to threadgroup memory",
        find: kernels::spaces_of_bindings,
        defect: "kernel void k(threadgroup float* x [[buffer(0)]]) {}",
        right: "kernel void k(constant float& x [[buffer(0)]], threadgroup float* y [[threadgroup(0)]]) {}",
    },
    Rule {
        demand: "a structure in constant memory, which the host writes, has only int, uint and float, which lie \
                 alike in both languages",
        find: kernels::structures_as_the_host_has_them,
        defect: "struct A { uint n; half x; }; kernel void k(constant A& a [[buffer(0)]]) {}",
        right: "struct B { float y[2]; }; struct A { uint n; B x[3]; };
                kernel void k(constant A& a [[buffer(0)]]) {}",
    },
    Rule {
        demand: "a kernel returns void",
        find: kernels::returns_void,
        defect: "kernel float k(device float* x [[buffer(0)]]) { return x[0]; }",
        right: "kernel void k(device float* x [[buffer(0)]]) {}",
    },
    Rule {
        demand: "a kernel is not called",
        find: kernels::not_called,
        defect: "kernel void k(device float* x [[buffer(0)]]) {}
                 kernel void l(device float* x [[buffer(0)]]) { if (x[0] > 0) k(x); }",
        right: "inline void k(device float* x) {}
                kernel void l(device float* x [[buffer(0)]]) { if (x[0] > 0) k(x); }",
    },
    Rule {
        demand: "a kernel has a name of its own",
        find: kernels::names_differ,
        defect: "template <int N> [[kernel]] void f(device float* x [[buffer(0)]]) {}
                 template [[host_name(\"k\")]] [[kernel]] decltype(f<1>) f<1>;
                 template [[host_name(\"k\")]] [[kernel]] decltype(f<2>) f<2>;",
        right: "template <int N> [[kernel]] void f(device float* x [[buffer(0)]]) {}
                template [[host_name(\"k1\")]] [[kernel]] decltype(f<1>) f<1>;
                template [[host_name(\"k2\")]] [[kernel]] decltype(f<2>) f<2>;",
    },
    Rule {
        demand: "a threadgroup has at most 1024 threads",
        find: kernels::threads_in_range,
        defect: "[[kernel, max_total_threads_per_threadgroup(2048)]] void k(device float* x [[buffer(0)]]) {}",
        right: "[[kernel, max_total_threads_per_threadgroup(1024)]] void k(device float* x [[buffer(0)]]) {}",
    },
    Rule {
        demand: "threadgroup memory is declared in a kernel, without a value",
        find: code::threadgroup_memory_of_kernels,
        defect: "inline float f(uint i) { threadgroup float s[32]; return s[i]; }",
        right: "kernel void k(uint i [[thread_index_in_threadgroup]]) { threadgroup float s[32]; s[i] = 0; }",
    },
    Rule {
        demand: "a function constant is a bool or a ushort with a number of its own below 65536",
        find: code::function_constants,
        defect: "constant bool A [[function_constant(3)]]; constant bool B [[function_constant(3)]];",
        right: "constant bool A [[function_constant(3)]]; constant ushort B [[function_constant(4)]];",
    },
    Rule {
        demand: "a variable outside of functions is constant and has a value",
        find: code::constants_with_values,
        defect: "constant uint COUNT;",
        right: "constant uint COUNT = 3; constant constexpr uint TABLE[2] = {1, 2};",
    },
    Rule {
        demand: "a static variable is constant",
        find: code::static_constants,
        defect: "struct F { static constexpr int N = 3; };",
        right: "struct F { static constexpr constant int N = 3; static int get(int i) { return N + i; } };",
    },
    Rule {
        demand: "a pointer or reference names its address space",
        find: code::address_spaces,
        defect: "inline float f(device float* x) { float* y = x; return y[0]; }",
        right: "inline float f(device float* x, int n) { device float* y = x; return y[0] * y[n * n]; }",
    },
    Rule {
        demand: "a function does not call itself",
        find: code::recursion,
        defect: "inline int f(int n) { return n > 0 ? f(n - 1) : 0; }",
        right: "inline int f(int n, int m) { return n + m; } inline int f(int n) { return f(n, 1); }",
    },
    Rule {
        demand: "there are no pointers to functions",
        find: code::function_pointers,
        defect: "inline int f(int n) { int (*g)(int) = 0; return n; }",
        right: "inline int f(thread int* g, int n) { return (*g) * (n); }",
    },
    Rule {
        demand: "the language has no such word",
        find: code::words,
        defect: "inline float f(float x) { double y = x; return y; }",
        right: "inline float f(float x) { float y = x; return y; }",
    },
    Rule {
        demand: "the language has no long long",
        find: code::long_long,
        defect: "inline long f(long x) { unsigned long long y = x; return y; }",
        right: "inline long f(long x) { unsigned long y = x; return y; }",
    },
    Rule {
        demand: "a number has one of the suffixes f, h, u and l",
        find: code::literals,
        defect: "inline float f() { return 1.5L; }",
        right: "inline float f(ulong x) { return 1.5f + 2.0h + float(x + 3ul) + 0x1Fu + 1.0; }",
    },
    Rule {
        demand: "there is no text in kernels",
        find: code::texts,
        defect: "constant constexpr uint LEN = sizeof(\"text\");",
        right: "static_assert(sizeof(uint) == 4, \"four bytes\"); constant constexpr uint LEN = 'a';",
    },
    Rule {
        demand: "there are no functions without a name",
        find: code::lambdas,
        defect: "inline int f(int x) { auto g = [](int y) { return y; }; return g(x); }",
        right: "inline int f(thread int* x) { return x[0] + x[x[1]]; }",
    },
    Rule {
        demand: "names that begin with two underscores, one and a capital, or msl_ are those of a compiler or of \
                 the emulator",
        find: code::names_of_others,
        defect: "inline uint f(uint x) { return __builtin_popcount(x); }",
        right: "inline uint f(uint x_) { return popcount(x_); }",
    },
    Rule {
        demand: "a pragma is one that public kernels have",
        find: code::pragmas,
        defect: "inline int f(int x) {\n#pragma clang loop vectorize(enable)\n    for (int i = 0; i < 4; ++i) { x += i; }\n    return x; }",
        right: "inline int f(int x) {\n#pragma clang loop unroll(full)\n    for (int i = 0; i < 4; ++i) { x += i; }\n    return x; }",
    },
    Rule {
        demand: "the number of turns of an unrolled loop is no function constant",
        find: compiled::bounds_of_unrolled_loops,
        defect: "constant ushort N [[function_constant(0)]];\ninline float f(float x) {\n#pragma clang loop unroll_count(2)\n    for (int i = 0; i < N; ++i) { x = simd_sum(x); }\n    return x; }",
        right: "constant ushort N [[function_constant(0)]];\ninline float f(float x) {\n#pragma clang loop unroll_count(2)\n    for (int i = 0; i < N; ++i) { x = x * x; }\n    return x; }",
    },
    Rule {
        demand: "an element of a matrix has an index that is known when the loops around it are unrolled",
        find: compiled::elements_of_matrices,
        defect: "inline float f(thread simdgroup_float8x8& m, int i) { return m.thread_elements()[i]; }",
        right: "inline float f(thread simdgroup_float8x8& m, int i) { return m.thread_elements()[1] * i; }",
    },
    Rule {
        demand: "a matrix of an array has an index that is known when the loops around it are unrolled",
        find: compiled::arrays_of_matrices,
        defect: "inline void f(float x) {\n    simdgroup_float8x8 m[2];\n    for (int i = 0; i < 2; ++i) { m[i] = simdgroup_float8x8(x); }\n}",
        right: "inline void f(float x) {\n    simdgroup_float8x8 m[2];\n#pragma clang loop unroll(full)\n    for (int i = 0; i < 2; ++i) { m[i] = simdgroup_float8x8(x); }\n}",
    },
    Rule {
        demand: "no arm of a condition is the name of a constant, which is in another address space than a variable",
        find: compiled::arms_of_conditions,
        defect: "constant float LOW = -1.0f; inline float f(float x) { return x > 0.0f ? x : LOW; }",
        right: "constant float LOW = -1.0f; inline float f(float x) { return x > LOW ? x : float(LOW); }",
    },
    Rule {
        demand: "a structure that another one is derived from has static members only",
        find: compiled::bases_without_data,
        defect: "struct A { int n; }; struct B : A { static int f(int x) { return x; } };",
        right: "struct A { static int g(int x) { return x; } }; struct B : A { int n; };",
    },
];
