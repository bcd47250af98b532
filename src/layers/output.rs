//! The output projection of a half of a layer.

use crate::Result;
use crate::config::ModelConfig;
use crate::layers::Loader;
use crate::ops::{
    Buffer, Context, Linear, LinearScratch, RmsNorm, keep_on_first_rank, linear, linear_residual,
    norm_residual, sum_over_ranks,
};

/// The output projection of a half of a layer, cut by columns, whose results are summed over ranks and added to the
/// residual stream, through a norm if the model has one there.
#[derive(Debug)]
pub struct Output {
    /// The projection.
    pub linear: Linear,
    norm: Option<RmsNorm>,
}

impl Output {
    /// The projection `linear` with the norm of that name after it, if the model has such norms.
    ///
    /// # Errors
    /// If the norm is missing or has another length.
    pub fn load(loader: &Loader<'_>, config: &ModelConfig, linear: Linear, norm: &str) -> Result<Self> {
        let norm = || loader.norm(norm, config.hidden_size, config.rms_norm_eps);
        Ok(Self { linear, norm: config.architecture.post_norms.then(norm).transpose()? })
    }

    /// `hidden += norm(W·x + b)`, in one dispatch without a norm and in two with one, between which the result is in
    /// `branch`.
    ///
    /// # Errors
    /// If the batch does not fit the activations.
    pub fn add(
        &self,
        context: &Context,
        scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        branch: &mut Buffer,
        hidden: &mut Buffer,
    ) -> Result<()> {
        let Some(norm) = &self.norm else {
            keep_on_first_rank(context, num_rows, hidden)?;
            linear_residual(context, scratch, num_rows, x, &self.linear, hidden)?;
            return sum_over_ranks(context, num_rows, hidden);
        };
        linear(context, scratch, num_rows, x, &self.linear, branch)?;
        // A norm is over the whole sum.
        sum_over_ranks(context, num_rows, branch)?;
        norm_residual(context, num_rows, branch, norm, hidden)
    }
}
