//! Kernels compiled for this device: once per library, and once per function and constants.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_metal_kernels::metal::{self, ComputePipeline, ConstantValues, Device, Value};
use objc2::available;
use objc2::rc::Retained;
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLanguageVersion, MTLMathFloatingPointFunctions,
    MTLMathMode,
};

use super::metal_error;
use crate::ops::metal::{Constant, Library, Pipeline, PipelineLimits};
use crate::{Error, Result};

pub(super) struct Pipelines {
    device: Device,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Cache {
    libraries: Vec<(&'static Library, metal::Library)>,
    kernels: Vec<Arc<Kernel>>,
    /// By the index of the library, the function and its constants, the index of the kernel.
    indices: HashMap<(usize, String, Vec<Constant>), usize>,
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
        let mut cache = self.lock();
        let position = self.library(&mut cache, library)?;
        let key = (position, function.to_owned(), constants.to_vec());
        if let Some(&index) = cache.indices.get(&key) {
            return Ok(Pipeline { index, limits: cache.kernels[index].limits });
        }
        let kernel = self.compile(library, &cache.libraries[position].1, function, constants)?;
        let pipeline = Pipeline { index: cache.kernels.len(), limits: kernel.limits };
        cache.kernels.push(Arc::new(kernel));
        cache.indices.insert(key, pipeline.index);
        Ok(pipeline)
    }

    pub(super) fn kernel(&self, pipeline: Pipeline) -> Result<Arc<Kernel>> {
        let kernel = self.lock().kernels.get(pipeline.index).map(Arc::clone);
        kernel.ok_or_else(|| Error::internal("a pipeline of another device was given to this one"))
    }

    fn library(&self, cache: &mut Cache, library: &'static Library) -> Result<usize> {
        let same = |(known, _): &(&'static Library, _)| std::ptr::eq(*known, library) || *known == library;
        if let Some(position) = cache.libraries.iter().position(same) {
            return Ok(position);
        }
        let compiled = self.device.new_library_with_source(&library.text(), Some(&compile_options()));
        let compiled = compiled
            .map_err(|error| metal_error(format!("{}.metal does not compile", library.name), error))?;
        cache.libraries.push((library, compiled));
        Ok(cache.libraries.len() - 1)
    }

    fn compile(
        &self,
        library: &Library,
        compiled: &metal::Library,
        function: &str,
        constants: &[Constant],
    ) -> Result<Kernel> {
        let doing = || format!("{function} of {}.metal does not compile for {constants:?}", library.name);
        let values = constants.iter().map(|constant| match *constant {
            Constant::Bool(index, value) => (index as usize, Value::Bool(value)),
            Constant::U16(index, value) => (index as usize, Value::U16(value)),
        });
        let values = (!constants.is_empty()).then(|| ConstantValues::new(values.collect()));
        let function_object =
            compiled.get_function(function, values.as_ref()).map_err(|error| metal_error(doing(), error))?;
        let state = self
            .device
            .new_compute_pipeline_state_with_function(&function_object)
            .map_err(|error| metal_error(doing(), error))?;
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
