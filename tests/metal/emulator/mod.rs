//! A GPU that executes the kernels of `metal_kernels` on this machine's processor.
//!
//! clang compiles the `.metal` sources unchanged, a small run time runs each thread as a fibre, and the launch code
//! uses it as a [`Gpu`] like any other. Violations of Apple's documentation are errors here, although a GPU might
//! tolerate them. The emulator cannot show whether Apple's compiler accepts the sources, how fast they are, and how a
//! GPU rounds.

mod compiler;
mod memory;
mod object;
mod rewriter;
mod sanitized;

use std::collections::{BTreeMap, HashMap};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tinyvllm::ops::gpu::{
    Access, ChipClass, Constant, Gpu, GpuBuffer, Launch, Library, Pipeline, PipelineLimits, Placement, Ticket,
};
use tinyvllm::weights::SharedBytes;
use tinyvllm::{Error, ErrorKind, Result};

pub(crate) use compiler::{Compiler, Variant};
pub(crate) use object::Order;
pub(crate) use rewriter::Barrier;
pub(crate) use sanitized::{is_sanitized, run_again};

use memory::{Handle, Memory};
use object::{Object, RawBinding, RawConstant, RawLaunch};

/// Threadgroups are numbered through all launches of the process, so that entries of an earlier one are never mistaken
/// for this one's.
static NEXT_SERIAL: AtomicU32 = AtomicU32::new(1);

/// When queued work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Timing {
    /// At once.
    Early,
    /// When the host waits for it. A host that does not wait sees old results.
    Late,
}

/// The device. Its options are set before it is used.
#[derive(Debug)]
pub(crate) struct Emulator {
    compiler: &'static Compiler,
    variant: Variant,
    order: Order,
    timing: Timing,
    class: ChipClass,
    working_set_bytes: u64,
    largest_buffer: usize,
    limits: PipelineLimits,
    dispatch_budget: Duration,
    num_cores: usize,
    replaced: HashMap<&'static str, String>,
    left_out: Option<(&'static str, usize)>,
    defect: Option<usize>,
    queue: Mutex<Queue>,
}

/// So few that a check of 400 rows takes the kernels for many cores' worth of them.
const NUM_CORES: usize = 2;

#[derive(Debug, Default)]
struct Queue {
    pipelines: Vec<Entry>,
    known: HashMap<(&'static str, String, Vec<Constant>), usize>,
    waiting: Vec<Work>,
    num_dispatches: BTreeMap<String, u64>,
    last_ticket: u64,
}

#[derive(Debug)]
struct Entry {
    library: &'static str,
    function: String,
    object: Arc<Object>,
    kernel: usize,
    constants: Vec<RawConstant>,
}

#[derive(Debug)]
struct Work {
    pipeline: usize,
    args: Vec<u8>,
    bindings: Vec<(Arc<Memory>, usize, Access)>,
    threadgroup_memory: usize,
    grid: [u32; 3],
    num_threads: u32,
}

impl Emulator {
    /// A device with a compiler; none, with a message that cannot be overlooked, on a machine without.
    ///
    /// # Panics
    /// If there is none and the variable `TINYVLLM_REQUIRE_EMULATOR` is set.
    pub(crate) fn new(variant: Variant) -> Option<Self> {
        let Some(compiler) = Compiler::find() else {
            skip("clang++ 19 or later is not installed: the Metal kernels are not tested");
            return None;
        };
        // There, every possible violation has to be one that the sanitizers detect.
        let variant = if is_sanitized() { Variant::Sanitized } else { variant };
        Some(Self {
            compiler,
            variant,
            order: Order::Forward,
            timing: Timing::Early,
            class: ChipClass::Base,
            working_set_bytes: 4 << 30,
            largest_buffer: usize::MAX,
            limits: PipelineLimits::APPLE,
            dispatch_budget: Duration::MAX,
            num_cores: NUM_CORES,
            replaced: HashMap::new(),
            left_out: None,
            defect: None,
            queue: Mutex::default(),
        })
    }

