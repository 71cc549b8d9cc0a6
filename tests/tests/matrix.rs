//! Several ranks train as one rank: a set of cells with every pair of choices, and models, precisions and options that the
//! matrix does not cover.
//!
//! The whole matrix, 916 runs: `cargo run --release -p phalanx-tests --bin matrix`.

use anyhow::{Result, ensure};
use phalanx_strategies::mesh::Mesh;
use phalanx_tests::matrix::cell::Cell;
use phalanx_tests::matrix::chain::chain;
use phalanx_tests::matrix::model::Shape;
use phalanx_tests::matrix::pairs::pairwise;
use phalanx_tests::matrix::run::{Outcome, STEPS, Task, Tolerance, compare, distance, train};
use std::path::Path;

/// Half precision rounds the values of each rank (bf16 to 8 bits, fp16 to 11), so other splits round differently. Measured
/// differences are up to 1e-3 nats and 3e-3 of a norm in bf16, 4e-5 and 1e-4 in fp16; an error in the program causes whole
/// nats.
const BF16: Tolerance = Tolerance { loss: 5e-3, norm: 2e-2 };
/// Codes of 8 bits are a hundredth apart: a sum in another order moves a few numbers to the next one. Measured differences are up to
/// 3e-4 nats and 2e-3 of a norm.
const CODES: Tolerance = Tolerance { loss: 1e-3, norm: 5e-3 };
/// Scores of answers are log-probabilities times 2, and so are their differences: up to 2e-6 of a loss and 3e-6 of a norm.
const SCORES: Tolerance = Tolerance { loss: 4e-6, norm: 6e-6 };
const FP16: Tolerance = Tolerance { loss: 5e-4, norm: 2e-3 };

const fn mesh(pp: usize, dp_replicate: usize, dp_shard: usize, cp: usize, tp: usize) -> Cell {
    Cell { mesh: Mesh { pp, dp_replicate, dp_shard, cp, tp }, ..Cell::ALONE }
}

/// Cells that use each axis alone and with others, and every choice at least once.
fn few_cells() -> Vec<Cell> {
    vec![
        Cell { sequence_parallel: true, ..mesh(1, 1, 1, 1, 4) },
        Cell { cp_comm: "allgather", zero: 1, ..mesh(1, 1, 1, 4, 1) },
        Cell { schedule: "zero_bubble", ..mesh(2, 1, 1, 1, 2) },
        Cell { zero: 2, ..mesh(1, 2, 2, 1, 2) },
        Cell { schedule: "interleaved", ..mesh(2, 1, 2, 2, 1) },
    ]
}

/// Adapters on every linear layer of a block.
const LORA: &[(&str, &str)] =
    &[("adapter", "lora"), ("lora_r", "3"), ("lora_alpha", "6"), ("lora_target_linear", "true")];

/// Adapters on some layers, with a learning rate of their own for B, beside modules that are trained whole.
const LORA_IN_FULL: &[(&str, &str)] = &[
    ("adapter", "lora"),
    ("lora_r", "3"),
    ("lora_alpha", "6"),
    ("lora_target_modules", r".*\.(q|o|down)_proj|model\.layers\.1\..*up_proj"),
    ("lora_modules_to_save", "[embed_tokens, lm_head, model.norm]"),
    ("peft_use_rslora", "true"),
    ("loraplus_lr_ratio", "4"),
    ("lora_dropout", "0.2"),
];

/// Adapters beside weights of 4 bits, in a model whose rows are whole blocks on two tensor-parallel ranks.
const QLORA: &[(&str, &str)] = &[
    ("adapter", "qlora"),
    ("lora_r", "3"),
    ("lora_target_linear", "true"),
    ("model.hidden_size", "128"),
    ("model.intermediate_size", "128"),
];

/// Trains the cells in a ring of checkpoints and fails if one differs from one rank.
fn check(task: &Task, cells: &[Cell], tolerance: &Tolerance) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut outcomes: Vec<Outcome> = Vec::new();
    compare(task, cells, dir.path(), |outcome| outcomes.push(outcome))?;
    for o in &outcomes {
        println!("{} {}: {:?} (resumed from {})", o.shape, o.cell, o.distance, o.from);
    }
    let failed: Vec<String> = outcomes
        .iter()
        .filter(|o| !o.passed(tolerance))
        .map(|o| format!("{} {}: {:?}, resumed from {}", o.shape, o.cell, o.distance, o.from))
        .collect();
    ensure!(
        failed.is_empty() && outcomes.len() == cells.len(),
        "{} cells failed:\n{}",
        failed.len(),
        failed.join("\n")
    );
    Ok(())
}

