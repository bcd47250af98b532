//! A feed-forward network of experts, of which a router chooses some for each token.

use crate::config::{Activation, ExpertsConfig, ModelConfig};
use crate::layers::{Activations, Cut, LayerInput, Loader};
use crate::ops::{
    AttentionLimits, Buffer, Context, Linear, LinearScratch, LinearStack, Matrix, MatrixStack, RmsNorm,
    Router, Routing, Vector, experts_gated, experts_residual, fetch_experts, keep_on_first_rank,
    linear_residual, norm_swiglu, route, sum_over_ranks,
};
use crate::{Error, Result};

/// The feed-forward half of a decoder layer, with the norm before and the residual after it: four dispatches, or six
/// with a network that every token goes through and whose matrices are of other types than those of experts.
#[derive(Debug)]
pub struct Moe {
    norm: RmsNorm,
    router: Router,
    activation: Activation,
    gate: LinearStack,
    up: LinearStack,
    down: LinearStack,
    shared: Option<Shared>,
}

/// The shared experts, if they are not among the experts.
#[derive(Debug)]
struct Shared {
    gate: Matrix,
    up: Matrix,
    down: Linear,
}

/// Buffers that pass between the ops of a layer with experts, allocated once.
#[derive(Debug)]
pub struct ExpertActivations {
    routing: Routing,
    /// The activations of experts, `[slots, intermediate]`.
    intermediate: Buffer,
    /// Results of experts before they are reduced, `[slots, hidden]`.
    expert_outputs: Buffer,
    /// The intermediate values of the shared experts, `[tokens, intermediate]`.
    shared: Option<Buffer>,
}

impl ExpertActivations {
    /// Memory for steps within these limits.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn new(
        context: &Context,
        config: &ModelConfig,
        experts: &ExpertsConfig,
        limits: &AttentionLimits,
        scratch: &mut LinearScratch,
    ) -> Result<Self> {
        let max_rows = limits.max_num_tokens;
        let max_slots = Routing::max_slots(experts, max_rows);
        scratch.reserve_groups(context, 0, max_slots, config.hidden_size.max(experts.intermediate_size))?;
        let shared = |width: usize| Buffer::new(context, max_rows, width);
        Ok(Self {
            routing: Routing::new(context, experts, max_rows)?,
            intermediate: Buffer::new(context, max_slots, experts.intermediate_size)?,
            expert_outputs: Buffer::new(context, max_slots, config.hidden_size)?,
            shared: experts.shared_intermediate_size.map(shared).transpose()?,
        })
    }
}

