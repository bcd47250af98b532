//! Facts of a model before its weights are loaded.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::load::OpenedModel;
use super::{KvCacheChoice, Llm, LlmOptions, expert_file};
use crate::chat::AnswerFormat;
use crate::config::{ExpertsConfig, ModelConfig};
use crate::hub::ResolvedModel;
use crate::models::WeightTraffic;
use crate::runner::{MemoryDemand, MemoryPlan, plan_memory};
use crate::weights::TypeSummary;
use crate::{ErrorKind, Result};

/// Configuration, weights and memory plan of a model.
#[derive(Debug, Clone)]
pub struct ModelReport {
    /// The model's name.
    pub name: String,
    /// The architecture's name.
    pub architecture: String,
    /// Dimensions and variants, as names and values; null for missing ones.
    pub config: Vec<(&'static str, Value)>,
    /// How much of the weights is stored in which type.
    pub types: Vec<TypeSummary>,
    /// How much is kept in which type when it is loaded, where that is converted.
    pub loaded_types: Option<Vec<TypeSummary>>,
    /// Notices about the model and the request, a line each.
    pub notices: Vec<String>,
    /// The weights that steps read.
    pub traffic: WeightTraffic,
    /// The inputs of the memory plan.
    pub demand: MemoryDemand,
    /// The type of the KV cache, which for `auto` may be another of the same size when the weights are known.
    pub kv_cache_dtype: KvCacheChoice,
    /// Bytes of host memory for blocks that a GPU's cache evicts.
    pub kv_offload_bytes: Option<u64>,
    /// How many tokens a token attends to at most in each layer, if there is a limit.
    pub windows: Vec<Option<usize>>,
    /// The memory plan, or why there is none.
    pub plan: Result<MemoryPlan, String>,
    /// The file that experts stay in, if that is the plan; it need not be there yet.
    pub expert_file: Option<PathBuf>,
    /// Tokens of the tokenizer, if there is one.
    pub tokenizer_vocab_size: Option<usize>,
    /// Whether the files have an unusable tokenizer; a notice has the reason.
    pub has_broken_tokenizer: bool,
    /// Whether there is a chat template that is of use.
    pub has_chat_template: bool,
    /// How the model calls tools and how it reasons, as far as its template and its vocabulary show.
    pub answer_format: AnswerFormat,
    /// Why there is one that is not.
    pub chat_problem: Option<String>,
}

impl ModelReport {
    /// Tokens of a sequence for which [`Self::bandwidth_limit`] is computed: those of a short chat's prompt, or the
    /// maximum.
    #[must_use]
    pub fn usual_context_len(&self) -> usize {
        let longest =
            self.plan.as_ref().map_or(self.demand.max_position_embeddings, |plan| plan.engine.max_model_len);
        longest.min(1_024)
    }

    /// Bytes of weights and cache that a step reads which generates a token for each of `num_sequences` sequences of
    /// `context_len` tokens.
    #[must_use]
    pub fn bytes_per_step(&self, num_sequences: usize, context_len: usize) -> u64 {
        let attended = |window: &Option<usize>| window.map_or(context_len, |window| context_len.min(window));
        let num_attended: usize = self.windows.iter().map(attended).sum();
        let layer_bytes = self.demand.kv_bytes_per_token / self.windows.len().max(1) as u64;
        let cache = layer_bytes.saturating_mul(num_attended as u64);
        self.traffic.bytes_per_step(num_sequences).saturating_add(cache.saturating_mul(num_sequences as u64))
    }

    /// Tokens a second, of all sequences together, that a memory allows which is read with `bytes_per_second`.
    #[must_use]
    pub fn bandwidth_limit(&self, bytes_per_second: f64, num_sequences: usize, context_len: usize) -> f64 {
        let num_bytes = self.bytes_per_step(num_sequences, context_len);
        num_sequences as f64 * bytes_per_second / num_bytes.max(1) as f64
    }
}

/// Whether the MTP block is loaded, and the option that loads it.
fn shown_mtp_block(config: &ModelConfig) -> &'static str {
    match config.mtp_layer() {
        Some(_) => "drafts",
        None => r#"left out; --speculative-config '{"method": "mtp"}' drafts with it"#,
    }
}