fn check_pairs(shape: Shape) -> Result<()> {
    let cells = pairwise(8).into_iter().filter(|(s, _)| *s == shape).map(|(_, cell)| cell).collect();
    check(&Task::plain(shape), &chain(cells), &Tolerance::F32)
}

#[test]
fn llama_trains_as_on_one_rank_under_every_pair_of_choices() -> Result<()> {
    check_pairs(Shape::Llama)
}

#[test]
fn gpt2_trains_as_on_one_rank_under_every_pair_of_choices() -> Result<()> {
    check_pairs(Shape::Gpt2)
}

/// Norms per head, four ranks for one key/value head, a prime vocabulary and a prime feed-forward extent.
#[test]
fn indivisible_extents_and_shared_heads_train_as_on_one_rank() -> Result<()> {
    check(&Task::plain(Shape::Qwen3), &few_cells(), &Tolerance::F32)
}

#[test]
fn windows_of_attention_reach_across_context_parallel_ranks() -> Result<()> {
    let cells = [
        mesh(1, 1, 1, 2, 1),
        Cell { cp_comm: "allgather", ..mesh(1, 1, 1, 2, 2) },
        mesh(1, 1, 1, 4, 1),
        Cell { cp_comm: "allgather", ..mesh(2, 1, 1, 4, 1) },
    ];
    check(&Task::plain(Shape::Mistral), &cells, &Tolerance::F32)
}

/// Four ranks hold two key/value heads, packed into one tensor with the queries.
#[test]
fn packed_projections_train_as_on_one_rank() -> Result<()> {
    check(&Task::plain(Shape::Phi3), &few_cells(), &Tolerance::F32)?;
    check(&Task { shape: Shape::Phi3, extra: LORA }, &[mesh(1, 1, 1, 1, 4), mesh(2, 1, 2, 1, 2)], &Tolerance::F32)
}

/// The norm over all heads sums squares over the tensor-parallel ranks, two of them with the same key/value head.
#[test]
fn norms_over_all_heads_train_as_on_one_rank() -> Result<()> {
    check(&Task::plain(Shape::Olmo2), &few_cells(), &Tolerance::F32)?;
    check(&Task { shape: Shape::Olmo2, extra: LORA }, &[mesh(1, 1, 1, 1, 4), mesh(2, 1, 2, 1, 2)], &Tolerance::F32)?;
    let extra = &[("gradient_checkpointing", "full")];
    check(&Task { shape: Shape::Olmo2, extra }, &[mesh(1, 1, 1, 1, 2), mesh(1, 1, 1, 2, 2)], &Tolerance::F32)?;
    let cells = [mesh(1, 1, 1, 1, 2), Cell { sequence_parallel: true, ..mesh(1, 1, 2, 1, 2) }];
    check(&Task { shape: Shape::Olmo2, extra: &[("bf16", "true")] }, &cells, &BF16)
}

#[test]
fn scaled_values_train_as_on_one_rank() -> Result<()> {
    check(&Task::plain(Shape::Granite), &few_cells(), &Tolerance::F32)?;
    check(&Task { shape: Shape::Granite, extra: LORA }, &[mesh(1, 1, 1, 1, 4), mesh(2, 1, 2, 1, 2)], &Tolerance::F32)
}

/// Magnitudes begin with the lengths of the rows of whole weights, also of packed ones and of those stored `[in, out]`.
#[test]
fn adapters_with_trained_lengths_train_as_on_one_rank() -> Result<()> {
    const DORA: (&str, &str) = ("peft_use_dora", "true");
    const PLAIN: &[(&str, &str)] = &[LORA[0], LORA[1], LORA[2], LORA[3], DORA];
    const PACKED: &[(&str, &str)] = &[QLORA[0], QLORA[1], QLORA[2], QLORA[3], QLORA[4], DORA];
    let cells = [
        Cell { zero: 1, ..mesh(1, 1, 2, 1, 1) },
        mesh(1, 2, 2, 1, 1),
        Cell { schedule: "zero_bubble", ..mesh(3, 1, 2, 1, 1) },
        mesh(1, 1, 1, 2, 1),
    ];
    for shape in Shape::ALL {
        check(&Task { shape, extra: PLAIN }, &cells, &Tolerance::F32)?;
    }
    check(&Task { shape: Shape::Llama, extra: PACKED }, &cells[..2], &Tolerance::F32)
}