impl Moe {
    /// Loads the tensors `{prefix}.ffn_*` of a layer with experts.
    ///
    /// # Errors
    /// If one is missing or has another shape than `config` says, or the model has no experts.
    pub fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str) -> Result<Self> {
        let experts = config.experts.as_ref().ok_or_else(|| Error::internal("the model has no experts"))?;
        let ExpertsConfig { num_experts: num, intermediate_size: inside, .. } = *experts;
        let hidden = config.hidden_size;
        let (mut gate, mut up) = loader.gated_experts(prefix, experts, hidden)?;
        let mut down = loader.down_experts(prefix, experts, hidden)?;
        let [gate_bias, up_bias, down_bias] = match experts.has_biases {
            true => loader.expert_biases(prefix, experts, hidden)?,
            false => [const { None }; 3],
        };
        let num_shared = experts.num_shared_experts();
        let [shared_gate, shared_up, shared_down] =
            ["gate", "up", "down"].map(|part| format!("{prefix}.ffn_{part}_shexp"));
        // Of one type with the others, they are more of them.
        let is_one_of = |name: &str, others: &[Matrix]| {
            let dtype = loader.matrix_dtype(&format!("{name}.weight"))?;
            Ok::<_, Error>(others.first().is_some_and(|other| other.dtype() == dtype))
        };
        let joins = num_shared > 0
            && !experts.has_biases
            && is_one_of(&shared_gate, &gate)?
            && is_one_of(&shared_up, &up)?
            && is_one_of(&shared_down, &down)?;
        if joins {
            gate.extend(loader.matrix_by_rows(&shared_gate, num_shared, inside, hidden)?);
            up.extend(loader.matrix_by_rows(&shared_up, num_shared, inside, hidden)?);
            down.extend(loader.matrix_by_columns(&shared_down, num_shared, hidden, inside)?);
        }
        let shared = |width: usize| {
            Ok::<_, Error>(Shared {
                gate: loader.matrix(&format!("{shared_gate}.weight"), width, hidden, Cut::Rows)?,
                up: loader.matrix(&format!("{shared_up}.weight"), width, hidden, Cut::Rows)?,
                down: loader.linear(&shared_down, hidden, width, Cut::Columns, false)?,
            })
        };
        let shared = experts.shared_intermediate_size.filter(|_| !joins).map(shared).transpose()?;
        let stack = |matrices, bias| {
            Ok::<_, Error>(LinearStack { weight: MatrixStack::new(loader.context(), matrices)?, bias })
        };
        let [_, norm, _] = loader.norm_names(prefix);
        let router = format!("{prefix}.ffn_gate_inp");
        let selection_bias =
            || Vector::new(loader.context(), loader.vector(&format!("{prefix}.exp_probs_b.bias"), num)?);
        Ok(Self {
            norm: loader.norm(&format!("{prefix}.{norm}"), hidden, config.rms_norm_eps)?,
            router: Router {
                linear: Linear {
                    weight: loader.matrix_in_f32(&format!("{router}.weight"), num, hidden)?,
                    bias: loader.bias(&router, num, Cut::Whole, experts.has_router_bias)?,
                },
                selection_bias: experts.has_selection_bias.then(selection_bias).transpose()?,
                config: experts.clone(),
                num_shared: if joins { num_shared } else { 0 },
            },
            activation: config.activation,
            gate: stack(gate, gate_bias)?,
            up: stack(up, up_bias)?,
            down: stack(down, down_bias)?,
            shared,
        })
    }

    /// `hidden += Σ weight · W_down · activation(W_gate · x, W_up · x)` over the chosen experts, each projection with
    /// its bias if it has one, and the same for the shared experts, with `x = norm(hidden)`.
    ///
    /// # Errors
    /// If the batch does not fit the activations.
    pub fn forward(&self, input: LayerInput<'_>, act: &mut Activations) -> Result<()> {
        let (context, num_rows) = (input.context, input.num_outputs());
        let Self { norm, router, activation, gate, up, down, .. } = self;
        let (hidden, scratch) = (&mut act.hidden, &mut act.linear_scratch);
        let own = act.experts.as_mut().ok_or_else(|| Error::internal("no memory for experts"))?;
        let ExpertActivations { routing, intermediate, expert_outputs, shared } = own;
        route(context, scratch, num_rows, hidden, norm, router, routing)?;
        fetch_experts(context, routing, gate, up, down)?;
        experts_gated(context, scratch, routing, hidden, norm, gate, up, *activation, intermediate)?;
        let mut shared = self.shared.as_ref().zip(shared.as_mut());
        if let Some((Shared { gate, up, .. }, inside)) = &mut shared {
            // Before their input is modified.
            norm_swiglu(context, scratch, num_rows, hidden, norm, gate, up, None, inside)?;
        }
        keep_on_first_rank(context, num_rows, hidden)?;
        experts_residual(context, scratch, routing, intermediate, down, expert_outputs, hidden)?;
        if let Some((Shared { down, .. }, inside)) = shared {
            linear_residual(context, scratch, num_rows, inside, down, hidden)?;
        }
        sum_over_ranks(context, num_rows, hidden)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::ops::cpu::simd::CpuLevel;
    use crate::weights::{Checkpoint, DType};

    /// For every type of the weights: a matmul with rounded inputs would choose other experts.
    #[test]
    fn routers_are_in_single_precision() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/qwen3_moe");
        let bytes = std::fs::read(fixture.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let halves: Vec<(String, Vec<usize>, Vec<u8>)> = file
            .tensors()
            .into_iter()
            .map(|(name, tensor)| {
                // The upper half of a single is a bf16.
                let (values, []) = tensor.data().as_chunks::<4>() else { panic!("{name} is not f32") };
                (
                    name,
                    tensor.shape().to_vec(),
                    values.iter().flat_map(|value| [value[2], value[3]]).collect(),
                )
            })
            .collect();
        let views = halves.iter().map(|(name, shape, data)| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape.clone(), data);
            (name.clone(), view.unwrap())
        });
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(fixture.join("config.json"), folder.path().join("config.json")).unwrap();
        let file = safetensors::serialize(views, None).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), file).unwrap();

        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let context = Context::cpu(1, CpuLevel::detect());
        let loader = Loader::new(&checkpoint, &context, None, &|_| ()).unwrap();
        let layer = Moe::load(&loader, &config, "blk.1").unwrap();
        assert_eq!(layer.router.linear.weight.dtype(), DType::F32);
        assert_eq!(layer.gate.weight.dtype(), DType::BF16);
    }
}