    /// In which order threads and threadgroups run.
    pub(crate) fn with_order(self, order: Order) -> Self {
        Self { order, ..self }
    }

    /// When queued work is done.
    pub(crate) fn with_timing(self, timing: Timing) -> Self {
        Self { timing, ..self }
    }

    /// As which chip the device appears.
    pub(crate) fn with_class(self, class: ChipClass) -> Self {
        let max_memory = match class {
            ChipClass::Nvidia => 227 << 10,
            ChipClass::Base | ChipClass::Max | ChipClass::Ultra => PipelineLimits::APPLE.max_memory,
        };
        Self { class, limits: PipelineLimits { max_memory, ..self.limits }, ..self }
    }

    /// How much memory the device recommends to use.
    pub(crate) fn with_working_set(self, working_set_bytes: u64) -> Self {
        Self { working_set_bytes, ..self }
    }

    /// How many bytes a buffer can have.
    pub(crate) fn with_largest_buffer(self, largest_buffer: usize) -> Self {
        Self { largest_buffer, ..self }
    }

    /// How many threads of a group every pipeline allows, as if each thread took many registers.
    pub(crate) fn with_max_threads(mut self, max_threads: usize) -> Self {
        self.limits.max_threads = max_threads;
        self
    }

    /// The simdgroup size that pipelines report; execution does not change.
    pub(crate) fn with_num_cores(self, num_cores: usize) -> Self {
        Self { num_cores, ..self }
    }

    pub(crate) fn with_simd_width(mut self, simd_width: usize) -> Self {
        self.limits.simd_width = simd_width;
        self
    }

    /// How long a dispatch may take. By default no launch is divided.
    pub(crate) fn with_dispatch_budget(self, dispatch_budget: Duration) -> Self {
        Self { dispatch_budget, ..self }
    }

    /// Compiles `text` instead of a library's own.
    pub(crate) fn with_text(mut self, library: &Library, text: String) -> Self {
        self.replaced.insert(library.name, text);
        self
    }

    /// Leaves out one barrier of a library, by its index in [`Self::barriers`], as if it had been deleted.
    pub(crate) fn without_barrier(self, library: &Library, barrier: usize) -> Self {
        Self { left_out: Some((library.name, barrier)), ..self }
    }

    /// Lets one of the defects show that texts of [`Self::with_text`] have planted as `is_planted(number)`.
    pub(crate) fn with_defect(self, defect: usize) -> Self {
        Self { defect: Some(defect), ..self }
    }

    /// The names of all kernels of a library.
    ///
    /// # Errors
    /// The compiler's messages about the library.
    pub(crate) fn kernels(&self, library: &Library) -> Result<Vec<String>> {
        Ok(self.object(library)?.kernels().map(str::to_owned).collect())
    }

    /// The kernels that a device compiles together with this instance of a template, or those that are none, by what the
    /// preprocessor leaves of the library.
    ///
    /// # Errors
    /// The preprocessor's messages about the library.
    pub(crate) fn kernels_with(&self, library: &Library, instance: Option<&str>) -> Result<Vec<String>> {
        let text = self.compiler.preprocess(&library.text_of(instance)).map_err(Error::internal)?;
        let named = text.split("[[host_name(\"").skip(1).filter_map(|rest| rest.split('"').next());
        let names = named.map(str::to_owned);
        let plain = self.kernels(library)?.into_iter().filter(|kernel| library.is_plain(kernel));
        Ok(names.chain(plain).collect())
    }

    /// The barriers of a library.
    ///
    /// # Errors
    /// The compiler's messages about the library.
    pub(crate) fn barriers(&self, library: &Library) -> Result<Vec<Barrier>> {
        Ok(self.object(library)?.barriers.clone())
    }

