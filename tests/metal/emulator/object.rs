//! A compiled library: kernels and the run time in one shared object, loaded for the life of the process. The run time has
//! space for one launch, so threads that launch at the same time each get a copy of it.
//!
//! The structures are those of `shim/abi.hpp` and `runtime/state.hpp`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::rewriter::Barrier;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(object: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}
/// All symbols are found at once, and no other object sees them.
const RTLD_NOW: c_int = 2;

#[repr(C)]
struct KernelEntry {
    name: *const c_char,
    enter: *const c_void,
    parameters: *const c_void,
}

/// A buffer of a launch.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawBinding {
    pub(crate) base: *mut u8,
    pub(crate) len: u64,
    pub(crate) offset: u64,
    /// The state of each byte; null without checks.
    pub(crate) shadow: *mut u8,
    /// Bit 0: may be read; bit 1: may be written.
    pub(crate) access: u64,
}

/// A function constant and its value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawConstant {
    pub(crate) index: u32,
    pub(crate) value: u32,
}

/// In which order threads run where the language leaves it open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// The first first.
    Forward,
    /// The last first.
    Reversed,
    /// At random, the same for the same seed.
    Random(u64),
}

/// The arguments of one launch. Sizes and counts are within the limits of the device.
#[derive(Debug)]
pub(crate) struct RawLaunch<'a> {
    pub(crate) kernel: usize,
    pub(crate) arguments: &'a [u8],
    pub(crate) bindings: &'a [RawBinding],
    pub(crate) constants: &'a [RawConstant],
    pub(crate) threadgroup_memory: usize,
    /// Bytes of it that the device has.
    pub(crate) max_memory: usize,
    pub(crate) grid: [u32; 3],
    pub(crate) num_threads: u32,
    pub(crate) first_serial: u32,
    pub(crate) order: Order,
    pub(crate) left_out: Option<usize>,
    pub(crate) defect: Option<usize>,
}

#[repr(C)]
struct LaunchOfRunTime {
    kernel: *const KernelEntry,
    arguments: *const u8,
    arguments_len: u64,
    bindings: *const RawBinding,
    num_bindings: u64,
    constants: *const RawConstant,
    num_constants: u64,
    threadgroup_memory: u64,
    max_memory: u64,
    grid: [u32; 3],
    num_threads: u32,
    first_serial: u32,
    order: i32,
    seed: u64,
    left_out: i64,
    defect: i64,
    message: *mut u8,
    message_len: u64,
}

fn number_or_none(number: Option<usize>) -> i64 {
    number.map_or(-1, |number| i64::try_from(number).unwrap_or(i64::MAX))
}

type LaunchFunction = unsafe extern "C" fn(*const LaunchOfRunTime) -> c_int;

#[derive(Debug)]
pub(crate) struct Object {
    path: PathBuf,
    kernels: Vec<String>,
    /// Bytes that are kept for each byte of a buffer that is written.
    pub(crate) shadow_size: usize,
    pub(crate) barriers: Vec<Barrier>,
    copies: Mutex<Copies>,
}

/// Loaded copies of an object, each with its own memory.
#[derive(Debug)]
struct Copies {
    idle: Vec<Loaded>,
    num_loaded: usize,
}

#[derive(Debug)]
struct Loaded {
    kernels: Vec<(String, *const KernelEntry)>,
    launch: LaunchFunction,
    shadow_size: usize,
}

// SAFETY: the pointers are to constants of an object that is never unloaded, and only one launch uses it at a time.
unsafe impl Send for Loaded {}

impl Object {
    /// Loads the output of `compiler`.
    pub(crate) fn load(path: &Path, barriers: Vec<Barrier>) -> Result<Self, String> {
        let loaded = Loaded::load(path)?;
        Ok(Self {
            path: path.to_owned(),
            kernels: loaded.kernels.iter().map(|(name, _)| name.clone()).collect(),
            shadow_size: loaded.shadow_size,
            barriers,
            copies: Mutex::new(Copies { idle: vec![loaded], num_loaded: 1 }),
        })
    }

