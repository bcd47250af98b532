//! Compiled kernels: from the cache in the user's folder, or else from the run-time compiler.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::{function, module};
use cudarc::driver::sys::{CUfunction, CUfunction_attribute};
use xxhash_rust::xxh3::Xxh3;

use super::driver::{Device, Doing};
use super::nvrtc::Nvrtc;
use super::source::{HEADERS, Program, program};
use crate::ops::gpu::device::{Constant, Library, Pipeline, PipelineLimits};
use crate::{Error, Result};

/// Compiler options: `a * b + c` may become one operation, as in the kernels of other GPUs.
pub(super) const OPTIONS: [&str; 3] = ["--std=c++17", "-default-device", "--extra-device-vectorization"];

type Key = (&'static str, String, Vec<Constant>);

/// The kernels of a GPU that are loaded.
#[derive(Debug)]
pub(super) struct Pipelines {
    device: Arc<Device>,
    compiler: &'static Nvrtc,
    /// The folder of compiled kernels, which is kept between starts, if there is one.
    cache: Option<PathBuf>,
    /// A slot for each kernel; the thread that compiles it holds its lock meanwhile.
    slots: Mutex<HashMap<Key, Arc<Mutex<Option<Pipeline>>>>>,
    loaded: Mutex<Vec<Loaded>>,
}

/// A kernel that can be launched.
#[derive(Debug, Clone)]
pub(super) struct Loaded {
    pub(super) name: Arc<str>,
    pub(super) function: CUfunction,
}

// SAFETY: handles of the driver may be used in any thread.
unsafe impl Send for Loaded {}

impl Pipelines {
    pub(super) fn new(device: &Arc<Device>, compiler: &'static Nvrtc, cache: Option<&Path>) -> Self {
        Self {
            device: Arc::clone(device),
            compiler,
            cache: cache.map(Path::to_owned),
            slots: Mutex::default(),
            loaded: Mutex::default(),
        }
    }

    /// The kernel of a pipeline.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if it is another device's.
    pub(super) fn loaded(&self, pipeline: Pipeline) -> Result<Loaded> {
        let loaded = lock(&self.loaded);
        loaded.get(pipeline.index).cloned().ok_or_else(|| Error::internal("a pipeline of another device"))
    }

    /// As [`crate::ops::gpu::Gpu::pipeline`].
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] with the compiler's or the driver's message.
    pub(super) fn get(
        &self,
        library: &'static Library,
        name: &str,
        constants: &[Constant],
    ) -> Result<Pipeline> {
        let key = (library.name, name.to_owned(), constants.to_vec());
        let slot = Arc::clone(lock(&self.slots).entry(key).or_default());
        let mut slot = lock(&slot);
        if let Some(pipeline) = *slot {
            return Ok(pipeline);
        }
        let program = program(library, name, constants)?;
        let image = self.image(&format!("{name} of {}", library.file()), &program)?;
        let (function, limits) = self.load(name, &program.entry, &image)?;
        let mut loaded = lock(&self.loaded);
        let pipeline = Pipeline { index: loaded.len(), limits };
        loaded.push(Loaded { name: name.into(), function });
        *slot = Some(pipeline);
        Ok(pipeline)
    }

    /// The image for the driver, compiled by this compiler now or earlier.
    fn image(&self, name: &str, program: &Program) -> Result<Vec<u8>> {
        let target = self.compiler.target(self.device.architecture);
        let mut hash = Xxh3::new();
        for part in [&*program.text, &target.option(), &format!("{:?}", self.compiler.version)]
            .into_iter()
            .chain(OPTIONS)
            .chain(HEADERS.iter().map(|(_, text)| *text))
        {
            hash.update(part.as_bytes());
            hash.update(&[0]);
        }
        let path = self.cache.as_ref().map(|folder| folder.join(format!("{:032x}.bin", hash.digest128())));
        if let Some(image) = path.as_ref().and_then(|path| read(path)) {
            return Ok(image);
        }
        let image = self.compiler.compile(name, &program.text, &HEADERS, target, &OPTIONS)?.image;
        if let Some(path) = path {
            // Without a cache, only the start is slower.
            drop(write(&path, &image));
        }
        Ok(image)
    }

    fn load(&self, name: &str, entry: &str, image: &[u8]) -> Result<(CUfunction, PipelineLimits)> {
        self.device.enter()?;
        let doing = format!("loading {name}");
        // SAFETY: the image is complete, by its own header or by the zero after its text. The module is never unloaded.
        let module = unsafe { module::load_data(image.as_ptr().cast()) }.doing(&doing)?;
        let entry = CString::new(entry).map_err(|error| Error::internal(error.to_string()))?;
        // SAFETY: the module was just loaded.
        let function = unsafe { module::get_function(module, entry) }.doing(&doing)?;
        let attribute = |attribute| {
            // SAFETY: the function is one of a loaded module.
            let value = unsafe { function::get_function_attribute(function, attribute) }.doing(&doing)?;
            Ok::<_, Error>(usize::try_from(value).unwrap_or(0))
        };
        let static_memory = attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let dynamic = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let max_memory = self.device.threadgroup_memory;
        let most = i32::try_from(max_memory.saturating_sub(static_memory)).unwrap_or(0);
        // SAFETY: as above.
        unsafe { function::set_function_attribute(function, dynamic, most) }.doing(&doing)?;
        let limits = PipelineLimits {
            max_threads: attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            static_memory,
            max_memory,
            ..PipelineLimits::APPLE
        };
        Ok((function, limits))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bytes before an image in the cache: its hash, so that a truncated file is compiled anew.
const HASH_BYTES: usize = 16;

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let hash: [u8; HASH_BYTES] = bytes.get(..HASH_BYTES)?.try_into().ok()?;
    bytes.drain(..HASH_BYTES);
    (xxhash_rust::xxh3::xxh3_128(&bytes).to_le_bytes() == hash).then_some(bytes)
}

/// Writes a file atomically, so that processes need no other coordination.
fn write(path: &Path, image: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let unfinished = path.with_extension(format!("{}-{number}", std::process::id()));
    let hash = xxhash_rust::xxh3::xxh3_128(image).to_le_bytes();
    let written =
        fs::write(&unfinished, [&hash, image].concat()).and_then(|()| fs::rename(&unfinished, path));
    if written.is_err() {
        drop(fs::remove_file(&unfinished));
    }
    written
}