    /// Whether the language accepts a library, see [`Compiler::check_language`].
    ///
    /// # Errors
    /// The compiler's messages.
    pub(crate) fn check_language(&self, library: &Library) -> Result<()> {
        self.compiler.check_language(&self.text(library)).map_err(Error::internal)
    }

    /// How often each kernel was dispatched.
    pub(crate) fn num_dispatches(&self) -> BTreeMap<String, u64> {
        self.queue().num_dispatches.clone()
    }

    fn text(&self, library: &Library) -> String {
        self.replaced.get(library.name).cloned().unwrap_or_else(|| library.text())
    }

    fn object(&self, library: &Library) -> Result<Arc<Object>> {
        let object = self.compiler.object(&self.text(library), self.variant);
        object.map_err(|message| Error::internal(format!("{}.metal:\n{message}", library.name)))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, queue: &mut Queue) -> Result<()> {
        let waiting = std::mem::take(&mut queue.waiting);
        waiting.iter().try_for_each(|work| self.execute(queue, work))
    }

    fn execute(&self, queue: &Queue, work: &Work) -> Result<()> {
        let entry = &queue.pipelines[work.pipeline];
        let num_threadgroups: u32 = work.grid.iter().product();
        let mut bindings = Vec::with_capacity(work.bindings.len());
        for (memory, offset, access) in &work.bindings {
            let (access, shadow_size) = match access {
                Access::Read => (1, 0),
                Access::Write => (2, entry.object.shadow_size),
                Access::ReadWrite => (3, entry.object.shadow_size),
            };
            bindings.push(RawBinding {
                base: memory.at(),
                len: memory.len() as u64,
                offset: *offset as u64,
                shadow: memory.shadow(shadow_size)?,
                access,
            });
        }
        let left_out = self.left_out.filter(|(library, _)| *library == entry.library);
        let launch = RawLaunch {
            kernel: entry.kernel,
            arguments: &work.args,
            bindings: &bindings,
            constants: &entry.constants,
            threadgroup_memory: work.threadgroup_memory,
            max_memory: self.limits.max_memory,
            grid: work.grid,
            num_threads: work.num_threads,
            first_serial: NEXT_SERIAL.fetch_add(num_threadgroups, Ordering::Relaxed),
            order: self.order,
            left_out: left_out.map(|(_, barrier)| barrier),
            defect: self.defect,
        };
        // SAFETY: the bindings are of memory that the work holds, and the queue is locked, so that only one
        // launch at a time accesses it.
        let result = unsafe { entry.object.launch(&launch) };
        result.map_err(|message| {
            let (library, function) = (entry.library, &entry.function);
            let (grid, threads) = (work.grid, work.num_threads);
            Error::internal(format!(
                "{function} of {library}.metal, grid {grid:?} with {threads} threads each: {message}"
            ))
        })
    }
}

/// Reports untested code, also without a failure.
///
/// # Panics
/// If the variable `TINYVLLM_REQUIRE_EMULATOR` is set.
fn skip(message: &str) {
    assert!(std::env::var_os("TINYVLLM_REQUIRE_EMULATOR").is_none(), "{message}");
    // Not `eprintln!`, which the test harness shows for failed tests only.
    drop(writeln!(std::io::stderr(), "skipped: {message}"));
}

/// The barriers of a library that `cases` do not need: each is left out in turn, and the checks or the cases' own
/// assertions have to fail in one of three orders.
pub(crate) fn barriers_without_need(
    library: &Library,
    cases: impl Fn(&Arc<Emulator>) -> Result<()>,
) -> Vec<Barrier> {
    let barriers = Emulator::new(Variant::Checked).map(|gpu| gpu.barriers(library));
    let barriers: Vec<Barrier> = barriers.and_then(Result::ok).unwrap_or_default();
    let is_missed = |index: usize| {
        [Order::Forward, Order::Reversed, Order::Random(1)].into_iter().any(|order| {
            let gpu = Emulator::new(Variant::Checked);
            let Some(gpu) = gpu.map(|gpu| gpu.with_order(order).without_barrier(library, index)) else {
                return false;
            };
            let gpu = Arc::new(gpu);
            !matches!(catch_unwind(AssertUnwindSafe(|| cases(&gpu))), Ok(Ok(())))
        })
    };
    let all = barriers.into_iter().enumerate();
    all.filter(|(index, _)| !is_missed(*index)).map(|(_, barrier)| barrier).collect()
}

impl Gpu for Emulator {
    fn name(&self) -> &str {
        "emulator"
    }

