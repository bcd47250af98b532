//! From files to a running engine.

use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use super::draft::OpenedDraft;
use super::generation_config::GenerationConfig;
use super::kv_cache_choice::ChosenKvCache;
use super::{
    DeviceChoice, GenerationConfigChoice, KernelChoice, KvCacheChoice, Llm, OffloadOptions, OpenedDevice,
    expert_file, offload, prefix_store,
};
use crate::chat::{Chat, ChatConfig};
use crate::config::{ModelConfig, SpeculativeConfig, SpeculativeMethod};
use crate::engine::{Engine, EngineCore, ModelLimits};
use crate::grammar::GrammarCompiler;
use crate::hub::{ModelFiles, ResolvedModel};
use crate::models::{self, WeightTraffic};
use crate::ops::cpu::pool::ThreadPool;
use crate::ops::cpu::simd::CpuLevel;
use crate::ops::gpu::Gpu;
use crate::ops::{Context, EXPANDED_GROUP, KvCache, MemoryBandwidth, measure_bandwidth};
use crate::prefix_store::StoreOptions;
use crate::runner::{
    EngineLimits, ExpertDemand, ExpertWeights, MemoryDemand, MemoryPlan, ModelRunner, WindowDemand,
    available_memory_bytes, check_addresses, plan_memory,
};
use crate::tokenizer::Tokenizer;
use crate::weights::gguf::Value;
use crate::weights::{Checkpoint, DType, FileType, Quantization, Quantizer};
use crate::{Error, ErrorKind, Result, demo};

/// The fraction of the memory that is free when a model is loaded that all sequences together may use for their states
/// in grammars.
const GRAMMARS_DIVISOR: u64 = 4;

/// Memory in addition to the weights and the cache: activations, tables, the program itself.
const OVERHEAD_BYTES: u64 = 256 << 20;

/// How to load a model.
#[derive(Debug, Clone, Default)]
pub struct LlmOptions {
    /// `--device`.
    pub device: DeviceChoice,
    /// `--kernels`.
    pub kernels: KernelChoice,
    /// A GPU of the caller, to use instead of the one that `device` names.
    pub gpu: Option<Arc<dyn Gpu>>,
    /// `--threads`; by default the number that the system allows this process.
    pub threads: Option<usize>,
    /// `--pin-threads`: keep each thread on a processor.
    pub pin_threads: bool,
    /// The instruction set to use; by default the best one.
    pub cpu_level: Option<CpuLevel>,
    /// `--quantization`: block types for dense weights.
    pub quantization: Option<Quantization>,
    /// `--dtype`: the type of dense weights that are not quantised.
    pub dtype: DenseDType,
    /// `--generation-config`: where the defaults of requests are from.
    pub generation_config: GenerationConfigChoice,
    /// `--kv-cache-dtype`.
    pub kv_cache_dtype: KvCacheChoice,
    /// Context length, batch sizes and memory.
    pub limits: EngineLimits,
    /// `--expert-weights-dir`: the folder of experts that stay in a file; by default in the user's cache folder.
    pub expert_weights_dir: Option<PathBuf>,
    /// `--pre-tokenizer`: how a GGUF file's tokenizer splits text, overriding the file.
    pub pre_tokenizer: Option<String>,
    /// The chat template, and the parser of answers.
    pub chat: ChatConfig,
    /// A smaller model with the same tokens that drafts, replacing the method of `limits.speculative`.
    pub draft_model: Option<ResolvedModel>,
    /// Where prefixes are kept that a restart shall find.
    pub prefix_store: Option<StoreOptions>,
    /// Host memory for blocks that a GPU's cache evicts.
    pub kv_offload: Option<OffloadOptions>,
}