/// Each cell resumes from the checkpoint of another mesh, which has the packed words.
#[test]
fn adapters_beside_packed_weights_train_as_on_one_rank() -> Result<()> {
    let cells =
        [Cell { zero: 1, ..mesh(1, 1, 2, 1, 2) }, mesh(1, 2, 2, 1, 1), mesh(3, 1, 2, 1, 2), mesh(1, 1, 1, 2, 2)];
    check(&Task { shape: Shape::Llama, extra: QLORA }, &cells, &Tolerance::F32)
}

#[test]
fn rows_of_one_document_train_as_on_one_rank_like_packed_ones() -> Result<()> {
    let task = Task { shape: Shape::Llama, extra: &[("sample_packing", "false")] };
    let cells = [mesh(1, 1, 1, 4, 1), Cell { cp_comm: "allgather", ..mesh(1, 2, 1, 2, 2) }];
    check(&task, &cells, &Tolerance::F32)
}

#[test]
fn bf16_is_within_its_rounding_of_one_rank() -> Result<()> {
    let task = Task { shape: Shape::Llama, extra: &[("bf16", "true")] };
    check(&task, &few_cells(), &BF16)
}

#[test]
fn fp16_is_within_its_rounding_of_one_rank() -> Result<()> {
    let task = Task { shape: Shape::Gpt2, extra: &[("fp16", "true"), ("initial_loss_scale", "1024")] };
    check(&task, &few_cells(), &FP16)
}

#[test]
fn adapters_train_as_on_one_rank() -> Result<()> {
    check(&Task { shape: Shape::Llama, extra: LORA_IN_FULL }, &few_cells(), &Tolerance::F32)?;
    // Without dropout, adapters of layers that are computed together share products.
    check(&Task { shape: Shape::Llama, extra: LORA }, &few_cells(), &Tolerance::F32)?;
    check(&Task { shape: Shape::Gpt2, extra: LORA }, &few_cells(), &Tolerance::F32)
}

/// Adapters on every linear layer of a block, trained on pairs of answers.
const PAIRS: [(&str, &str); 7] = [
    LORA[0],
    LORA[1],
    LORA[2],
    LORA[3],
    ("datasets.0.type", "preference"),
    ("sample_packing", "false"),
    ("learning_rate", "1e-2"),
];
const DPO: &[(&str, &str)] = &[
    PAIRS[0],
    PAIRS[1],
    PAIRS[2],
    PAIRS[3],
    PAIRS[4],
    PAIRS[5],
    PAIRS[6],
    ("rl", "dpo"),
    ("dpo_label_smoothing", "0.1"),
    ("lora_dropout", "0.2"),
];

/// Both passes over the model are cut alike, and the rows of a pair lie on all context-parallel ranks.
#[test]
fn pairs_of_answers_train_as_on_one_rank_under_every_pair_of_choices() -> Result<()> {
    let cells = pairwise(8).into_iter().filter(|(shape, _)| *shape == Shape::Llama).map(|(_, cell)| cell).collect();
    check(&Task { shape: Shape::Llama, extra: DPO }, &chain(cells), &Tolerance::F32)
}

#[test]
fn other_losses_of_pairs_train_as_on_one_rank() -> Result<()> {
    const IPO: &[(&str, &str)] =
        &[PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[3], PAIRS[4], PAIRS[5], PAIRS[6], ("rl", "ipo"), ("rl_beta", "0.4")];
    const HINGE: &[(&str, &str)] = &[
        PAIRS[0],
        PAIRS[1],
        PAIRS[2],
        PAIRS[3],
        PAIRS[4],
        PAIRS[5],
        PAIRS[6],
        ("rl", "dpo"),
        ("dpo_loss_type", "hinge"),
        ("gradient_checkpointing", "full"),
    ];
    check(&Task { shape: Shape::Gpt2, extra: IPO }, &few_cells(), &Tolerance::F32)?;
    check(&Task { shape: Shape::Qwen3, extra: HINGE }, &few_cells(), &Tolerance::F32)?;
    // Without a reference, the whole model is trained; a part of the loss is averaged over tokens.
    const WHOLE: [(&str, &str); 3] = [PAIRS[4], PAIRS[5], ("learning_rate", "1e-3")];
    const ORPO: &[(&str, &str)] = &[WHOLE[0], WHOLE[1], WHOLE[2], ("rl", "orpo"), ("orpo_alpha", "0.5")];
    const SIMPO: &[(&str, &str)] = &[WHOLE[0], WHOLE[1], WHOLE[2], ("rl", "simpo"), ("rl_beta", "2")];
    check(&Task { shape: Shape::Llama, extra: ORPO }, &few_cells(), &Tolerance::F32)?;
    check(&Task { shape: Shape::Gpt2, extra: SIMPO }, &few_cells(), &SCORES)
}