    fn class(&self) -> ChipClass {
        self.class
    }

    fn working_set_bytes(&self) -> u64 {
        self.working_set_bytes
    }

    fn num_cores(&self) -> usize {
        self.num_cores
    }

    fn threadgroup_memory(&self) -> usize {
        self.limits.max_memory
    }

    fn dispatch_budget(&self) -> Duration {
        self.dispatch_budget
    }

    fn allocate(&self, len: usize, placement: Placement) -> Result<GpuBuffer> {
        if len > self.largest_buffer {
            return Err(Error::new(ErrorKind::Capacity, format!("no buffer of {len} bytes")));
        }
        Ok(GpuBuffer(Box::new(Handle(Arc::new(Memory::allocate(len, placement)?)))))
    }

    fn wrap(&self, bytes: &SharedBytes) -> Result<Option<(GpuBuffer, usize)>> {
        let (memory, start) = Memory::of_file(bytes);
        let is_aligned = start.is_multiple_of(4) && !bytes.is_empty();
        Ok(is_aligned.then(|| (GpuBuffer(Box::new(Handle(Arc::new(memory)))), start)))
    }

    fn pipeline(
        &self,
        library: &'static Library,
        function: &str,
        constants: &[Constant],
    ) -> Result<Pipeline> {
        let key = (library.name, function.to_owned(), constants.to_vec());
        let limits = self.limits;
        if let Some(&index) = self.queue().known.get(&key) {
            return Ok(Pipeline { index, limits });
        }
        let object = self.object(library)?;
        let kernel = object.kernels().position(|name| name == function);
        let kernel = kernel
            .ok_or_else(|| Error::internal(format!("{}.metal has no kernel {function}", library.name)))?;
        let constants = constants.iter().map(|constant| match *constant {
            Constant::Bool(index, value) => RawConstant { index, value: u32::from(value) },
            Constant::U16(index, value) => RawConstant { index, value: u32::from(value) },
        });
        let entry = Entry {
            library: library.name,
            function: function.to_owned(),
            object,
            kernel,
            constants: constants.collect(),
        };
        let mut queue = self.queue();
        // Another thread may have been faster.
        let index = match queue.known.get(&key) {
            Some(&index) => index,
            None => {
                let index = queue.pipelines.len();
                queue.pipelines.push(entry);
                queue.known.insert(key, index);
                index
            }
        };
        Ok(Pipeline { index, limits })
    }

    fn dispatch(&self, launch: &Launch<'_>) -> Result<()> {
        let mut queue = self.queue();
        let entry = queue.pipelines.get(launch.pipeline.index);
        let entry = entry.ok_or_else(|| Error::internal("a pipeline of another device"))?;
        let function = entry.function.clone();
        launch.check(&function, self.limits)?;
        let memory = launch.threadgroup_memory;
        if self.class != ChipClass::Nvidia
            && memory > MAX_DYNAMIC_MEMORY
            && !WITH_MORE_MEMORY.iter().any(|name| function.starts_with(name))
        {
            return Err(Error::internal(format!(
                "{function}: {memory} bytes of threadgroup memory; more than {MAX_DYNAMIC_MEMORY} leave a compiler too little"
            )));
        }
        let work = checked(launch).map_err(|message| Error::internal(format!("{function}: {message}")))?;
        *queue.num_dispatches.entry(function).or_default() += 1;
        match self.timing {
            Timing::Early => self.execute(&queue, &work)?,
            Timing::Late => queue.waiting.push(work),
        }
        Ok(())
    }