impl LlmOptions {
    /// Opens the requested model.
    ///
    /// # Errors
    /// As [`DeviceChoice::open`], and [`crate::ErrorKind::InvalidRequest`] for options that these kernels do not
    /// support.
    pub fn open_device(&self) -> Result<OpenedDevice> {
        if self.kernels == KernelChoice::Reference {
            let meaningless = [
                ("--threads", self.threads.is_some()),
                ("--pin-threads", self.pin_threads),
                ("--cpu-level", self.cpu_level.is_some()),
                ("a GPU of the caller", self.gpu.is_some()),
            ];
            if let Some((what, _)) = meaningless.into_iter().find(|(_, is_given)| *is_given) {
                return Err(Error::invalid_request(format!("{what} has no effect with --kernels reference"))
                    .with_hint(
                        "omit one of them; candle reads its number of threads from RAYON_NUM_THREADS",
                    ));
            }
        }
        match &self.gpu {
            Some(gpu) => Ok(OpenedDevice::Gpu(Arc::clone(gpu))),
            None => self.device.open(self.kernels),
        }
    }

    /// The computing device.
    ///
    /// # Errors
    /// If the number of threads is impossible.
    pub fn open_context(&self, device: OpenedDevice) -> Result<Context> {
        new_context(self, device)
    }

    /// The bandwidth of the device's memory: see [`measure_bandwidth`].
    ///
    /// # Errors
    /// As [`Self::open_device`], or if the number of threads is impossible.
    pub fn measure_bandwidth(&self) -> Result<Option<MemoryBandwidth>> {
        Ok(measure_bandwidth(&self.open_context(self.open_device()?)?))
    }
}

/// The type that dense weights are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DenseDType {
    /// As in the file.
    #[default]
    Auto,
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// The upper half of a single.
    BF16,
}

impl DenseDType {
    /// Every choice, as spelled in flags.
    pub const NAMES: [&str; 4] = ["auto", "f32", "f16", "bf16"];

    /// The type; none for `auto`.
    #[must_use]
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::Auto => None,
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::BF16 => Some(DType::BF16),
        }
    }
}

impl FromStr for DenseDType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "f32" | "float32" | "float" => Ok(Self::F32),
            "f16" | "float16" | "half" => Ok(Self::F16),
            "bf16" | "bfloat16" => Ok(Self::BF16),
            _ => Err(Error::invalid_request(format!("{name:?} is not a type of dense weights"))
                .with_hint(format!("use one of {}", Self::NAMES.join(", ")))),
        }
    }
}

/// Receives the progress of loading.
pub trait LoadProgress: Sync {
    /// A stage begins that will advance by `total` bytes.
    fn begin(&self, stage: &str, total: u64);
    /// This many more bytes are done.
    fn advance(&self, bytes: u64);
    /// The stage is over.
    fn end(&self);
    /// This many of the kernels that the model takes are compiled, alongside the stage and perhaps for longer than it
    /// takes. Called from any thread; the last time with all of them, unless loading fails.
    fn compiling(&self, _num_done: usize, _num_kernels: usize) {}
}

/// Reports nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl LoadProgress for NoProgress {
    fn begin(&self, _stage: &str, _total: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn end(&self) {}
}

