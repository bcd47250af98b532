//! The part of a model that one of several ranks computes.

use super::{ModelConfig, QkNorm};
use crate::{Error, Result};

/// One of the ranks that compute a model together (tensor parallelism). A rank has some of the heads, and a part of the
/// width of each feed-forward network and of each expert. What is not divided like this is whole on every rank:
/// embeddings, the head, norms, routers, and the projections of latent attention into its latent rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    size: usize,
}

impl Shard {
    /// All of a model.
    pub const WHOLE: Self = Self { rank: 0, size: 1 };

    /// The part of rank `rank`, counted from 0, of `size` ranks.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] if there is no such rank.
    pub fn new(rank: usize, size: usize) -> Result<Self> {
        if rank < size {
            return Ok(Self { rank, size });
        }
        Err(Error::invalid_request(format!("the rank {rank} is not one of {size} ranks"))
            .with_hint("ranks are counted from 0"))
    }

    /// Its number, from 0.
    #[must_use]
    pub fn rank(self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn size(self) -> usize {
        self.size
    }

    /// Whether it is all of the model.
    #[must_use]
    pub fn is_whole(self) -> bool {
        self.size == 1
    }

    /// Whether it is the rank that adds what a sum over ranks has only once.
    #[must_use]
    pub fn is_first(self) -> bool {
        self.rank == 0
    }

    /// How many of `num` heads or values a rank has. `tensor` and `what` name them in the error.
    fn part_of(self, num: usize, tensor: &str, what: &str) -> Result<usize> {
        if num.is_multiple_of(self.size) {
            return Ok(num / self.size);
        }
        let sizes: Vec<_> = (1..self.size).filter(|size| num.is_multiple_of(*size)).collect();
        let sizes = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        Err(Error::unsupported(format!(
            "the {num} {what} of {tensor} cannot be divided among {} ranks: each rank has as many as the others",
            self.size
        ))
        .with_hint(format!("numbers of ranks that divide {num}: {sizes}")))
    }
}

impl ModelConfig {
    /// The configuration of a rank's part: its heads, and its widths of feed-forward networks and experts.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the ranks cannot divide the model evenly.
    pub fn of_shard(&self, shard: Shard) -> Result<Self> {
        let mut own = self.clone();
        if shard.is_whole() {
            return Ok(own);
        }
        if self.architecture.qk_norm == QkNorm::All {
            return Err(Error::unsupported(format!(
                "attn_q_norm.weight of {} is a norm over all {} heads together, of which each of {} ranks would have \
                 only some",
                self.architecture.hf_name,
                self.num_heads,
                shard.size()
            ))
            .with_hint("run this model on one rank"));
        }
        let has_low_rank = self.latent_attention.as_ref().is_some_and(|latent| latent.q_lora_rank.is_some());
        let queries = if has_low_rank { "attn_q_b.weight" } else { "attn_q.weight" };
        own.num_heads = shard.part_of(self.num_heads, queries, "query heads")?;
        // The single row of latent attention belongs to all heads.
        if self.latent_attention.is_none() {
            own.num_kv_heads = shard.part_of(self.num_kv_heads, "attn_k.weight", "key and value heads")?;
        }
        if self.experts.as_ref().is_none_or(|experts| experts.num_dense_layers > 0) {
            own.intermediate_size = shard.part_of(self.intermediate_size, "ffn_up.weight", "outputs")?;
        }
        if let Some(experts) = &mut own.experts {
            let part = |num, tensor| shard.part_of(num, tensor, "outputs of each matrix");
            experts.intermediate_size = part(experts.intermediate_size, "ffn_up_exps.weight")?;
            let shared = experts.shared_intermediate_size.map(|width| part(width, "ffn_up_shexp.weight"));
            experts.shared_intermediate_size = shared.transpose()?;
        }
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::ErrorKind;
    use crate::weights::Checkpoint;

    fn config(model: &str) -> ModelConfig {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny").join(model);
        ModelConfig::from_checkpoint(&Checkpoint::open(&folder).unwrap()).unwrap()
    }

    #[test]
    fn a_rank_has_its_heads_and_widths_and_the_rest_whole() {
        let whole = config("qwen3_moe");
        assert_eq!(whole.of_shard(Shard::WHOLE).unwrap(), whole);
        let own = whole.of_shard(Shard::new(1, 2).unwrap()).unwrap();
        assert_eq!((own.num_heads, own.num_kv_heads), (whole.num_heads / 2, whole.num_kv_heads / 2));
        let width = |config: &ModelConfig| config.experts.as_ref().unwrap().intermediate_size;
        assert_eq!(width(&own), width(&whole) / 2);
        let same = |config: &ModelConfig| (config.head_dim, config.hidden_size, config.vocab_size);
        assert_eq!(same(&own), same(&whole));

        let whole = config("deepseek_v2_lite");
        let own = whole.of_shard(Shard::new(3, 4).unwrap()).unwrap();
        assert_eq!((own.num_heads, own.num_kv_heads), (1, 1));
        assert_eq!(own.intermediate_size, whole.intermediate_size / 4);
        let shared = |config: &ModelConfig| config.experts.as_ref().unwrap().num_shared_experts();
        assert_eq!(shared(&own), shared(&whole));
    }

    #[test]
    fn what_ranks_cannot_divide_is_an_error_with_the_limit() {
        assert_eq!(Shard::new(2, 2).unwrap_err().kind(), ErrorKind::InvalidRequest);
        let error = |model: &str, size: usize| {
            let error = config(model).of_shard(Shard::new(0, size).unwrap()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            (error.message().to_owned(), error.hint().unwrap().to_owned())
        };
        let (message, hint) = error("llama", 4);
        assert!(message.contains("the 2 key and value heads of attn_k.weight"), "{message}");
        assert!(message.contains("4 ranks") && hint.ends_with("2: 1, 2"), "{message}: {hint}");
        assert!(error("llama", 3).0.contains("the 4 query heads of attn_q.weight"));
        assert!(error("olmo3", 2).0.contains("attn_q_norm.weight"));
    }
}
