//! Kernels compiled for this device: a text for each instance of a template and one for the other kernels of a library,
//! then once per function and constants.
//!
//! Several threads may request the same kernel. Each text and each kernel has a slot; the first thread compiles, and
//! the others wait for that slot only, because compilation takes seconds and does not hold the lock of the lists.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_metal_kernels::metal::{self, ComputePipeline, ConstantValues, Device, Value};
use objc2::available;
use objc2::rc::Retained;
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLanguageVersion, MTLMathFloatingPointFunctions,
    MTLMathMode,
};

use super::metal_message;
use crate::ops::gpu::device::WITHOUT_KERNELS;
use crate::ops::gpu::device::{Constant, Library, Pipeline, PipelineLimits};
use crate::{Error, Result};

pub(super) struct Pipelines {
    device: Device,
    cache: Mutex<Cache>,
}

/// A result of compilation, kept for later requests.
type Slot<T> = Arc<OnceLock<Result<T, String>>>;

/// A kernel's library by name, its function, and its constants.
type Key = (&'static str, String, Vec<Constant>);

#[derive(Default)]
struct Cache {
    /// By the library's name and the instance that its text has.
    texts: HashMap<(&'static str, Option<String>), Slot<metal::Library>>,
    pipelines: HashMap<Key, Slot<Pipeline>>,
    kernels: Vec<Arc<Kernel>>,
}

/// A compiled kernel.
pub(super) struct Kernel {
    name: String,
    state: ComputePipeline,
    limits: PipelineLimits,
}

impl Pipelines {
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.clone(), cache: Mutex::default() }
    }

    pub(super) fn pipeline(
        &self,
        library: &'static Library,
        function: &str,
        constants: &[Constant],
    ) -> Result<Pipeline> {
        let key = (library.name, function.to_owned(), constants.to_vec());
        let instance = (!library.is_plain(function)).then_some(function);
        let (text_slot, slot) = {
            let mut cache = self.lock();
            let text_slot = cache.texts.entry((library.name, instance.map(str::to_owned))).or_default();
            (Arc::clone(text_slot), Arc::clone(cache.pipelines.entry(key).or_default()))
        };
        let compiled = slot.get_or_init(|| {
            let compiled = text_slot.get_or_init(|| self.library(library, instance)).as_ref()?;
            let kernel = self.compile(library, compiled, function, constants)?;
            let limits = kernel.limits;
            let mut cache = self.lock();
            cache.kernels.push(Arc::new(kernel));
            Ok(Pipeline { index: cache.kernels.len() - 1, limits })
        });
        compiled.clone().map_err(|message| Error::internal(message).with_hint(WITHOUT_KERNELS))
    }

    pub(super) fn kernel(&self, pipeline: Pipeline) -> Result<Arc<Kernel>> {
        let kernel = self.lock().kernels.get(pipeline.index).map(Arc::clone);
        kernel.ok_or_else(|| Error::internal("a pipeline of another device was given to this one"))
    }

    fn library(&self, library: &Library, instance: Option<&str>) -> Result<metal::Library, String> {
        let text = library.text_of(instance);
        let compiled = self.device.new_library_with_source(&text, Some(&compile_options()));
        compiled.map_err(|error| metal_message(format!("{}.metal does not compile", library.name), error))
    }

    fn compile(
        &self,
        library: &Library,
        compiled: &metal::Library,
        function: &str,
        constants: &[Constant],
    ) -> Result<Kernel, String> {
        let doing = || format!("{function} of {}.metal does not compile for {constants:?}", library.name);
        let values = constants.iter().map(|constant| match *constant {
            Constant::Bool(index, value) => (index as usize, Value::Bool(value)),
            Constant::U16(index, value) => (index as usize, Value::U16(value)),
        });
        let values = (!constants.is_empty()).then(|| ConstantValues::new(values.collect()));
        let function_object = compiled
            .get_function(function, values.as_ref())
            .map_err(|error| metal_message(doing(), error))?;
        let state = self
            .device
            .new_compute_pipeline_state_with_function(&function_object)
            .map_err(|error| metal_message(doing(), error))?;
        let limits = PipelineLimits {
            max_threads: state.as_ref().maxTotalThreadsPerThreadgroup(),
            simd_width: state.as_ref().threadExecutionWidth(),
            static_memory: state.as_ref().staticThreadgroupMemoryLength(),
            max_memory: self.device.as_ref().maxThreadgroupMemoryLength(),
        };
        Ok(Kernel { name: function.to_owned(), state, limits })
    }

    fn lock(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kernel {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn state(&self) -> &ComputePipeline {
        &self.state
    }

    pub(super) fn limits(&self) -> PipelineLimits {
        self.limits
    }
}

/// Fast arithmetic, as candle's kernels are compiled.
pub(super) fn compile_options() -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    let (major, minor) = Library::LANGUAGE_VERSION;
    options.setLanguageVersion(MTLLanguageVersion((major << 16) + minor));
    if available!(macos = 15.0) {
        options.setMathMode(MTLMathMode::Fast);
        options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Fast);
    } else {
        #[expect(deprecated, reason = "what replaced it begins with macOS 15")]
        options.setFastMathEnabled(true);
    }
    options
}