impl Llm {
    /// Loads a model and starts its engine.
    ///
    /// # Errors
    /// If a file is damaged or requires a missing one; if weights and cache do not fit into memory; if limits
    /// contradict each other. These checks come before all expensive work.
    pub fn load(model: &ResolvedModel, options: &LlmOptions, progress: &dyn LoadProgress) -> Result<Self> {
        let start = Instant::now();
        check_addresses()?;
        let opened = OpenedModel::open(model, options)?;
        let device = options.open_device()?;
        let mut demand = opened.demand(options, &device)?;
        let draft = options.draft_model.as_ref().map(|draft| OpenedDraft::open(draft, options, &opened));
        let draft = draft.transpose()?;
        draft.iter().try_for_each(|draft| draft.add_to(&mut demand, options, &device))?;
        let plan = plan_memory(&demand, &options.limits)?;
        // Another process may have taken the planned memory.
        let with_plan = |error: Error| match error.kind() {
            ErrorKind::Capacity => error.context(plan.describe(&demand)),
            _ => error,
        };
        let MemoryPlan { engine: engine_config, experts_in_file } = plan.clone();
        let rounds_queries = matches!(device, OpenedDevice::Gpu(_));
        let context = Arc::new(new_context(options, device)?);
        let kv_cache = options.kv_cache_dtype.choose(
            &opened.checkpoint,
            &opened.config,
            rounds_queries,
            num_threads(options)?,
        )?;
        let ChosenKvCache { dtype: kv_cache_dtype, notice, broken_logits_hint } = kv_cache;
        let in_file = demand.experts.filter(|_| experts_in_file);
        let quantizer = opened.quantizer(options)?;
        let notices = opened.notices(quantizer.as_ref(), |file_type| context.kept_as(file_type));
        let notices = notices.into_iter().chain(notice).collect();
        let load_options = models::LoadOptions {
            quantizer,
            expert_file: in_file.map(|experts| expert_file::open(&opened, options, experts)).transpose()?,
            max_model_len: engine_config.max_model_len,
            max_num_batched_tokens: engine_config.max_num_batched_tokens,
            max_num_seqs: engine_config.max_num_seqs,
            num_speculative_tokens: engine_config.speculative.num_speculative_tokens,
            block_size: engine_config.block_size,
        };
        let stage = if options.quantization.is_some() { "quantising" } else { "loading" };
        progress.begin(stage, opened.checkpoint.total_bytes());
        let reported = AtomicU64::new(0);
        let on_progress = |done: models::LoadProgress| {
            let before = reported.fetch_max(done.loaded_bytes, Ordering::Relaxed);
            progress.advance(done.loaded_bytes.saturating_sub(before));
        };
        let (checkpoint, config) = (&opened.checkpoint, &opened.config);
        // A GPU's kernels are compiled at the same time, not in the first request.
        let is_wanted = AtomicBool::new(true);
        let compile = || {
            let dtype = kv_cache_dtype;
            models::compile_kernels(
                checkpoint,
                config,
                &context,
                &load_options,
                dtype,
                &|num_done, num_kernels| {
                    progress.compiling(num_done, num_kernels);
                    is_wanted.load(Ordering::Relaxed)
                },
            )
        };
        let (lm, compiled) = thread::scope(|scope| {
            let compiling = scope.spawn(compile);
            let lm = models::load(checkpoint, config, &context, &load_options, &on_progress);
            is_wanted.store(lm.is_ok(), Ordering::Relaxed);
            progress.end();
            (lm, compiling.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        let lm = lm.map_err(with_plan)?;
        compiled.map_err(with_plan)?;
        let kv_cache = KvCache::with_window_blocks(
            &context,
            &opened.config.with_cached_layers(),
            engine_config.num_blocks + opened.num_spare_blocks(options),
            engine_config.windows.map(|windows| windows.num_blocks),
            engine_config.block_size,
            kv_cache_dtype,
        )
        .map_err(with_plan)?;
        let weight_traffic =
            WeightTraffic::of(checkpoint, config, load_options.quantizer.as_ref(), |file_type| {
                context.kept_as(file_type)
            })?;
        let limits = ModelLimits {
            vocab_size: opened.config.vocab_size,
            eos_token_ids: match &opened.tokenizer {
                Some(tokenizer) => tokenizer.stop_token_ids(&opened.config.eos_token_ids),
                None => opened.config.eos_token_ids.clone(),
            },
            max_position_embeddings: opened.config.max_position_embeddings,
            broken_logits_hint,
        };
        let grammars = opened.tokenizer.as_ref().map(|tokenizer| {
            // A sequence has a second state for drafts.
            let num_states = if engine_config.speculative.num_speculative_tokens > 0 { 2 } else { 1 };
            let num_sequences = (num_states * engine_config.max_num_seqs.max(1)) as u64;
            let bytes_per_sequence = available_memory_bytes() / GRAMMARS_DIVISOR / num_sequences;
            GrammarCompiler::new(Arc::clone(tokenizer), limits.vocab_size, &limits.eos_token_ids)
                .with_memory(bytes_per_sequence)
        });
        let draft = draft.map(|draft| draft.load(options, &engine_config, &context));
        let draft = draft.transpose().map_err(with_plan)?;
        let runner = ModelRunner::new(lm, kv_cache).map_err(with_plan)?;
        let mut runner = runner.with_spare_blocks(engine_config.num_blocks);
        let store = options.prefix_store.as_ref();
        let store =
            store.map(|store| prefix_store::open(store, &opened, options, &engine_config, &mut runner));
        let mut core = EngineCore::new(Box::new(runner), limits, engine_config)?;
        if let Some(draft) = draft {
            core.set_draft_source(Box::new(draft));
        }
        if let Some(OffloadOptions { max_bytes, on_notice }) = options.kv_offload.clone() {
            core.set_host_tier(max_bytes, move |line| on_notice(line)).map_err(with_plan)?;
        }
        if let Some((store, step_seconds)) = store.transpose()?.flatten() {
            core.expect_steps(step_seconds);
            core.set_prefix_store(store);
        }
        let engine = Engine::start(core)?;
        Ok(Self {
            name: model.display_name.clone(),
            engine,
            chat: opened.chat,
            chat_problem: opened.chat_problem,
            tokenizer: opened.tokenizer,
            tokenizer_error: opened.tokenizer_error,
            grammars,
            config: opened.config,
            context,
            weight_traffic,
            expert_file: load_options.expert_file,
            sampling_defaults: opened.generation.defaults,
            notices,
            load_time: start.elapsed(),
        })
    }
}

/// All properties of a model that do not need its weights.
#[derive(Debug)]
pub(super) struct OpenedModel {
    pub(super) checkpoint: Checkpoint,
    pub(super) config: ModelConfig,
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    /// Why there is none, if the files have one.
    pub(super) tokenizer_error: Option<Error>,
    pub(super) chat: Option<Chat>,
    pub(super) generation: GenerationConfig,
    /// Why the model's own template is of no use; all that needs none works.
    pub(super) chat_problem: Option<String>,
}

impl OpenedModel {
    pub(super) fn open(model: &ResolvedModel, options: &LlmOptions) -> Result<Self> {
        let chat = &options.chat;
        let checkpoint = match &model.files {
            ModelFiles::Demo => Checkpoint::from_static(demo::MODEL)?,
            ModelFiles::Gguf(path) | ModelFiles::Folder(path) => Checkpoint::open(path)?,
        };
        let mut config = ModelConfig::from_checkpoint(&checkpoint)?;
        let generation = GenerationConfig::read(&options.generation_config, &checkpoint)?;
        if let Some(ids) = &generation.eos_token_ids {
            // Ids outside the vocabulary never occur.
            let is_token = |id: &u32| (*id as usize) < config.vocab_size;
            config.eos_token_ids = ids.iter().copied().filter(is_token).collect();
        }
        if drafts_itself(options) {
            config.load_mtp_block(&checkpoint)?;
        }
        checkpoint.ensure_supported()?;
        let (tokenizer, tokenizer_error) = match load_tokenizer(&checkpoint, options.pre_tokenizer.as_deref())
        {
            Ok(tokenizer) => (tokenizer.map(Arc::new), None),
            // Requests in token ids need none.
            Err(error) if may_go_without(&error) => (None, Some(error)),
            Err(error) => return Err(error),
        };
        let (chat, chat_problem) = match &tokenizer {
            Some(tokenizer)
                if chat.template.is_some()
                    || tokenizer.chat_template().is_some()
                    || tokenizer.default_chat_template_problem().is_some() =>
            {
                open_chat(tokenizer, chat)?
            }
            _ => (None, None),
        };
        Ok(Self { checkpoint, config, tokenizer, tokenizer_error, chat, generation, chat_problem })
    }

    /// The inputs of the memory plan.
    pub(super) fn demand(&self, options: &LlmOptions, device: &OpenedDevice) -> Result<MemoryDemand> {
        options.limits.validate()?;
        num_threads(options)?;
        let available_bytes = match device {
            OpenedDevice::Cpu(_) => available_memory_bytes(),
            OpenedDevice::Gpu(gpu) if device.has_own_memory() => {
                options.limits.usable_gpu_memory(gpu.working_set_bytes())?
            }
            OpenedDevice::Gpu(gpu) => gpu.working_set_bytes(),
            OpenedDevice::Reference(backend) => {
                backend.working_set_bytes().unwrap_or_else(available_memory_bytes)
            }
        };
        let shared_bytes = offload::shared_bytes(options, device)?;
        // The host's memory; the same memory if a GPU has none of its own.
        let has_queue = options.prefix_store.is_some() && !device.has_own_memory();
        let queue_bytes = if has_queue { prefix_store::MAX_QUEUED_BYTES } else { 0 };
        let block_size = options.limits.block_size.max(1);
        let config = self.config.with_cached_layers();
        let per_token =
            KvCache::bytes_per_token(&config, block_size, options.kv_cache_dtype.planned()) as u64;
        let weight_bytes = match self.quantizer(options)? {
            Some(quantizer) => {
                quantizer.planned_bytes(&self.checkpoint, |file_type| device.kept_as(file_type))?
            }
            None => self.checkpoint.kept_bytes(|file_type| device.kept_as(file_type)),
        };
        Ok(MemoryDemand {
            weight_bytes,
            kv_bytes_per_token: per_token,
            windows: self.window_demand(options, device, per_token),
            max_position_embeddings: self.config.max_position_embeddings,
            usual_model_len: self.config.usual_model_len,
            context_hint: self.config.context_hint,
            available_bytes: available_bytes.saturating_sub(
                OVERHEAD_BYTES
                    + self.mtp_bytes(options, per_token, device.useful_batched_tokens())
                    + queue_bytes
                    + shared_bytes,
            ),
            is_gpu_memory: device.has_own_memory(),
            useful_batched_tokens: device.useful_batched_tokens(),
            step_cost: device.step_cost(weight_bytes),
            prompt_group: self.config.latent_attention.is_some().then_some(EXPANDED_GROUP),
            experts: self.expert_demand(options, device)?,
        })
    }

    /// Layers whose blocks outside the window can be given back. Prefixes that are kept elsewhere have all layers, and so
    /// have models with an MTP block.
    fn window_demand(
        &self,
        options: &LlmOptions,
        device: &OpenedDevice,
        bytes_per_token: u64,
    ) -> Option<WindowDemand> {
        let (num_layers, window) = self.config.windows();
        let is_kept = options.prefix_store.is_some() || options.kv_offload.is_some();
        let window = window.filter(|_| !is_kept && self.config.mtp_layer().is_none())?;
        let bytes_per_token = bytes_per_token * num_layers as u64 / self.config.num_layers.max(1) as u64;
        Some(WindowDemand { bytes_per_token, window, tile: device.key_tile() })
    }

    /// The experts that may stay in a file, which only the CPU's kernels support: candle leaves all weights in the
    /// model's own file, and GPUs need them in their memory.
    fn expert_demand(&self, options: &LlmOptions, device: &OpenedDevice) -> Result<Option<ExpertDemand>> {
        let Some(config) = &self.config.experts else { return Ok(None) };
        if !matches!(device, OpenedDevice::Cpu(_)) {
            if options.limits.expert_weights == ExpertWeights::File {
                return Err(Error::invalid_request(
                    "--expert-weights file is for the kernels of the CPU, not for other devices and --kernels \
                     reference",
                )
                .with_hint("omit --expert-weights, or give --device cpu"));
            }
            return Ok(None);
        }
        let traffic = WeightTraffic::of(
            &self.checkpoint,
            &self.config,
            self.quantizer(options)?.as_ref(),
            |file_type| device.kept_as(file_type),
        )?;
        let num_layers = self.config.num_layers.saturating_sub(config.num_dense_layers).max(1);
        // The MTP block has as many as a layer.
        let num_more = u64::from(self.config.mtp_layer().is_some());
        Ok(traffic.experts.map(|experts| {
            let layer_bytes = experts.num_bytes / num_layers as u64;
            ExpertDemand { num_bytes: experts.num_bytes + num_more * layer_bytes, layer_bytes }
        }))
    }

    /// Memory for drafts by the model's MTP block in addition to its weights and its layer of the cache: spare blocks,
    /// and two rows of activations for each token of a step.
    fn mtp_bytes(&self, options: &LlmOptions, bytes_per_token: u64, useful_batched_tokens: usize) -> u64 {
        if self.config.mtp_layer().is_none() {
            return 0;
        }
        let num_tokens = options.limits.max_num_batched_tokens.unwrap_or(useful_batched_tokens) as u64;
        let row_bytes = (size_of::<f32>() * self.config.hidden_size) as u64;
        let spare_tokens = (self.num_spare_blocks(options) * options.limits.block_size) as u64;
        spare_tokens.saturating_mul(bytes_per_token).saturating_add(num_tokens.saturating_mul(2 * row_bytes))
    }

    /// Spare blocks of the cache, for drafts that run past a sequence's last block.
    fn num_spare_blocks(&self, options: &LlmOptions) -> usize {
        let num_tokens = options.limits.speculative.num_speculative_tokens;
        self.config.mtp_layer().map_or(0, |_| num_tokens.div_ceil(options.limits.block_size.max(1)))
    }

    /// Notices about the model, a line each.
    pub(super) fn notices(
        &self,
        quantizer: Option<&Quantizer>,
        kept_as: impl Fn(FileType) -> FileType,
    ) -> Vec<String> {
        let mut notices = self.checkpoint.notices(quantizer.is_some_and(Quantizer::is_chosen));
        notices.extend(quantizer.and_then(|quantizer| quantizer.notice(&self.checkpoint)));
        notices.extend(self.config.notices.iter().chain(&self.generation.notices).cloned());
        notices.extend(self.tokenizer.iter().flat_map(|tokenizer| tokenizer.notices()).cloned());
        notices.extend(self.tokenizer_error.as_ref().map(|error| {
            format!("the tokenizer cannot be used, so that only token ids work: {}", error.message())
        }));
        notices.extend(self.chat_problem.as_ref().map(|problem| {
            format!("{problem}; chats are refused until --chat-template names another template")
        }));
        notices.extend(self.chat.as_ref().and_then(Chat::notice));
        let repacked: Vec<_> = self.checkpoint.repackings(kept_as).iter().map(ToString::to_string).collect();
        if !repacked.is_empty() {
            notices.push(format!("repacked, with the same values: {}", repacked.join("; ")));
        }
        notices
    }

    /// The conversion of weights at load, if one was requested.
    pub(super) fn quantizer(&self, options: &LlmOptions) -> Result<Option<Quantizer>> {
        let num_threads = NonZeroUsize::new(num_threads(options)?).unwrap_or(NonZeroUsize::MIN);
        match (options.quantization, options.dtype.dtype()) {
            (Some(_), Some(dtype)) => {
                Err(Error::invalid_request(format!("--dtype {dtype} and --quantization exclude each other")))
            }
            (Some(quantization), None) => {
                Ok(Some(Quantizer::new(quantization, &self.checkpoint, Some(num_threads))))
            }
            (None, Some(dtype)) => Ok(Some(Quantizer::to_dense(dtype, num_threads))),
            (None, None) => Ok(self.checkpoint.has_packed().then(|| Quantizer::unpacking(Some(num_threads)))),
        }
    }
}

/// Whether the model drafts with its MTP block.
fn drafts_itself(options: &LlmOptions) -> bool {
    let SpeculativeConfig { method, num_speculative_tokens, .. } = options.limits.speculative;
    method == SpeculativeMethod::Mtp && num_speculative_tokens > 0
}

/// Whether a model may be used without its tokenizer, because the tokenizer is the problem.
fn may_go_without(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidModel | ErrorKind::Unsupported | ErrorKind::NotFound)
}

/// The chat format, or why there is none. A template that was given by hand has to be one; with the model's own, the
/// model can be used without chats.
fn open_chat(tokenizer: &Tokenizer, config: &ChatConfig) -> Result<(Option<Chat>, Option<String>)> {
    let is_own = config.template.is_none();
    match Chat::with_config(tokenizer, config) {
        Ok(chat) => match chat.problem() {
            Some(problem) if is_own => Ok((None, Some(problem.to_owned()))),
            _ => Ok((Some(chat), None)),
        },
        Err(error) if is_own && error.kind() == ErrorKind::InvalidModel => {
            Ok((None, Some(error.message().to_owned())))
        }
        Err(error) => Err(error),
    }
}

/// A folder may be without a tokenizer; then the model takes token ids only.
fn load_tokenizer(checkpoint: &Checkpoint, pre_tokenizer: Option<&str>) -> Result<Option<Tokenizer>> {
    // A manual choice is used.
    let chosen = |error: Error| match pre_tokenizer {
        Some(_) if may_go_without(&error) => {
            let again = Error::invalid_request(error.message());
            error.hint().map(str::to_owned).into_iter().fold(again, Error::with_hint)
        }
        _ => error,
    };
    if let Some(metadata) = checkpoint.gguf_metadata() {
        return match metadata.get("tokenizer.ggml.model") {
            // These values mark its absence.
            Some(Value::String(model)) if matches!(model.as_str(), "none" | "no_vocab") => Ok(None),
            Some(_) => Tokenizer::from_gguf_with(metadata, pre_tokenizer).map(Some).map_err(chosen),
            None => Ok(None),
        };
    }
    if let Some(name) = pre_tokenizer {
        return Err(Error::invalid_request(format!(
            "--pre-tokenizer {name} is for GGUF files; tokenizer.json has its own pre-tokenizer"
        ))
        .with_hint("leave --pre-tokenizer out"));
    }
    match checkpoint.path() {
        Some(folder) if has_tokenizer(folder) => Tokenizer::from_dir(folder).map(Some),
        _ => Ok(None),
    }
}

fn has_tokenizer(folder: &Path) -> bool {
    ["tokenizer.json", "tokenizer.model", "vocab.json"].iter().any(|name| folder.join(name).exists())
}

/// # Errors
/// [`ErrorKind::InvalidRequest`] if it is out of range.
pub(super) fn num_threads(options: &LlmOptions) -> Result<usize> {
    let num_threads = options.threads.unwrap_or_else(ThreadPool::default_num_threads);
    if num_threads == 0 || num_threads > 1_024 {
        return Err(Error::invalid_request(format!(
            "--threads is {num_threads}; it must be at least 1 and at most 1024"
        )));
    }
    Ok(num_threads)
}

fn new_context(options: &LlmOptions, device: OpenedDevice) -> Result<Context> {
    let num_threads = num_threads(options)?;
    let level = options.cpu_level.unwrap_or_else(CpuLevel::detect);
    match device {
        OpenedDevice::Cpu(_) => {
            let start = if options.pin_threads { ThreadPool::pinned } else { ThreadPool::new };
            Ok(Context::cpu_with(start(num_threads), level))
        }
        OpenedDevice::Gpu(gpu) => Ok(Context::gpu(gpu)),
        OpenedDevice::Reference(backend) => Ok(Context::reference(backend)),
    }
}
