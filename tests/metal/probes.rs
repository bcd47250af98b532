//! The kernels' assumptions are checked first, and a GPU that differs gets a message with the way out.

use std::sync::Arc;

use tinyvllm::ops::Context;
use tinyvllm::ops::gpu::LIBRARIES;
use tinyvllm::self_test::{self, Check, Effort, Family, Report};

use crate::emulator::{Emulator, Variant};

fn probes(gpu: Emulator) -> Vec<Check> {
    let mut checks = Vec::new();
    Family::Probes.check(&Context::gpu(Arc::new(gpu)), Effort::Small, &mut |check: Check| checks.push(check));
    checks
}

/// The first checks of a self-test, which takes a minute as a whole.
struct First {
    num_wanted: usize,
    checks: Vec<Check>,
}

impl Report for First {
    fn wants(&mut self, _name: &str) -> bool {
        self.checks.len() < self.num_wanted
    }

    fn hear(&mut self, check: Check) {
        self.checks.push(check);
    }
}

#[test]
fn they_are_the_first_lines_of_a_self_test_and_name_the_limits() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let expected = probes(gpu);
    assert!(expected.iter().all(|check| check.passed), "{expected:#?}");
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let mut first = First { num_wanted: expected.len(), checks: Vec::new() };
    self_test::ops(&Context::gpu(Arc::new(gpu)), Effort::Small, &mut first);
    assert_eq!(first.checks, expected);

    let limits: Vec<&Check> = expected.iter().filter(|check| check.name.starts_with("limits of ")).collect();
    assert_eq!(limits.len(), 14);
    let sample = limits.iter().find(|check| check.name == "limits of sample").unwrap();
    assert_eq!(
        sample.detail,
        "1024 threads in a group where it takes 32, simdgroups of 32, 0 of 32768 bytes of threadgroup memory before \
         its launch"
    );
}

/// A GPU that differs in one line of a library's text, and the expected message.
#[test]
fn a_gpu_that_is_different_is_detected() {
    let cases = [
        (
            "probe",
            "as_type<uint>(float(low(bits)))",
            "(bits & 0x7C00u) == 0u ? 0u : as_type<uint>(float(low(bits)))",
            "probe: halves as floats",
            "the half 0x0001 as a float is 0e0 and not 5.9604645e-8, as if it were too small to be a number",
        ),
        (
            "probe",
            "half(number(bits))",
            "half(fabs(number(bits)) < 6.1035156e-5f ? 0.0f : number(bits))",
            "probe: floats as halves",
            "5.9604645e-8 as a half is 0e0 and not 5.9604645e-8, as if it were too small to be a number",
        ),
        (
            "probe",
            "= low(at < a.count ? in[at] : 0u);",
            "= half(0.0f);",
            "probe: matrices of halves",
            "1024 times the half 0x0001 in a matrix is 0e0 and not 6.1035156e-5",
        ),
        (
            "probe",
            "out[at] = as_type<uint>(value);",
            "out[at ^ 8u] = as_type<uint>(value);",
            "probe: cells of matrices",
            "cell 0 of a matrix is 8e0 and not 0e0",
        ),
        (
            "probe",
            "as_type<uint>(fast::exp2(number(bits)))",
            "as_type<uint>(0.99999994f * fast::exp2(number(bits)))",
            "probe: powers and gates",
            "Exp2 of 0e0 is 9.9999994e-1 and not 1e0",
        ),
        (
            "probe",
            "(1.0f + exp(-number(bits)))",
            "min(1e38f, 1.0f + exp(-number(bits))) * 1e38f",
            "probe: powers and gates",
            "Silu of -1e3 is",
        ),
        (
            "matvec",
            "fma(sum, factor, others)",
            "fma(COLUMNS == 4 ? sum * 1.0000002f : sum, factor, others)",
            "probe: rows by themselves and with others",
            " in a matmul of 1 rows and ",
        ),
    ];
    for (library, from, to, name, detail) in cases {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let library = LIBRARIES.into_iter().find(|known| known.name == library).unwrap();
        let text = library.text();
        assert_eq!(text.matches(from).count(), 1, "{from}");
        let checks = probes(gpu.with_text(library, text.replace(from, to)));
        let failed: Vec<&Check> = checks.iter().filter(|check| !check.passed).collect();
        let [check] = failed[..] else { panic!("{to}: {failed:#?}") };
        assert_eq!(check.name, name);
        assert!(check.detail.contains(detail), "{check:?}");
        assert!(check.detail.contains("--kernels reference"), "{check:?}");
    }
}

#[test]
fn a_gpu_with_too_few_threads_is_detected() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let checks = probes(gpu.with_max_threads(352));
    let limits = |check: &&Check| check.name.starts_with("limits of ");
    for check in checks.iter().filter(limits) {
        assert_eq!(check.passed, check.name == "limits of sample", "{check:?}");
        assert_eq!(check.passed, !check.detail.contains("--kernels reference"), "{check:?}");
    }
}
