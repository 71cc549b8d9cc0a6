//! Generation: keys and values of earlier tokens are kept, so that a new token costs the same work after any prompt, besides
//! its attention to the keys.
//!
//! The pass follows all passes that change attention. Programs of different lengths over the same model have the same
//! caches, in the order of their blocks, so the memory pass gives each cache the same location in all of them: a program
//! over the whole prompt fills the caches, and a program of one token continues from them.
//!
//! Source: Pope et al. 2022, Efficiently Scaling Transformer Inference, §2.1 (arXiv:2211.05102): prefill and decode.

use crate::program::{Binding, CachedAttention, Column, DType, Instr, Kind, Op, Program, Role, ValueId, op};

/// How a program uses the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheUse {
    /// Positions of each sequence in the cache.
    pub capacity: usize,
    /// The keys that its tokens see.
    pub sees: Sees,
}

/// The keys that the tokens of a program see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sees {
    /// Those of the program itself: its tokens begin at position 0.
    OwnTokens,
    /// Those of the cache: its tokens have any positions.
    Cache,
}

/// Why keys and values cannot be kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// More tokens than positions.
    #[error("a cache of {capacity} positions is too small for {seq_len} tokens")]
    Capacity {
        /// Positions.
        capacity: usize,
        /// Tokens of a sequence.
        seq_len: usize,
    },
    /// Tokens of one sequence are on several ranks.
    #[error("generation does not support context parallelism: context_parallel_size is {cp}, expected 1")]
    ContextParallel {
        /// Size of the axis.
        cp: usize,
    },
}

/// Adds a cache to every attention of a program without gradients.
///
/// # Errors
/// When the tokens of a sequence are more than the positions, or divided among ranks; the program is then unchanged.
pub fn cache(program: &mut Program, use_of_cache: CacheUse) -> Result<(), CacheError> {
    let CacheUse { capacity, sees } = use_of_cache;
    let cp = program.mesh_rank.mesh.cp;
    if cp > 1 {
        return Err(CacheError::ContextParallel { cp });
    }
    let lengths =
        program.instrs.iter().filter_map(|i| if let Op::Attention(a) = i.op { Some(a.seq_len) } else { None });
    if let Some(seq_len) = lengths.max().filter(|seq_len| *seq_len > capacity) {
        return Err(CacheError::Capacity { capacity, seq_len });
    }
    for mut instr in std::mem::take(&mut program.instrs) {
        match instr.op {
            Op::Attention(heads) => {
                let op = CachedAttention { heads, capacity };
                let qkv = instr.reads[0];
                let positions = positions(program, program.value(qkv).n_rows());
                let cache = add_cache(program, &op, qkv);
                let reads = vec![qkv, positions, cache];
                program.push(Op::CacheWrite(op::CacheWrite(op)), reads.clone(), vec![cache], instr.site);
                if sees == Sees::Cache {
                    instr = Instr { op: Op::CachedAttention(op), reads, ..instr };
                }
            }
            // Tables have a row for each position, and programs of all lengths share them.
            Op::Rotary(_) => program.values[instr.reads[2].0 as usize].shape[1] = capacity,
            _ => {}
        }
        program.instrs.push(instr);
    }
    Ok(())
}

/// The positions of the tokens, which some models read already.
fn positions(program: &mut Program, n_tokens: usize) -> ValueId {
    let known = program.bound(Role::Column(Column::Positions)).next();
    known.unwrap_or_else(|| {
        let value = program.add_value("positions", &[n_tokens], DType::I32, Kind::Input);
        program.bindings.push(Binding::new(Role::Column(Column::Positions), value));
        value
    })
}

