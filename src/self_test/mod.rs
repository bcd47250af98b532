//! Checks of a device against definitions in double precision, and of models against the CPU.
//!
//! Kernels that are right on one device may be wrong on another: a compiler, a driver or a chip can differ in ways that
//! no other machine shows. So the checks are in the program: they run on every available device, in the tests on the
//! CPU and on the emulated GPU, and with `tinyvllm self-test` on a user's machine.

mod attention;
mod experts;
mod latent;
mod matmul;
mod memo;
mod models;
mod oracle;
mod probes;
mod rows;
mod sampling;
mod stored;
mod timing;

use std::sync::Arc;

use oracle::Rows;

use crate::Result;
use crate::ops::Context;

pub use attention::one_layer;
pub use memo::Memo;
pub use models::{demo_model, golden_models};
pub use oracle::Expected;
pub use timing::{Timing, timings};

/// One thing that was checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// The checked op, with its shape.
    pub name: String,
    /// The outcome, such as the error and its limit.
    pub detail: String,
    /// Whether it is right.
    pub passed: bool,
}

impl Check {
    /// A normalised mean square error and the largest that is allowed.
    fn error(name: String, error: f64, limit: f64) -> Self {
        let detail = format!("error {error:.1e}, limit {limit:.0e}");
        Self { name, detail, passed: error <= limit }
    }

    /// A check that failed before there was a result.
    fn failed(name: String, error: &crate::Error) -> Self {
        Self { name, detail: error.to_string(), passed: false }
    }
}

/// Receives results, and selects the checks to run. A closure selects all of them.
pub trait Report {
    /// Whether the check of this name is to be done.
    fn wants(&mut self, _name: &str) -> bool {
        true
    }

    /// The result of a check.
    fn hear(&mut self, check: Check);

    /// The expected result of the check of this name. It is the same for all devices, so a caller that checks several
    /// may keep it: double precision takes longer than most devices.
    ///
    /// # Errors
    /// Those of the computation.
    fn expected(
        &mut self,
        _name: &str,
        compute: &mut dyn FnMut() -> Result<Expected>,
    ) -> Result<Arc<Expected>> {
        compute().map(Arc::new)
    }
}

impl<F: FnMut(Check)> Report for F {
    fn hear(&mut self, check: Check) {
        self(check);
    }
}

impl dyn Report + '_ {
    /// Runs a check if it is selected. `run` returns the error of the device's results and the limit.
    fn compare(
        &mut self,
        context: &Context,
        name: String,
        limit: f64,
        case: impl Fn(&Context) -> Result<Rows>,
    ) {
        if !self.wants(&name) {
            return;
        }
        let outcome = self
            .expected(&name, &mut || Expected::of(&case))
            .and_then(|expected| Ok(oracle::compare(&case(context)?, &expected)));
        self.hear(match outcome {
            Ok(error) => Check::error(name, error, limit),
            Err(error) => Check::failed(name, &error),
        });
    }

    /// Runs a check if it is selected. `run` returns the error of an outcome and the limit.
    fn check(&mut self, name: String, limit: f64, outcome: impl FnOnce() -> Result<f64>) {
        if self.wants(&name) {
            self.hear(match outcome() {
                Ok(error) => Check::error(name, error, limit),
                Err(error) => Check::failed(name, &error),
            });
        }
    }
}

/// How much is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Small shapes that reach every kernel, for a device that is emulated.
    Small,
    /// The shapes of real models too.
    Full,
}

/// Ops that are checked together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Assumptions of the other checks about a GPU.
    Probes,
    /// Matmuls with weights.
    Matmul,
    /// Embeddings and moved rows.
    Rows,
    /// Rotation, the cache, attention.
    Attention,
    /// Matmuls of heads and latent attention.
    Latent,
    /// Networks of experts.
    Experts,
    /// Sampling, if the device has a sampler.
    Sampling,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Probes,
        Self::Matmul,
        Self::Rows,
        Self::Attention,
        Self::Latent,
        Self::Experts,
        Self::Sampling,
    ];

    /// Checks these ops on a device, as selected by `report`, and reports each result.
    pub fn check(self, context: &Context, effort: Effort, report: &mut dyn Report) {
        match self {
            Self::Probes => probes::run(context, report),
            Self::Matmul => matmul::run(context, effort, report),
            Self::Rows => rows::run(context, report),
            Self::Attention => {
                attention::run(context, effort, report);
                stored::run(context, report);
            }
            Self::Latent => latent::run(context, report),
            Self::Experts => experts::run(context, report),
            Self::Sampling => sampling::run(context, report),
        }
    }
}

/// Checks every op on a device, as selected by `report`, and reports each result.
pub fn ops(context: &Context, effort: Effort, report: &mut dyn Report) {
    Family::ALL.into_iter().for_each(|family| family.check(context, effort, report));
}