/// The windows of layers, and how many have them if not all have.
fn shown_windows(config: &ModelConfig) -> Value {
    let windows: Vec<usize> = config.layer_attention.iter().filter_map(|layer| layer.window).collect();
    match windows.first() {
        None => Value::Null,
        Some(window) if windows.len() == config.num_layers => json!(window),
        Some(window) => json!(format!("{window} in {} of {} layers", windows.len(), config.num_layers)),
    }
}

impl Llm {
    /// Reads everything but the weights.
    ///
    /// # Errors
    /// If a file is damaged, the model is none that can be run, or an option has a value that no machine could run with.
    pub fn inspect(model: &ResolvedModel, options: &LlmOptions) -> Result<ModelReport> {
        let opened = OpenedModel::open(model, options)?;
        let device = options.open_device()?;
        let demand = opened.demand(options, &device)?;
        let kept_as = |file_type| device.kept_as(file_type);
        let plan = match plan_memory(&demand, &options.limits) {
            // What no machine could run is wrong, and not a fact of the model.
            Err(error) if error.kind() == ErrorKind::InvalidRequest => return Err(error),
            plan => plan.map_err(|error| error.to_string()),
        };
        let config = &opened.config;
        let quantizer = opened.quantizer(options)?;
        let quantizer = quantizer.as_ref();
        let mut entries = vec![
            ("vocab_size", json!(config.vocab_size)),
            ("hidden_size", json!(config.hidden_size)),
            ("num_layers", json!(config.num_layers)),
            ("num_heads", json!(config.num_heads)),
            ("num_kv_heads", json!(config.num_kv_heads)),
            ("head_dim", json!(config.head_dim)),
            ("intermediate_size", json!(config.intermediate_size)),
            ("max_position_embeddings", json!(config.max_position_embeddings)),
            ("rms_norm_eps", as_written(config.rms_norm_eps)),
            ("rope_theta", json!(config.rope.theta)),
            ("rope_scaling", json!(format!("{:?}", config.rope.scaling))),
            ("sliding_window", shown_windows(config)),
            ("tie_word_embeddings", json!(config.tie_word_embeddings)),
            ("eos_token_ids", json!(config.eos_token_ids)),
        ];
        if let Some(latent) = &config.latent_attention {
            let row = format!("{} + {} values a token and layer", latent.kv_lora_rank, config.rope.dim);
            entries.push(("latent_row", json!(row)));
            entries.push(("softmax_scale", as_written(latent.softmax_scale)));
        }
        if let Some(experts) = &config.experts {
            let ExpertsConfig { num_experts, num_experts_per_tok, intermediate_size, .. } = experts;
            let layers = config.num_layers - experts.num_dense_layers;
            entries.push((
                "experts",
                json!(format!(
                    "{num_experts_per_tok} of {num_experts} of width {intermediate_size} in {layers} layers"
                )),
            ));
            entries.push((
                "shared_experts",
                experts.shared_intermediate_size.map_or(Value::Null, |width| json!(format!("width {width}"))),
            ));
        }
        if config.num_nextn_layers > 0 {
            entries.push(("mtp_block", json!(shown_mtp_block(config))));
        }
        Ok(ModelReport {
            name: model.display_name.clone(),
            architecture: config.architecture.hf_name.to_owned(),
            config: entries,
            types: opened.checkpoint.type_summaries(),
            loaded_types: quantizer
                .map(|quantizer| quantizer.type_summaries(&opened.checkpoint))
                .transpose()?,
            notices: opened.notices(quantizer, kept_as),
            traffic: WeightTraffic::of(&opened.checkpoint, config, quantizer, kept_as)?,
            windows: config.layer_attention.iter().map(|layer| layer.window).collect(),
            demand,
            kv_cache_dtype: options.kv_cache_dtype,
            kv_offload_bytes: options.kv_offload.as_ref().map(|offload| offload.max_bytes),
            expert_file: match &plan {
                Ok(plan) if plan.experts_in_file => Some(expert_file::path(&opened, options)?),
                _ => None,
            },
            plan,
            has_broken_tokenizer: opened.tokenizer_error.is_some(),
            tokenizer_vocab_size: opened.tokenizer.as_ref().map(|tokenizer| tokenizer.vocab_size()),
            has_chat_template: opened.chat.is_some(),
            answer_format: opened.chat.as_ref().map(|chat| chat.answer_format().clone()).unwrap_or_default(),
            chat_problem: opened.chat_problem.clone(),
        })
    }
}

/// With the digits that distinguish it from other numbers of its type, not those of a double.
fn as_written(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, |number| json!(number))
}