fn add_cache(program: &mut Program, op: &CachedAttention, qkv: ValueId) -> ValueId {
    let (dtype, n_tokens) = (program.value(qkv).dtype, program.value(qkv).n_rows());
    let rows = n_tokens / op.heads.seq_len * op.capacity;
    program.add_value("cache", &[rows, op.cache_columns()], dtype, Kind::Cache)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::program_cost;
    use crate::mesh::{Mesh, MeshRank};
    use crate::model::{BatchShape, Head, HfConfig, ModelConfig};
    use crate::passes::memory::{Region, memory};
    use crate::target::Nowhere;
    use crate::verify::verify;

    const CAPACITY: usize = 100;

    fn forward(seq_len: usize) -> Program {
        let json = r#"{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 172,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}"#;
        let model = ModelConfig::try_from(&serde_json::from_str::<HfConfig>(json).unwrap()).unwrap();
        model.forward(BatchShape { n_rows: 2, seq_len }, Head::Logits).unwrap()
    }

    fn with_cache(seq_len: usize, sees: Sees) -> Program {
        let mut program = forward(seq_len);
        cache(&mut program, CacheUse { capacity: CAPACITY, sees }).unwrap();
        verify(&program).unwrap();
        program
    }

    #[test]
    fn programs_of_all_lengths_have_the_same_caches_tables_and_weights() {
        let programs =
            [with_cache(40, Sees::OwnTokens), with_cache(CAPACITY, Sees::OwnTokens), with_cache(1, Sees::Cache)];
        let places = programs.each_ref().map(|program| {
            let layout = memory(program, &Nowhere::default());
            let is_shared = |i: &usize| program.values[*i].kind.is_state();
            let place = |i: usize| (program.values[i].shape.clone(), layout.locations[i]);
            let shared: Vec<_> = (0..program.values.len()).filter(is_shared).map(place).collect();
            (shared, layout.bytes(Region::Cache))
        });

        assert!(places[0] == places[1] && places[1] == places[2]);
        // Two sequences of three blocks with two key and two value heads of 16 columns in f32.
        assert_eq!(places[0].1, 3 * 2 * CAPACITY * 2 * 2 * 16 * size_of::<f32>());
    }

    #[test]
    fn token_is_in_the_cache_before_any_token_sees_it() {
        let program = with_cache(1, Sees::Cache);

        let names: Vec<&str> = program.instrs.iter().map(|i| i.op.name()).collect();
        let attention = names.iter().position(|name| *name == "cached_attention").unwrap();
        assert_eq!(names[attention - 1], "cache_write");
        assert!(!names.contains(&"attention"), "{names:?}");
        assert_eq!(names.iter().filter(|name| **name == "cache_write").count(), 3);
    }

    #[test]
    fn arithmetic_of_a_token_is_its_share_of_a_prompt_and_it_sees_half_of_the_cache_on_average() {
        const PROMPT: usize = 40;
        let [prompt, token] =
            [with_cache(PROMPT, Sees::OwnTokens), with_cache(1, Sees::Cache)].map(|program| program_cost(&program));

        assert_eq!(token.matmul_flops * PROMPT as f64, prompt.matmul_flops);
        // Two sequences, three blocks, two products of two operations each, for four heads of 16 columns.
        let mean_keys = (CAPACITY as f64 + 1.0) / 2.0;
        assert_eq!(token.attention_flops, 2.0 * 3.0 * 4.0 * mean_keys * 64.0);
    }

    #[test]
    fn too_many_tokens_and_context_parallel_ranks_are_refused() {
        let use_of_cache = CacheUse { capacity: CAPACITY, sees: Sees::OwnTokens };
        let mut long = forward(CAPACITY + 1);
        let mut shared = forward(8);
        shared.mesh_rank = MeshRank { mesh: Mesh { cp: 2, ..Mesh::ONE }, rank: 0 };

        assert_eq!(
            cache(&mut long, use_of_cache),
            Err(CacheError::Capacity { capacity: CAPACITY, seq_len: CAPACITY + 1 })
        );
        assert_eq!(cache(&mut shared, use_of_cache), Err(CacheError::ContextParallel { cp: 2 }));
        assert_eq!(long, forward(CAPACITY + 1));
    }
}
