//! The launches between the matmuls of experts: the choice, groups of rows, and the sum.

use bytemuck::{Pod, Zeroable, bytes_of};

use super::backend::{Flags, GpuBackend, Work};
use super::cost::Cost;
use super::kernel::Kernel;
use super::matmul::Groups;
use super::{Access, Binding, GpuBuffer, Placement};
use crate::config::Activation;
use crate::{Error, Result};

/// Simdgroups of `choose_experts`, each for one token.
const SIMDGROUPS: usize = 8;

/// Tokens up to which one threadgroup chooses for all of them and groups them.
const MAX_TOKENS_TOGETHER: usize = 4 * SIMDGROUPS;

/// Maximum experts: a simdgroup has their probabilities and scores in threadgroup memory.
const MAX_EXPERTS: usize = 512;

/// Maximum choices of a token and maximum groups of experts: one for each lane.
const MAX_CHOICES: usize = 32;

/// `ChooseArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ChooseArgs {
    num_rows: u32,
    num_experts: u32,
    num_chosen: u32,
    num_shared: u32,
    num_groups: u32,
    num_open_groups: u32,
    max_group_rows: u32,
    max_groups: u32,
    scale: f32,
    is_sigmoid: u32,
    normalizes: u32,
    has_bias: u32,
    chooses: u32,
    groups: u32,
}

/// `GatedExpertsArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GatedExpertsArgs {
    width: u32,
    per_token: u32,
    has_bias: u32,
    formula: [f32; 4],
}

/// The parameters of a router's choice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RouterRule<'a> {
    pub(crate) is_sigmoid: bool,
    pub(crate) normalizes: bool,
    pub(crate) bias: Option<Binding<'a>>,
    pub(crate) num_experts: usize,
    pub(crate) num_chosen: usize,
    pub(crate) num_shared: usize,
    pub(crate) num_groups: usize,
    pub(crate) num_open_groups: usize,
    pub(crate) scale: f32,
}

/// The parameters of [`GpuRouting`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct RoutingSizes {
    /// Experts, including shared ones.
    pub(crate) num_experts: usize,
    /// Choices per token.
    pub(crate) per_token: usize,
    /// Groups of experts.
    pub(crate) num_groups: usize,
    pub(crate) max_rows: usize,
}

/// The choices of a step in the device's memory.
#[derive(Debug)]
pub(crate) struct GpuRouting {
    logits: GpuBuffer,
    experts: GpuBuffer,
    weights: GpuBuffer,
    slots: GpuBuffer,
    rows: GpuBuffer,
    groups: GpuBuffer,
    max_rows: usize,
    max_choices: usize,
    /// Of the current step.
    per_token: usize,
    num_groups: usize,
    max_group_rows: usize,
}

impl GpuRouting {
    pub(crate) fn new(gpu: &GpuBackend, sizes: RoutingSizes) -> Result<Self> {
        let RoutingSizes { num_experts, per_token, num_groups, max_rows } = sizes;
        if num_experts > MAX_EXPERTS || per_token > MAX_CHOICES || num_groups > MAX_CHOICES {
            return Err(Error::unsupported(format!(
                "a choice of {per_token} among {num_experts} experts in {num_groups} groups has no kernel on this \
                 device: there may be {MAX_CHOICES} choices of a token among {MAX_EXPERTS} experts in {MAX_CHOICES} \
                 groups"
            ))
            .with_hint("use --device cpu"));
        }
        let num_choices = max_rows * per_token;
        let words = |len: usize| gpu.device().allocate((4 * len).max(16), Placement::Private);
        Ok(Self {
            logits: words(max_rows * num_experts)?,
            experts: words(num_choices)?,
            weights: words(num_choices)?,
            slots: words(num_choices)?,
            rows: words(num_choices)?,
            groups: words(most_groups(sizes) * Groups::BYTES / 4)?,
            max_rows,
            max_choices: num_choices,
            per_token,
            num_groups: 0,
            max_group_rows: 0,
        })
    }