/// The reference has weights of its own, which ranks share as they share those that are trained; a tied embedding is one of them.
#[test]
fn copy_of_the_whole_model_as_reference_trains_as_on_one_rank() -> Result<()> {
    const WHOLE: &[(&str, &str)] = &[PAIRS[4], PAIRS[5], ("learning_rate", "1e-3"), ("rl", "dpo")];
    for shape in [Shape::Llama, Shape::Gpt2] {
        check(&Task { shape, extra: WHOLE }, &few_cells(), &Tolerance::F32)?;
    }
    Ok(())
}

/// Weights outside device memory are shared like any others, on each axis and on several.
#[test]
fn copy_outside_device_memory_as_reference_trains_as_on_one_rank() -> Result<()> {
    const OUTSIDE: &[(&str, &str)] =
        &[PAIRS[4], PAIRS[5], ("learning_rate", "1e-3"), ("rl", "dpo"), ("offload_reference", "true")];
    check(&Task { shape: Shape::Gpt2, extra: OUTSIDE }, &few_cells(), &Tolerance::F32)
}

/// Log-probabilities of the reference are computed on one mesh, and read on the next, which resumes from its checkpoint.
#[test]
fn reference_that_is_computed_before_the_first_step_trains_as_on_one_rank() -> Result<()> {
    const COMPUTED: (&str, &str) = ("precompute_ref_log_probs", "true");
    const WHOLE: &[(&str, &str)] = &[PAIRS[4], PAIRS[5], ("learning_rate", "1e-3"), ("rl", "dpo"), COMPUTED];
    const ADAPTED: &[(&str, &str)] = &[
        PAIRS[0],
        PAIRS[1],
        PAIRS[2],
        PAIRS[3],
        PAIRS[4],
        PAIRS[5],
        PAIRS[6],
        ("rl", "ipo"),
        ("rl_beta", "0.4"),
        COMPUTED,
    ];
    check(&Task { shape: Shape::Llama, extra: WHOLE }, &few_cells(), &Tolerance::F32)?;
    let tokens_cut = [Cell { sequence_parallel: true, ..mesh(1, 1, 1, 2, 2) }, mesh(2, 1, 2, 1, 2)];
    check(&Task { shape: Shape::Gpt2, extra: ADAPTED }, &[&few_cells()[..], &tokens_cut].concat(), &Tolerance::F32)
}

/// Ranks estimate the divergence from the reference over the same microbatches, wherever these are.
#[test]
fn labelled_answers_train_as_on_one_rank() -> Result<()> {
    const KTO: &[(&str, &str)] = &[
        PAIRS[0],
        PAIRS[1],
        PAIRS[2],
        PAIRS[3],
        PAIRS[4],
        PAIRS[5],
        PAIRS[6],
        ("rl", "kto"),
        ("micro_batch_size", "2"),
        ("kto_desirable_weight", "0.7"),
    ];
    check(&Task { shape: Shape::Llama, extra: KTO }, &few_cells(), &Tolerance::F32)
}

