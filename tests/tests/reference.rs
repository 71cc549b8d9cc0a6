//! Models of every family compared with PyTorch and transformers: logits, and a training run with its curve and final
//! weights.
//!
//! The reference files hold a float32 and a float64 run of PyTorch, see `tests/reference/README.md`. The distance between
//! these two sets the scale of the bounds: they differ by up to 1.5e-6 in a loss and 6.3e-6 in a final weight, and Phalanx is
//! as near to the float64 run. The bounds are three to ten times the largest measured distance, which only leaves room for
//! another order of summation.

use anyhow::{Context, Result, ensure};
use phalanx::api::generate::{Sampling, with_generator};
use phalanx_strategies::model::FAMILIES;
use phalanx_tests::reference::{Reference, Run};
use std::collections::BTreeSet;

/// A model of every supported family. A new family is one line here.
const MODELS: [&str; 9] = [
    "tiny-llama2",
    "tiny-llama3",
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-gpt2",
    "tiny-phi3",
    "tiny-olmo2",
    "tiny-granite",
];
/// Runs of optimizers other than AdamW.
const OTHER_OPTIMIZERS: [&str; 3] = ["tiny-llama3-sgd", "tiny-llama3-lion", "tiny-llama3-adafactor"];

/// Largest relative distance of logits.
const LOGITS_BOUND: f64 = 5e-6;
/// Largest distance of a loss from the reference in f32, in nats.
const LOSS_BOUND: f64 = 5e-6;
/// Largest relative distance of a gradient norm.
const GRAD_NORM_BOUND: f64 = 5e-6;
/// Largest distance of a final weight. A step of AdamW moves a weight by up to 2e-3.
const WEIGHT_BOUND: f64 = 2e-5;
/// Largest relative distance of a parameter's norm after the last step, for the real model.
const NORM_BOUND: f64 = 1e-5;

fn committed() -> Result<Vec<Reference>> {
    MODELS.iter().map(|name| Reference::committed(name)).collect()
}

fn assert_curve(r: &Reference, run: &Run, what: &str) -> Result<()> {
    for precision in ["float32", "float64"] {
        let d = r.distances(precision, run)?;
        println!("{} {what}: loss {:.1e}, gradient norm {:.1e} from {precision}", r.name, d.loss, d.grad_norm);
        ensure!(d.loss < LOSS_BOUND, "{} {what}: a loss is {:.2e} from {precision}", r.name, d.loss);
        ensure!(d.grad_norm < GRAD_NORM_BOUND, "{} {what}: a norm is {:.2e} from {precision}", r.name, d.grad_norm);
    }
    Ok(())
}

fn assert_weights(r: &Reference, run: &Run, what: &str) -> Result<()> {
    let (distance, parameter) = r.weight_distance(run)?;
    println!("{} {what}: final weights within {distance:.1e}, the largest distance in {parameter}", r.name);
    ensure!(distance < WEIGHT_BOUND, "{} {what}: a weight of {parameter} is {distance:.2e} off", r.name);
    Ok(())
}

fn assert_logits(r: &Reference) -> Result<()> {
    let ids: Vec<u32> = r.numbers("/logits/input_ids")?.into_iter().map(|id| id as u32).collect();
    let logits = with_generator(&r.model, ids.len(), None, |g| Ok(g.all_logits(&ids)?.to_vec()))?;
    let logits: Vec<f64> = logits.into_iter().map(f64::from).collect();
    let squares = |logits: &[f64]| logits.iter().map(|x| x * x).sum::<f64>();

    let wanted = r.numbers("/logits/last_position")?;
    ensure!(ids.len() == 48 && logits.len() == 48 * wanted.len(), "{}: {} logits", r.name, logits.len());
    let rows: Vec<&[f64]> = logits.chunks(wanted.len()).collect();
    let off: Vec<f64> = rows[47].iter().zip(&wanted).map(|(x, w)| x - w).collect();
    let mut distances = vec![("the last logits", (squares(&off) / squares(&wanted)).sqrt())];
    let total = r.numbers("/logits/sum_of_squares")?[0];
    distances.push(("the sum of squares", (squares(&logits) / total - 1.0).abs()));
    if r.has("/logits/logit_of_the_next_id") {
        let wanted = r.numbers("/logits/logit_of_the_next_id")?;
        let found: Vec<f64> = rows.iter().zip(&ids[1..]).map(|(row, next)| row[*next as usize]).collect();
        ensure!(wanted.len() == 47 && found.len() == 47, "{}: {} next ids", r.name, wanted.len());
        let off: Vec<f64> = found.iter().zip(&wanted).map(|(x, w)| x - w).collect();
        distances.push(("the logits of the next ids", (squares(&off) / squares(&wanted)).sqrt()));
        let wanted = r.numbers("/logits/sum_of_squares_of_each_position")?;
        ensure!(wanted.len() == 48, "{}: {} positions", r.name, wanted.len());
        let each = rows.iter().zip(wanted).map(|(row, wanted)| (squares(row) / wanted - 1.0).abs());
        distances.push(("the sum of squares of a position", each.fold(0.0, f64::max)));
    }
    for (what, distance) in distances {
        println!("{}: {what} {distance:.1e} off", r.name);
        ensure!(distance < LOGITS_BOUND, "{}: {what}: {distance:.2e} off", r.name);
    }
    Ok(())
}

#[test]
fn every_supported_family_has_a_committed_reference() -> Result<()> {
    let mut families = BTreeSet::new();
    for r in committed()? {
        let config: serde_json::Value = serde_json::from_slice(&std::fs::read(r.model.join("config.json"))?)?;
        families.insert(config["model_type"].as_str().context("a model has a type")?.to_owned());
    }

    let supported: BTreeSet<String> = FAMILIES.iter().map(|f| f.model_type.to_owned()).collect();
    ensure!(families == supported, "references cover {families:?}, supported are {supported:?}");
    ensure!(MODELS.iter().collect::<BTreeSet<_>>().len() == MODELS.len(), "a model is listed twice");
    Ok(())
}