/// Compiles the kernels of the selected checks on several threads; the checks themselves would compile one after the
/// other. Does nothing if the device compiles no kernels. A kernel that does not compile fails the checks that use it.
/// Calls `on_progress`, from any thread, with the number of compiled kernels and of all.
pub fn compile_kernels(
    context: &Context,
    effort: Effort,
    wants: &dyn Fn(&str) -> bool,
    on_progress: &(dyn Fn(usize, usize) + Sync),
) {
    let Some(dry_run) = context.dry_run() else { return };
    ops(&dry_run, effort, &mut WithoutResults(wants));
    let progress = |done, all| {
        on_progress(done, all);
        true
    };
    // The first error of the compiler ends this, and is that of a check.
    let _ = context.compile(&dry_run, &progress);
}

/// The checks of a dry run, which have no results.
struct WithoutResults<'a>(&'a dyn Fn(&str) -> bool);

impl Report for WithoutResults<'_> {
    fn wants(&mut self, name: &str) -> bool {
        (self.0)(name)
    }

    fn hear(&mut self, _check: Check) {}

    fn expected(
        &mut self,
        _name: &str,
        _compute: &mut dyn FnMut() -> Result<Expected>,
    ) -> Result<Arc<Expected>> {
        Ok(Arc::new(Expected::nothing()))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::LazyLock;

    use super::*;
    use crate::ops::cpu::CpuLevel;
    use crate::ops::reference::ReferenceBackend;

    /// The checks of one device: all have to be right, and have names of their own.
    struct Names<'a> {
        memo: &'a Memo,
        on: String,
        names: BTreeSet<String>,
    }

    impl Report for Names<'_> {
        fn hear(&mut self, check: Check) {
            assert!(check.passed, "{}: {}: {}", self.on, check.name, check.detail);
            assert!(self.names.insert(check.name.clone()), "{}: twice {}", self.on, check.name);
        }

        fn expected(
            &mut self,
            name: &str,
            compute: &mut dyn FnMut() -> Result<Expected>,
        ) -> Result<Arc<Expected>> {
            self.memo.expected(name, compute)
        }
    }

    /// On every second instruction set, from `first` on.
    fn is_right(family: Family, first: usize, memo: &Memo) {
        let levels = CpuLevel::available().iter().map(|level| Context::cpu(2, *level));
        let contexts = levels.chain([Context::reference(ReferenceBackend::cpu())]);
        for context in contexts.skip(first).step_by(2) {
            let mut names = Names { memo, on: context.description(), names: BTreeSet::new() };
            family.check(&context, Effort::Small, &mut names);
            // Tokens of a processor are not drawn by a device.
            assert_eq!(names.names.is_empty(), family == Family::Sampling, "{family:?} on {}", names.on);
        }
    }

    /// Two tests of each family, so that no processor waits for another. Those of GPUs are no ops.
    macro_rules! on_every_instruction_set {
        ($($name:ident: $family:ident;)+) => {
            $(mod $name {
                use super::*;

                static MEMO: LazyLock<Memo> = LazyLock::new(Memo::default);

                #[test]
                fn part_1() {
                    is_right(Family::$family, 0, &MEMO);
                }

                #[test]
                fn part_2() {
                    is_right(Family::$family, 1, &MEMO);
                }
            })+

            #[test]
            fn no_family_is_left_out() {
                assert_eq!([Family::Probes, $(Family::$family),+], Family::ALL);
            }
        };
    }

    on_every_instruction_set! {
        matmul: Matmul;
        rows: Rows;
        attention: Attention;
        latent: Latent;
        experts: Experts;
        sampling: Sampling;
    }

    #[test]
    fn what_is_right_is_computed_once_for_each_name() {
        let memo = Memo::default();
        let count = Cell::new(0);
        let ask = |name: &str, fails: bool| {
            let mut compute = || {
                count.set(count.get() + 1);
                if fails {
                    Err(crate::Error::internal("none"))
                } else {
                    Expected::of(|_| Ok(Rows::default()))
                }
            };
            memo.expected(name, &mut compute).is_ok()
        };
        for (name, fails, is_known, num_computed) in [
            ("a", true, false, 1),
            ("a", false, true, 2),
            ("a", true, true, 2),
            ("b", false, true, 3),
            ("a", false, true, 3),
        ] {
            assert_eq!((ask(name, fails), count.get()), (is_known, num_computed), "{name}");
        }
    }

    #[test]
    fn the_golden_models_are_right_on_the_cpu() {
        let context = Arc::new(Context::cpu(2, CpuLevel::detect()));
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let mut report = |check: Check| assert!(check.passed, "{}: {}", check.name, check.detail);
        demo_model(&context, &mut report);
        golden_models(&context, &fixtures, &mut report);
    }
}