/// The score of a row is that of its last token, which one of the ranks has that share the row.
#[test]
fn scores_train_as_on_one_rank_under_every_pair_of_choices() -> Result<()> {
    const CENTER: (&str, &str) = ("center_rewards_coefficient", "0.05");
    const WHOLE: &[(&str, &str)] = &[PAIRS[4], PAIRS[5], ("learning_rate", "1e-3"), ("reward_model", "true"), CENTER];
    const ADAPTED: &[(&str, &str)] = &[
        PAIRS[0],
        PAIRS[1],
        PAIRS[2],
        PAIRS[3],
        PAIRS[4],
        PAIRS[5],
        PAIRS[6],
        ("reward_model", "true"),
        ("gradient_checkpointing", "full"),
    ];
    let cells = pairwise(8).into_iter().filter(|(shape, _)| *shape == Shape::Llama).map(|(_, cell)| cell).collect();
    check(&Task { shape: Shape::Llama, extra: WHOLE }, &chain(cells), &SCORES)?;
    let tokens_cut = [Cell { sequence_parallel: true, ..mesh(1, 1, 1, 2, 2) }, mesh(2, 1, 2, 1, 2)];
    check(&Task { shape: Shape::Gpt2, extra: ADAPTED }, &[&few_cells()[..], &tokens_cut].concat(), &SCORES)
}

/// Losses are divided by the weights of all ranks.
#[test]
fn weighted_tokens_train_as_on_one_rank() -> Result<()> {
    const WEIGHTED: [(&str, &str); 2] = [("datasets.0.type", "tokenized"), ("loss_weights", "true")];
    const ADAPTED: &[(&str, &str)] =
        &[WEIGHTED[0], WEIGHTED[1], LORA[0], LORA[1], LORA[2], LORA[3], ("lora_dropout", "0.2")];
    const EXACT: &[(&str, &str)] = &[WEIGHTED[0], WEIGHTED[1], ("reproducible", "true")];
    check(&Task { shape: Shape::Llama, extra: &WEIGHTED }, &few_cells(), &Tolerance::F32)?;
    let tokens_cut = [Cell { sequence_parallel: true, ..mesh(1, 1, 1, 2, 2) }, mesh(2, 1, 2, 1, 2)];
    check(&Task { shape: Shape::Gpt2, extra: ADAPTED }, &tokens_cut, &Tolerance::F32)?;
    const ROUNDED: &[(&str, &str)] = &[WEIGHTED[0], WEIGHTED[1], ("bf16", "true")];
    check(&Task { shape: Shape::Llama, extra: ROUNDED }, &tokens_cut, &BF16)?;
    let cells = [Cell { zero: 1, ..mesh(1, 1, 2, 1, 1) }, mesh(2, 2, 1, 1, 1), mesh(1, 1, 3, 1, 1)];
    check(&Task { shape: Shape::Llama, extra: EXACT }, &cells, &Tolerance { loss: 0.0, norm: 0.0 })
}

/// Each cell resumes from the checkpoint of another mesh.
#[test]
fn reproducible_runs_over_pairs_have_equal_bits_on_every_mesh() -> Result<()> {
    const EXACT: &[(&str, &str)] =
        &[DPO[0], DPO[1], DPO[2], DPO[3], DPO[4], DPO[5], DPO[6], DPO[7], DPO[8], DPO[9], ("reproducible", "true")];
    const WHOLE: &[(&str, &str)] =
        &[PAIRS[4], PAIRS[5], ("learning_rate", "1e-3"), ("rl", "dpo"), ("reproducible", "true")];
    let cells = [Cell { zero: 1, ..mesh(1, 1, 2, 1, 1) }, mesh(2, 2, 1, 1, 1), mesh(1, 1, 3, 1, 1)];
    for extra in [EXACT, WHOLE] {
        check(&Task { shape: Shape::Llama, extra }, &cells, &Tolerance { loss: 0.0, norm: 0.0 })?;
    }
    Ok(())
}

#[test]
fn recomputed_activations_train_as_on_one_rank() -> Result<()> {
    for policy in [&[("gradient_checkpointing", "full")], &[("gradient_checkpointing", "selective")]] {
        check(&Task { shape: Shape::Llama, extra: policy }, &few_cells(), &Tolerance::F32)?;
    }
    Ok(())
}

#[test]
fn sgd_with_momentum_trains_as_on_one_rank() -> Result<()> {
    let task = Task { shape: Shape::Gpt2, extra: &[("optimizer", "sgd"), ("momentum", "0.9")] };
    check(&task, &few_cells(), &Tolerance::F32)
}

/// Lion moves every element by the learning rate in the direction of its averaged gradient. The rate is a tenth of AdamW's, so
/// that elements whose gradient is noise change the loss as little.
#[test]
fn lion_trains_as_on_one_rank() -> Result<()> {
    for shape in Shape::ALL {
        let task = Task { shape, extra: &[("optimizer", "lion"), ("learning_rate", "1e-4")] };
        check(&task, &few_cells(), &Tolerance::F32)?;
    }
    Ok(())
}