    /// The memory for the router's logits, `[token, expert]`.
    pub(crate) fn logits(&self) -> Binding<'_> {
        Binding::write(&self.logits)
    }

    /// Chooses experts by the logits and groups the tokens of each.
    pub(crate) fn choose(&mut self, gpu: &GpuBackend, num_rows: usize, router: RouterRule<'_>) -> Result<()> {
        let RouterRule { num_experts, num_chosen, num_shared, num_groups, .. } = router;
        self.per_token = num_chosen + num_shared;
        self.check_capacity(num_rows)?;
        let sizes = RoutingSizes {
            num_experts: num_experts + num_shared,
            per_token: self.per_token,
            num_groups,
            max_rows: num_rows,
        };
        (self.num_groups, self.max_group_rows) = groups_of(Groups::most_rows(gpu), sizes, num_rows);
        if num_rows == 0 {
            // A chunk before a prompt's last one needs no results.
            return Ok(());
        }
        let args = ChooseArgs {
            num_rows: num_rows as u32,
            num_experts: num_experts as u32,
            num_chosen: num_chosen as u32,
            num_shared: num_shared as u32,
            num_groups: num_groups as u32,
            num_open_groups: router.num_open_groups as u32,
            max_group_rows: self.max_group_rows as u32,
            max_groups: self.num_groups as u32,
            scale: router.scale,
            is_sigmoid: router.is_sigmoid.into(),
            normalizes: router.normalizes.into(),
            has_bias: router.bias.is_some().into(),
            chooses: 0,
            groups: 0,
        };
        let is_one = num_rows <= MAX_TOKENS_TOGETHER;
        let both: &[[bool; 2]] = if is_one { &[[true, true]] } else { &[[true, false], [false, true]] };
        let num_choices = num_rows * self.per_token;
        for &[chooses, groups] in both {
            let (choices, lists): (fn(_) -> _, fn(_) -> _) = match (chooses, groups) {
                (true, true) => (Binding::read_write, Binding::write),
                (true, false) => (Binding::write, Binding::read),
                (false, _) => (Binding::read, Binding::write),
            };
            let buffers = [
                Binding::read(&self.logits),
                router.bias.unwrap_or(Binding::read(&self.logits)),
                choices(&self.experts),
                if chooses { Binding::write(&self.weights) } else { Binding::read(&self.weights) },
                lists(&self.slots),
                lists(&self.rows),
                lists(&self.groups),
            ];
            let num_threadgroups = if groups { 1 } else { num_rows.div_ceil(SIMDGROUPS) };
            let scores = if chooses { 2 * SIMDGROUPS * num_experts } else { 0 };
            // The number of choices of each expert in each segment of them.
            let num_segments = num_choices.div_ceil(num_choices.div_ceil(SIMDGROUPS * 32) * 32);
            let counts = if groups { num_segments * (num_experts + num_shared) + 1 } else { 0 };
            // Every choice is compared with those of all lanes, twice.
            let comparisons = if groups { 2 * num_choices * 32 } else { 0 };
            let chosen = num_rows * num_experts * (num_chosen + 4);
            gpu.launch(
                Kernel::ChooseExperts,
                Flags::default(),
                Work {
                    args: bytes_of(&ChooseArgs { chooses: chooses.into(), groups: groups.into(), ..args }),
                    buffers: &buffers,
                    threadgroup_memory: 4 * scores.max(counts),
                    grid: [num_threadgroups, 1, 1],
                    num_threads: SIMDGROUPS * 32,
                    cost: Cost {
                        operations: (comparisons + chosen) as u64,
                        bytes: (4 * num_rows * num_experts) as u64,
                    },
                },
            )?;
        }
        Ok(())
    }

    /// Checks that the choices of this many rows fit.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] otherwise.
    pub(crate) fn check_capacity(&self, num_rows: usize) -> Result<()> {
        if num_rows <= self.max_rows && num_rows * self.per_token <= self.max_choices {
            return Ok(());
        }
        Err(Error::internal(format!(
            "route: {num_rows} rows with {} experts each exceed the capacity of {}",
            self.per_token, self.max_rows
        )))
    }

    /// The groups of the step, for a matmul whose activations are rows of tokens or of slots.
    pub(crate) fn groups(&self, of_tokens: bool) -> Groups<'_> {
        Groups {
            list: Binding::read(&self.groups),
            num_groups: self.num_groups,
            max_rows: self.max_group_rows,
            num_choices: self.per_token,
            rows: of_tokens.then(|| Binding::read(&self.rows)),
        }
    }

    /// `gate = activation(gate + bias, up + bias)` at the slots of each token, with biases `[gate, up]` of each expert or
    /// none.
    #[expect(clippy::too_many_arguments, reason = "a kernel's operands")]
    pub(crate) fn gated(
        &self,
        gpu: &GpuBackend,
        num_rows: usize,
        width: usize,
        activation: Activation,
        biases: Option<[Binding<'_>; 2]>,
        up: &GpuBuffer,
        gate: Binding<'_>,
    ) -> Result<()> {
        let args = GatedExpertsArgs {
            width: width as u32,
            per_token: self.per_token as u32,
            has_bias: biases.is_some().into(),
            formula: activation.formula().to_array(),
        };
        let [gate_bias, up_bias] = biases.unwrap_or([Binding::read(up); 2]);
        let buffers = [
            Binding::read(&self.experts),
            Binding::read(&self.slots),
            gate_bias,
            up_bias,
            Binding::read(up),
            Binding { access: Access::ReadWrite, ..gate },
        ];
        let num_values = num_rows * width * self.per_token;
        let cost = Cost::bytes(4 * num_values * if biases.is_some() { 5 } else { 3 });
        let grid = [width.div_ceil(32), num_rows, 1];
        gpu.launch_simdgroups(Kernel::GatedExperts, bytes_of(&args), &buffers, grid, cost)
    }

    /// `x += Σ weight · (projected[slot] + bias)` for each token, with the biases of each expert if there are any.
    pub(crate) fn combine(
        &self,
        gpu: &GpuBackend,
        num_rows: usize,
        width: usize,
        projected: &GpuBuffer,
        bias: Option<Binding<'_>>,
        x: &GpuBuffer,
    ) -> Result<()> {
        let has_bias = bias.is_some();
        let args = [width as u32, self.per_token as u32, has_bias.into()];
        let buffers = [
            Binding::read(&self.slots),
            Binding::read(&self.weights),
            Binding::read(projected),
            Binding::read_write(x),
            Binding::read(&self.experts),
            bias.unwrap_or(Binding::read(&self.weights)),
        ];
        let num_operands = if has_bias { 2 * self.per_token + 2 } else { self.per_token + 2 };
        gpu.launch(
            Kernel::CombineExperts,
            Flags::default(),
            Work {
                args: bytes_of(&args),
                buffers: &buffers,
                threadgroup_memory: 0,
                grid: [width.div_ceil(32), num_rows, 1],
                num_threads: 32,
                cost: Cost::bytes(4 * num_rows * width * num_operands),
            },
        )
    }
}

