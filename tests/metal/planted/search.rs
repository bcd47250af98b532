//! The search for a check that notices a defect, on one of several devices that show it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use tinyvllm::Result;
use tinyvllm::ops::Context;
use tinyvllm::ops::gpu::Gpu;
use tinyvllm::self_test::{Check, Effort, Expected, Family, Report};

use super::noticed::Notice;
use crate::oracle;

/// A device that shows a defect: its name among the others, and how to make it. None where there is no emulator.
pub(crate) type Device<'a> = (&'static str, Box<dyn Fn() -> Option<Arc<dyn Gpu>> + 'a>);

/// Whether a check of this name is selected.
type Wants<'a> = &'a dyn Fn(&str) -> bool;

/// Looks for a check that finds something wrong with a device, and ends the checks there.
struct Search<'a> {
    wants: Wants<'a>,
    /// The check that is done.
    current: String,
    failure: Option<String>,
}

impl Report for Search<'_> {
    fn wants(&mut self, name: &str) -> bool {
        let wants = (self.wants)(name);
        if wants {
            name.clone_into(&mut self.current);
        }
        wants
    }

    fn hear(&mut self, check: Check) {
        if !check.passed {
            self.failure = Some(format!("{}: {}", check.name, check.detail));
            self.current = check.name;
            // Unlike a panic, this prints nothing.
            resume_unwind(Box::new("noticed"));
        }
    }

    fn expected(
        &mut self,
        name: &str,
        compute: &mut dyn FnMut() -> Result<Expected>,
    ) -> Result<Arc<Expected>> {
        oracle::expected(name, compute)
    }
}

/// The first of the selected checks of a family that fails on a device: its name, and its message.
fn first_failure(gpu: Arc<dyn Gpu>, family: Family, wants: Wants<'_>) -> Option<(String, String)> {
    let mut search = Search { wants, current: String::new(), failure: None };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        family.check(&Context::gpu(gpu), Effort::Small, &mut search);
    }));
    let failure = outcome.err().map(|_| search.failure.unwrap_or_else(|| "a panic".to_owned()));
    failure.map(|failure| (search.current, failure))
}

/// The check that notices a defect, and its message: on the first of these devices where one does. Likely ones come
/// before the others.
pub(super) fn search(
    devices: &[Device<'_>],
    family: Family,
    is_likely: Option<Wants<'_>>,
) -> Option<(Notice, String)> {
    let on_all = |wants: Wants<'_>| {
        devices.iter().find_map(|(device, gpu)| {
            let (check, failure) = first_failure(gpu()?, family, wants)?;
            Some((Notice { device: (*device).to_owned(), check }, failure))
        })
    };
    match is_likely {
        None => on_all(&|_| true),
        Some(is_likely) => on_all(is_likely).or_else(|| on_all(&|name| !is_likely(name))),
    }
}

/// Whether a check notices a defect by itself.
pub(super) fn confirms(devices: &[Device<'_>], family: Family, Notice { device, check }: &Notice) -> bool {
    let Some((_, gpu)) = devices.iter().find(|(name, _)| name == device) else { return false };
    gpu().is_some_and(|gpu| first_failure(gpu, family, &|name| name == check).is_some())
}