/// Sums over rows, columns and whole tensors include all ranks with a part of them.
#[test]
fn adafactor_trains_as_on_one_rank() -> Result<()> {
    const EXTRA: &[(&str, &str)] = &[("optimizer", "adafactor"), LORA[0], LORA[1], LORA[2], LORA[3]];
    for shape in Shape::ALL {
        check(&Task { shape, extra: &[("optimizer", "adafactor")] }, &few_cells(), &Tolerance::F32)?;
    }
    let cells = [mesh(1, 1, 1, 1, 4), Cell { zero: 2, ..mesh(2, 1, 2, 1, 2) }];
    check(&Task { shape: Shape::Phi3, extra: EXTRA }, &cells, &Tolerance::F32)
}

/// Each cell resumes from the checkpoint of another mesh, which has the same blocks. Most tensors have state in blocks.
#[test]
fn adamw_of_8_bits_trains_as_on_one_rank() -> Result<()> {
    const EXTRA: &[(&str, &str)] = &[
        ("optimizer", "adamw_8bit"),
        ("model.hidden_size", "512"),
        ("model.intermediate_size", "512"),
        ("model.num_hidden_layers", "2"),
    ];
    let cells = [
        Cell { zero: 1, ..mesh(1, 1, 2, 1, 2) },
        mesh(1, 2, 2, 1, 1),
        Cell { zero: 2, ..mesh(2, 1, 2, 1, 1) },
        mesh(2, 1, 1, 1, 2),
        mesh(1, 1, 1, 2, 1),
    ];
    check(&Task { shape: Shape::Llama, extra: EXTRA }, &cells, &CODES)?;
    const EXACT: &[(&str, &str)] = &[EXTRA[0], EXTRA[1], EXTRA[2], EXTRA[3], ("reproducible", "true")];
    const WHOLE: &[(&str, &str)] =
        &[PAIRS[4], PAIRS[5], ("learning_rate", "1e-3"), ("rl", "dpo"), ("reproducible", "true")];
    let cells = [Cell { zero: 1, ..mesh(1, 1, 2, 1, 1) }, mesh(2, 2, 1, 1, 1), mesh(1, 1, 3, 1, 1)];
    for extra in [EXACT, WHOLE] {
        check(&Task { shape: Shape::Llama, extra }, &cells, &Tolerance { loss: 0.0, norm: 0.0 })?;
    }
    Ok(())
}

/// Each cell resumes from the checkpoint of another mesh, which has words of two weights.
#[test]
fn adapters_beside_weights_stored_in_bf16_train_as_on_one_rank() -> Result<()> {
    const ROUNDED: &[(&str, &str)] = &[LORA[0], LORA[1], LORA[2], LORA[3], ("bf16", "true")];
    check(&Task { shape: Shape::Gpt2, extra: ROUNDED }, &few_cells()[2..], &BF16)?;
    check(&Task { shape: Shape::Llama, extra: ROUNDED }, &few_cells(), &BF16)?;
    const EXACT: &[(&str, &str)] = &[LORA[0], LORA[1], LORA[2], LORA[3], ("bf16", "true"), ("reproducible", "true")];
    const WHOLE: &[(&str, &str)] =
        &[PAIRS[4], PAIRS[5], ("learning_rate", "1e-3"), ("rl", "dpo"), ("reproducible", "true")];
    let cells = [Cell { zero: 1, ..mesh(1, 1, 2, 1, 1) }, mesh(2, 2, 1, 1, 1), mesh(1, 1, 3, 1, 1)];
    for extra in [EXACT, WHOLE] {
        check(&Task { shape: Shape::Llama, extra }, &cells, &Tolerance { loss: 0.0, norm: 0.0 })?;
    }
    Ok(())
}