/// The maximum number of groups in a step of this many tokens, and the maximum rows of one.
fn groups_of(most: usize, sizes: RoutingSizes, num_rows: usize) -> (usize, usize) {
    let RoutingSizes { num_experts, per_token, .. } = sizes;
    let num_choices = num_rows * per_token;
    let max_rows = Groups::max_rows(most, num_rows, per_token, num_experts);
    // Every expert's last group may be short.
    (num_choices.min(num_choices / max_rows + num_experts.min(num_choices)), max_rows)
}

/// The maximum number of groups of any step, also for layers with fewer experts or choices: groups of eight, plus a
/// last one of each expert; for few tokens, one for each choice.
fn most_groups(sizes: RoutingSizes) -> usize {
    let RoutingSizes { num_experts, per_token, max_rows, .. } = sizes;
    max_rows * per_token / 8 + num_experts + MAX_TOKENS_TOGETHER * per_token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_holds_the_groups_of_every_step() {
        for (num_experts, per_token, num_shared) in
            [(64, 6, 2), (64, 4, 1), (8, 2, 0), (8, 3, 2), (3, 3, 1), (512, 30, 2)]
        {
            let sizes = |num_shared: usize, max_rows| RoutingSizes {
                num_experts: num_experts + num_shared,
                per_token: per_token + num_shared,
                num_groups: 1,
                max_rows,
            };
            for (max_rows, most) in
                [1, 3, 4, 5, 31, 200].into_iter().flat_map(|rows| [(rows, 32), (rows, 256)])
            {
                let capacity = most_groups(sizes(num_shared, max_rows));
                for num_rows in 1..=max_rows {
                    for joined in [0, num_shared] {
                        let (num_groups, max_group_rows) = groups_of(most, sizes(joined, max_rows), num_rows);
                        assert!(num_groups <= capacity, "{num_experts} {per_token} {joined} {num_rows}");
                        // Tokens that all choose one expert, and those of the other experts one by one.
                        assert!(num_groups >= num_rows.div_ceil(max_group_rows).min(num_rows * per_token));
                    }
                }
            }
        }
    }
}