#[test]
fn logits_equal_those_of_transformers() -> Result<()> {
    committed()?.iter().try_for_each(assert_logits)
}

#[test]
fn training_follows_pytorch_and_ends_at_its_weights() -> Result<()> {
    for r in committed()? {
        let run = r.train(&r.whole_batch())?;
        assert_curve(&r, &run, "whole batch")?;
        assert_weights(&r, &run, "whole batch")?;
    }
    Ok(())
}

#[test]
fn other_optimizers_follow_pytorch_and_end_at_its_weights() -> Result<()> {
    for name in OTHER_OPTIMIZERS {
        let r = Reference::committed(name)?;
        let run = r.train(&r.whole_batch())?;
        assert_curve(&r, &run, "whole batch")?;
        assert_weights(&r, &run, "whole batch")?;
    }
    Ok(())
}

#[test]
fn accumulated_microbatches_follow_the_same_curve() -> Result<()> {
    for r in committed()? {
        let run = r.train("micro_batch_size: 2\ngradient_accumulation_steps: 2")?;
        assert_curve(&r, &run, "2 x 2")?;
        assert_weights(&r, &run, "2 x 2")?;
    }
    Ok(())
}

#[test]
fn recomputed_activations_follow_the_same_curve() -> Result<()> {
    for r in committed()? {
        for policy in ["selective", "full"] {
            let run = r.train(&format!("{}\ngradient_checkpointing: {policy}", r.whole_batch()))?;
            assert_curve(&r, &run, policy)?;
            assert_weights(&r, &run, policy)?;
        }
    }
    Ok(())
}

/// Rounding of activations changes a loss by about one unit of the format's last place times the square root of the
/// number of roundings; averaging over the tokens of a batch reduces this below one unit. The weights are f32, so the error
/// does not grow over the steps. The gradient is that of a different, rounded function, so its error is larger.
#[test]
fn bf16_stays_within_the_roundings_of_bf16() -> Result<()> {
    const UNIT: f64 = 1.0 / 256.0; // relative spacing of bf16
    for r in committed()? {
        let run = r.train(&format!("{}\nbf16: true", r.whole_batch()))?;
        let d = r.distances("float64", &run)?;
        println!("{} bf16: loss {:.1e}, gradient norm {:.1e}", r.name, d.loss, d.grad_norm);
        ensure!(d.loss > LOSS_BOUND, "{}: {:.2e} is too small an error for bf16; was bf16 used?", r.name, d.loss);
        ensure!(d.loss < UNIT, "{}: a loss is {:.2e} off", r.name, d.loss);
        ensure!(d.grad_norm < 4.0 * UNIT, "{}: a gradient norm is {:.2e} off", r.name, d.grad_norm);
    }
    Ok(())
}

/// As for bf16, with the eight times finer spacing of fp16; the loss scale must grow without an overflow.
#[test]
fn fp16_stays_within_the_roundings_of_fp16_while_its_loss_scale_grows() -> Result<()> {
    const UNIT: f64 = 1.0 / 2048.0; // relative spacing of fp16
    for r in committed()? {
        let keys = format!("{}\nfp16: true\ninitial_loss_scale: 256\nloss_scale_window: 3", r.whole_batch());
        let run = r.train(&keys)?;
        let d = r.distances("float64", &run)?;
        let scale = run.steps.last().and_then(|m| m.loss_scale).context("fp16 has a loss scale")?;
        println!("{} fp16: loss {:.1e}, gradient norm {:.1e}, scale {scale}", r.name, d.loss, d.grad_norm);
        ensure!(d.loss < UNIT, "{}: a loss is {:.2e} off", r.name, d.loss);
        ensure!(d.grad_norm < 4.0 * UNIT, "{}: a gradient norm is {:.2e} off", r.name, d.grad_norm);
        ensure!(scale == 256.0 * f64::from(1u32 << (run.steps.len() / 3)), "{}: the scale is {scale}", r.name);
    }
    Ok(())
}

#[test]
fn real_model_gives_the_logits_of_transformers_and_trains_like_pytorch() -> Result<()> {
    let Some(r) = Reference::stories()? else { return Ok(()) };
    assert_logits(&r)?;
    for (keys, reordered) in
        [(r.whole_batch(), false), ("micro_batch_size: 2\ngradient_accumulation_steps: 2".into(), true)]
    {
        let run = r.train(&keys)?;
        assert_curve(&r, &run, "real model")?;
        for norm in r.norm_distances(&run)? {
            // A run that sums in another order than the reference may differ as much as PyTorch's two runs.
            let bound = NORM_BOUND.max(if reordered { 3.0 * norm.spread } else { 0.0 });
            ensure!(norm.distance < bound, "{}: the norm is {:.2e} off", norm.parameter, norm.distance);
        }
    }
    Ok(())
}

#[test]
fn greedy_decoding_continues_the_reference_story() -> Result<()> {
    let Some(model) = phalanx_needs::shared("models/stories260k") else { return Ok(()) };
    let text = with_generator(&model, 64, None, |g| {
        let bos = g.tokenizer().bos_id().into_iter().collect();
        let ids = g.generate(bos, 63, Sampling::GREEDY, |_| true)?;
        Ok(g.tokenizer().decode(&ids[1..], true)?)
    })?;

    let story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. \
                 One day, she saw a big, red ball.";
    ensure!(text.trim_start().starts_with(story), "{text}");
    Ok(())
}