#[test]
fn parameters_that_are_not_trained_keep_their_bits() -> Result<()> {
    const TRAINED: (&str, &str) = ("trained_parameters", "[^lm_head, model.layers.1.mlp.]");
    check(&Task { shape: Shape::Llama, extra: &[TRAINED] }, &few_cells(), &Tolerance::F32)?;
    let weights = |extra| -> Result<Vec<u8>> {
        let dir = tempfile::tempdir()?;
        let run = train(&Task { shape: Shape::Llama, extra }, &Cell::ALONE, dir.path(), 3, None)?;
        Ok(std::fs::read(run.model.join("model.safetensors"))?)
    };
    let before = weights(&[TRAINED, ("learning_rate", "1e-30"), ("weight_decay", "0")])?;
    let after = weights(&[TRAINED])?;
    let (before, after) =
        (safetensors::SafeTensors::deserialize(&before)?, safetensors::SafeTensors::deserialize(&after)?);
    for (name, tensor) in before.tensors() {
        let is_trained = name.starts_with("lm_head") || name.contains("layers.1.mlp.");
        ensure!((after.tensor(&name)?.data() != tensor.data()) == is_trained, "{name}");
    }
    Ok(())
}

/// 13 validation rows: no number of ranks divides them.
#[test]
fn validation_losses_are_equal_on_every_mesh() -> Result<()> {
    let task = Task { shape: Shape::Llama, extra: &[("val_set_size", "13"), ("eval_steps", "4")] };
    let dir = tempfile::tempdir()?;
    let alone = train(&task, &Cell::ALONE, dir.path(), STEPS, None)?;
    ensure!(alone.evals.len() == 2, "{:?}", alone.evals);
    for cell in few_cells() {
        let run = train(&task, &cell, dir.path(), STEPS, None)?;
        let worst = run.evals.iter().zip(&alone.evals).fold(0f64, |w, (a, b)| w.max((a - b).abs()));
        println!("{cell}: {:?}, {worst:.1e} from one rank", run.evals);
        ensure!(run.evals.len() == 2 && worst <= Tolerance::F32.loss, "{cell}: {:?} not {:?}", run.evals, alone.evals);
        ensure!(Tolerance::F32.admits(distance(&run.curve, &alone.curve)), "{cell}");
    }
    Ok(())
}

/// Largest difference between the weights of two exported models with the same tensors.
fn export_distance(a: &Path, b: &Path) -> Result<f32> {
    let (a, b) = (std::fs::read(a.join("model.safetensors"))?, std::fs::read(b.join("model.safetensors"))?);
    let (a, b) = (safetensors::SafeTensors::deserialize(&a)?, safetensors::SafeTensors::deserialize(&b)?);
    ensure!(a.len() == b.len(), "{} and {} tensors", a.len(), b.len());
    let mut worst = 0f32;
    for (name, x) in a.tensors() {
        let y = b.tensor(&name)?;
        ensure!(x.shape() == y.shape() && x.dtype() == y.dtype(), "{name} differs in shape or type");
        let values = |data: &[u8]| -> Vec<f32> {
            data.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
        };
        worst = values(x.data()).iter().zip(values(y.data())).fold(worst, |w, (x, y)| w.max((x - y).abs()));
    }
    Ok(worst)
}

/// Compares weights after SGD, whose update is as exact as the gradient. AdamW moves elements whose gradient is noise by a share
/// of the learning rate in either direction.
#[test]
fn model_exported_by_many_ranks_equals_that_of_one_rank() -> Result<()> {
    let task = Task { shape: Shape::Gpt2, extra: &[("optimizer", "sgd"), ("learning_rate", "0.1")] };
    let dir = tempfile::tempdir()?;
    let alone = train(&task, &Cell::ALONE, dir.path(), 3, None)?;
    for cell in few_cells() {
        let run = train(&task, &cell, dir.path(), 3, None)?;
        let worst = export_distance(&run.model, &alone.model)?;
        println!("{cell}: {worst:.1e}");
        ensure!(worst <= 1e-6, "{cell}: a weight differs by {worst}");
    }
    // The comparison can fail: one more step changes the weights.
    let longer = train(&task, &Cell::ALONE, dir.path(), 4, None)?;
    ensure!(export_distance(&longer.model, &alone.model)? > 1e-4);
    Ok(())
}

#[test]
fn export_of_many_ranks_without_updates_has_the_bits_of_one_rank() -> Result<()> {
    let task = Task {
        shape: Shape::Llama,
        extra: &[("learning_rate", "1e-30"), ("warmup_steps", "0"), ("weight_decay", "0")],
    };
    let dir = tempfile::tempdir()?;
    let alone = train(&task, &Cell::ALONE, dir.path(), 1, None)?;
    for cell in few_cells() {
        let run = train(&task, &cell, dir.path(), 1, None)?;
        ensure!(export_distance(&run.model, &alone.model)? == 0.0, "{cell}: weights differ");
    }
    Ok(())
}
