//! A feed-forward network of experts, of which a router chooses some for each token.

use crate::config::{ExpertsConfig, ModelConfig};
use crate::layers::{Activations, LayerInput, Loader};
use crate::ops::{
    AttentionLimits, Buffer, Context, Linear, LinearScratch, Matrix, MatrixStack, RmsNorm, Router, Routing,
    experts_residual, experts_swiglu, linear_residual, norm_swiglu, route,
};
use crate::{Error, Result};

/// The feed-forward half of a decoder layer, with the norm before and the residual after it: four dispatches, or six
/// with a network that every token goes through.
#[derive(Debug)]
pub struct Moe {
    norm: RmsNorm,
    router: Router,
    gate: MatrixStack,
    up: MatrixStack,
    down: MatrixStack,
    shared: Option<Shared>,
}

/// What every token goes through.
#[derive(Debug)]
struct Shared {
    gate: Matrix,
    up: Matrix,
    down: Linear,
}

/// What passes between the ops of a layer with experts, allocated once.
#[derive(Debug)]
pub struct ExpertActivations {
    routing: Routing,
    /// The inside of experts, `[places, intermediate]`.
    intermediate: Buffer,
    /// Results of experts before they are added up, `[places, hidden]`.
    products: Buffer,
    /// The inside of what every token goes through, `[tokens, intermediate]`.
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
        let max_places = Routing::max_places(experts, max_rows);
        scratch.reserve_groups(context, 0, max_places, config.hidden_size.max(experts.intermediate_size));
        let shared = |width: usize| Buffer::new(context, max_rows, width);
        Ok(Self {
            routing: Routing::new(experts, max_rows),
            intermediate: Buffer::new(context, max_places, experts.intermediate_size)?,
            products: Buffer::new(context, max_places, config.hidden_size)?,
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
        let stack = |name: &str, rows: usize, cols: usize| {
            loader.experts(&format!("{prefix}.{name}"), num, rows, cols)
        };
        let bias = format!("{prefix}.exp_probs_b.bias");
        let shared = |width: usize| {
            let name = |part: &str| format!("{prefix}.ffn_{part}_shexp");
            Ok::<_, Error>(Shared {
                gate: loader.matrix(&format!("{}.weight", name("gate")), width, hidden)?,
                up: loader.matrix(&format!("{}.weight", name("up")), width, hidden)?,
                down: loader.linear(&name("down"), hidden, width, false)?,
            })
        };
        Ok(Self {
            norm: loader.norm(&format!("{prefix}.ffn_norm"), hidden, config.rms_norm_eps)?,
            router: Router {
                weight: loader.matrix_in_f32(&format!("{prefix}.ffn_gate_inp.weight"), num, hidden)?,
                selection_bias: experts.has_selection_bias.then(|| loader.vector(&bias, num)).transpose()?,
                config: experts.clone(),
            },
            gate: stack("ffn_gate", inside, hidden)?,
            up: stack("ffn_up", inside, hidden)?,
            down: stack("ffn_down", hidden, inside)?,
            shared: experts.shared_intermediate_size.map(shared).transpose()?,
        })
    }

    /// `hidden += Σ weight · W_down · (silu(W_gate · x) · (W_up · x))` over the chosen experts, and the same of what
    /// every token goes through, with `x = norm(hidden)`.
    ///
    /// # Errors
    /// If the batch does not fit the activations.
    pub fn forward(&self, input: LayerInput<'_>, act: &mut Activations) -> Result<()> {
        let (context, num_rows) = (input.context, input.num_outputs());
        let Self { norm, router, gate, up, down, .. } = self;
        let (hidden, scratch) = (&mut act.hidden, &mut act.linear_scratch);
        let own = act.experts.as_mut().ok_or_else(|| Error::internal("no memory for experts"))?;
        let ExpertActivations { routing, intermediate, products, shared } = own;
        route(context, scratch, num_rows, hidden, norm, router, routing)?;
        experts_swiglu(context, scratch, routing, hidden, norm, gate, up, intermediate)?;
        let Some((weights, inside)) = self.shared.as_ref().zip(shared.as_mut()) else {
            return experts_residual(context, scratch, routing, intermediate, down, products, hidden);
        };
        // Before anything is added to what they read.
        norm_swiglu(context, scratch, num_rows, hidden, norm, &weights.gate, &weights.up, inside)?;
        experts_residual(context, scratch, routing, intermediate, down, products, hidden)?;
        linear_residual(context, scratch, num_rows, inside, &weights.down, hidden)
    }

    /// Bytes of the matrices that a step of one token reads.
    #[must_use]
    pub fn num_bytes_per_token(&self) -> usize {
        let all = self.gate.num_bytes() + self.up.num_bytes() + self.down.num_bytes();
        let chosen = all / self.gate.len() * self.router.config.num_experts_per_tok;
        let shared = self.shared.as_ref().map_or(0, |shared| {
            shared.gate.num_bytes() + shared.up.num_bytes() + shared.down.weight.num_bytes()
        });
        self.router.weight.num_bytes() + chosen + shared
    }
}