    fn write(&self, target: &GpuBuffer, offset: usize, bytes: &[u8]) -> Result<()> {
        // Queued work that has not run yet sees the new bytes.
        let _queue = self.queue();
        let memory = memory_of(target)?;
        if memory.is_read_only() {
            return Err(Error::internal("a write to the pages of a file"));
        }
        let at = checked_range(memory, offset, bytes.len())?;
        // SAFETY: the range is inside the memory, which no other code accesses while the queue is locked.
        unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let mut queue = self.queue();
        self.finish(&mut queue)?;
        let at = checked_range(memory_of(source)?, offset, bytes.len())?;
        // SAFETY: as above.
        unsafe { at.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn commit(&self) -> Result<Ticket> {
        let mut queue = self.queue();
        queue.last_ticket += 1;
        Ok(Ticket(queue.last_ticket))
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        let mut queue = self.queue();
        if ticket.0 > queue.last_ticket {
            return Err(Error::internal(format!("ticket {} was never given", ticket.0)));
        }
        self.finish(&mut queue)
    }
}

fn memory_of(buffer: &GpuBuffer) -> Result<&Arc<Memory>> {
    let handle = buffer.0.as_any().downcast_ref::<Handle>();
    handle.map(|handle| &handle.0).ok_or_else(|| Error::internal("a buffer of another device"))
}

fn checked_range(memory: &Memory, offset: usize, len: usize) -> Result<*mut u8> {
    if offset.checked_add(len).is_none_or(|end| end > memory.len()) {
        let message = format!("{len} bytes from {offset} of a buffer of {}", memory.len());
        return Err(Error::internal(message));
    }
    Ok(memory.at().wrapping_add(offset))
}

/// Dynamic threadgroup memory of a launch on an Apple GPU, which has 32 KiB in all: the static memory of a kernel, and what a
/// compiler adds, have to fit too.
const MAX_DYNAMIC_MEMORY: usize = 24 << 10;
/// Kernels that may have more, by the beginning of their names. Their static memory is next to nothing: `choose_experts` takes
/// all for 512 experts, `matvec` keeps the activations of several rows, and `flash_attention` those of a tile.
const WITH_MORE_MEMORY: [&str; 3] = ["choose_experts", "matvec_", "flash_attention_"];

/// Bindings that Metal would reject, and sizes beyond the emulator's limits.
fn checked(launch: &Launch<'_>) -> Result<Work, String> {
    let Launch { args, buffers, threadgroup_memory, grid, num_threads, .. } = *launch;
    let sides = grid.map(|side| u32::try_from(side).unwrap_or(u32::MAX));
    let num_threadgroups = sides.iter().try_fold(1_u32, |product, side| product.checked_mul(*side));
    if num_threadgroups.is_none_or(|number| number > 1 << 24) {
        return Err(format!("a grid of {grid:?} threadgroups"));
    }
    let mut bindings = Vec::with_capacity(buffers.len());
    for (index, binding) in buffers.iter().enumerate() {
        let memory = memory_of(binding.buffer).map_err(|error| error.to_string())?;
        let (offset, number) = (binding.offset, index + 1);
        if offset >= memory.len() || !offset.is_multiple_of(4) {
            return Err(format!(
                "buffer({number}) begins at {offset} of {} bytes; it has to be a multiple of 4 inside",
                memory.len()
            ));
        }
        if memory.is_read_only() && binding.access != Access::Read {
            return Err(format!("buffer({number}) is the pages of a file and can only be read"));
        }
        bindings.push((Arc::clone(memory), offset, binding.access));
    }
    let args = args.to_vec();
    let num_threads = u32::try_from(num_threads).map_err(|error| error.to_string())?;
    Ok(Work { pipeline: launch.pipeline.index, args, bindings, threadgroup_memory, grid: sides, num_threads })
}