    pub(crate) fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(String::as_str)
    }

    fn copies(&self) -> MutexGuard<'_, Copies> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An unused one.
    fn take(&self) -> Result<Loaded, String> {
        let mut copies = self.copies();
        if let Some(loaded) = copies.idle.pop() {
            return Ok(loaded);
        }
        copies.num_loaded += 1;
        // The same file would be loaded once.
        let path = self.path.with_extension(format!("{}.so", copies.num_loaded));
        drop(copies);
        if !path.is_file() {
            let unfinished = path.with_extension(format!("unfinished-{}", std::process::id()));
            let copied = fs::copy(&self.path, &unfinished).and_then(|_| fs::rename(&unfinished, &path));
            copied.map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Loaded::load(&path)
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// The run time's message.
    ///
    /// # Safety
    /// The bindings are of memory with these lengths and, unless they are null, of shadows with `shadow_size` bytes for
    /// each byte, which no other code accesses at the same time. Kernels are not kept inside their buffers, unless the
    /// object checks accesses.
    pub(crate) unsafe fn launch(&self, launch: &RawLaunch<'_>) -> Result<(), String> {
        let loaded = self.take()?;
        // SAFETY: the caller's guarantees.
        let result = unsafe { loaded.launch(launch) };
        self.copies().idle.push(loaded);
        result.map_err(|message| self.with_lines(&message))
    }

    /// Puts lines instead of addresses, which are written `@1a2b@`.
    fn with_lines(&self, message: &str) -> String {
        let mut text = String::new();
        for (number, part) in message.split('@').enumerate() {
            if number % 2 == 0 {
                text.push_str(part);
            } else {
                text.push_str(&line(&self.path, part).unwrap_or_else(|| format!("address {part}")));
            }
        }
        text
    }
}

impl Loaded {
    fn load(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the object has the run time and kernels of this project; loading it runs no code of its own.
        let handle = unsafe { dlopen(name.as_ptr(), RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: after a failure the message is a string that stays until the next call in this thread.
            let message = unsafe { CStr::from_ptr(dlerror()) };
            return Err(format!("cannot load {}: {}", path.display(), message.to_string_lossy()));
        }
        let symbol = |name: &CStr| {
            // SAFETY: the handle is open.
            let address = unsafe { dlsym(handle, name.as_ptr()) };
            let missing = || format!("{} has no {}", path.display(), name.to_string_lossy());
            if address.is_null() { Err(missing()) } else { Ok(address) }
        };
        // SAFETY: the run time declares the function like this.
        let launch: LaunchFunction = unsafe { std::mem::transmute(symbol(c"msl_launch")?) };
        // SAFETY: as above.
        let shadow_size: unsafe extern "C" fn() -> u64 =
            unsafe { std::mem::transmute(symbol(c"msl_shadow_size")?) };
        let mut entry = symbol(c"msl_kernels")?.cast::<KernelEntry>().cast_const();
        let mut kernels = Vec::new();
        // SAFETY: the table of kernels ends with an entry without name.
        while let Some(name) = unsafe { (*entry).name.as_ref() } {
            // SAFETY: names are strings of the object.
            let name = unsafe { CStr::from_ptr(name) };
            kernels.push((name.to_string_lossy().into_owned(), entry));
            // SAFETY: this was not the last entry.
            entry = unsafe { entry.add(1) };
        }
        // SAFETY: it only returns a number.
        let shadow_size = unsafe { shadow_size() };
        let shadow_size = usize::try_from(shadow_size).map_err(|error| error.to_string())?;
        Ok(Self { kernels, launch, shadow_size })
    }

    /// # Safety
    /// As for [`Object::launch`].
    unsafe fn launch(&self, launch: &RawLaunch<'_>) -> Result<(), String> {
        let mut message = [0_u8; 1024];
        let (order, seed) = match launch.order {
            Order::Forward => (0, 0),
            Order::Reversed => (1, 0),
            Order::Random(seed) => (2, seed),
        };
        let of_run_time = LaunchOfRunTime {
            kernel: self.kernels[launch.kernel].1,
            arguments: launch.arguments.as_ptr(),
            arguments_len: launch.arguments.len() as u64,
            bindings: launch.bindings.as_ptr(),
            num_bindings: launch.bindings.len() as u64,
            constants: launch.constants.as_ptr(),
            num_constants: launch.constants.len() as u64,
            threadgroup_memory: launch.threadgroup_memory as u64,
            max_memory: launch.max_memory as u64,
            grid: launch.grid,
            num_threads: launch.num_threads,
            first_serial: launch.first_serial,
            order,
            seed,
            left_out: number_or_none(launch.left_out),
            defect: number_or_none(launch.defect),
            message: message.as_mut_ptr(),
            message_len: message.len() as u64,
        };
        // SAFETY: the structure has the run time's type and outlives the call; the caller guarantees the memory.
        if unsafe { (self.launch)(&raw const of_run_time) } == 0 {
            return Ok(());
        }
        let text = CStr::from_bytes_until_nul(&message).map(CStr::to_string_lossy).unwrap_or_default();
        Err(text.into_owned())
    }
}

/// The innermost line at an address of an object that is a line of a kernel.
pub(super) fn line(object: &Path, address: &str) -> Option<String> {
    let mut command = Command::new("addr2line");
    let output = command.arg("-i").arg("-e").arg(object).arg(format!("0x{address}")).output().ok()?;
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = output.lines().find(|line| !line.contains(".hpp:") && !line.starts_with('?'))?;
    Some(line.rsplit('/').next().unwrap_or(line).to_owned())
}
