//! Models of every family compared with PyTorch and transformers: logits, and a training run with its curve and final
//! weights, on the CPU and on the software GPU under several orders of its streams, blocks and threads.

use anyhow::{Context, Result, ensure};
use phalanx::api::generate::with_generator_on;
use phalanx::api::sampling::Sampling;
use phalanx::config::precision::DeviceChoice;
use phalanx_softgpu::Installation;
use phalanx_strategies::model::FAMILIES;
use phalanx_tests::reference::Reference;
use phalanx_tests::reference::checks::{Check, MODELS, assert_curve, assert_logits, committed};
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};

/// The device of the tests in this process.
const CPU: DeviceChoice = DeviceChoice::Cpu;
/// Largest relative distance of a parameter's norm after the last step, for the real model.
const NORM_BOUND: f64 = 1e-5;

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
    Check::Logits.run(CPU).map(drop)
}

#[test]
fn logits_and_greedy_text_with_a_cache_equal_those_without() -> Result<()> {
    Check::Generation.run(CPU).map(drop)
}

#[test]
fn training_follows_pytorch_and_ends_at_its_weights() -> Result<()> {
    Check::Training.run(CPU).map(drop)
}

#[test]
fn other_optimizers_follow_pytorch_and_end_at_its_weights() -> Result<()> {
    Check::Optimizers.run(CPU).map(drop)
}

#[test]
fn adapters_follow_peft_and_end_at_its_weights() -> Result<()> {
    Check::Adapters.run(CPU).map(drop)
}

#[test]
fn accumulated_microbatches_follow_the_same_curve() -> Result<()> {
    Check::Accumulation.run(CPU).map(drop)
}

#[test]
fn recomputed_activations_follow_the_same_curve() -> Result<()> {
    Check::Recomputation.run(CPU).map(drop)
}

#[test]
fn bf16_is_as_near_to_float64_as_that_of_pytorch() -> Result<()> {
    Check::Bf16.run(CPU).map(drop)
}

#[test]
fn fp16_is_as_near_to_float64_as_that_of_pytorch_while_its_loss_scale_grows() -> Result<()> {
    Check::Fp16.run(CPU).map(drop)
}

/// The seeds of the software GPU, and the checks that run under each, besides the training in f32 that runs under all of them.
const SEEDS: [(u32, &[Check]); 6] = [
    (1, &[Check::Logits, Check::Generation]),
    (2, &[Check::Accumulation, Check::Recomputation]),
    (3, &[Check::Optimizers]),
    (4, &[Check::Bf16, Check::Fp16]),
    (5, &[Check::Generation, Check::Adapters]),
    (6, &[Check::Generation]),
];
/// Processes at a time: the software GPU has one thread for its streams and two for blocks.
const N_AT_A_TIME: usize = 2;

/// Starts the checks on the software GPU, in a process of their own: the libraries are found, and the seed is read, once.
fn on_the_software_gpu(gpu: &Installation, seed: u32, checks: &[Check]) -> Result<Child> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_reference"));
    command.args(["--device", "cuda", "training"]).args(checks.iter().map(|check| check.name()));
    command.env("PHALANX_CUDA_LIBS", gpu.dir()).env("SOFTGPU_SEED", seed.to_string());
    Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
}

#[test]
fn software_gpu_follows_pytorch_with_the_same_bits_under_every_order_of_its_work() -> Result<()> {
    let gpu = Installation::new().map_err(anyhow::Error::msg)?;
    let mut digests: BTreeMap<String, (u32, String)> = BTreeMap::new();
    let mut n_equal = 0;

    for seeds in SEEDS.chunks(N_AT_A_TIME) {
        let started: Vec<_> =
            seeds.iter().map(|(seed, checks)| (*seed, on_the_software_gpu(&gpu, *seed, checks))).collect();
        for (seed, child) in started {
            let ended = child?.wait_with_output()?;
            let (out, err) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
            ensure!(ended.status.success(), "seed {seed}: {out}{err}");
            for line in out.lines().filter_map(|line| line.strip_prefix("digest ")) {
                let (run, digest) = line.rsplit_once(' ').context("a run and its digest")?;
                let (other, first) = digests.entry(run.to_owned()).or_insert((seed, digest.to_owned()));
                ensure!(digest == first, "{run}: seed {seed} has other bits than seed {other}");
                n_equal += usize::from(*other != seed);
            }
        }
    }

    // Training under all seeds, generation under three.
    ensure!(n_equal == (5 + 2) * MODELS.len(), "{n_equal} runs under more than one seed");
    Ok(())
}

#[test]
fn real_model_gives_the_logits_of_transformers_and_trains_like_pytorch() -> Result<()> {
    let Some(r) = Reference::stories()? else { return Ok(()) };
    assert_logits(&r, CPU)?;
    for (keys, reordered) in
        [(r.whole_batch(), false), ("micro_batch_size: 2\ngradient_accumulation_steps: 2".into(), true)]
    {
        let run = r.train(CPU, &keys)?;
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
    let text = with_generator_on(CPU, &model, 64, None, |g| {
        let bos = g.tokenizer().bos_id().into_iter().collect();
        let ids = g.generate(bos, 63, Sampling::GREEDY, |_| true)?;
        Ok(g.tokenizer().decode(&ids[1..], true)?)
    })?;

    let story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. \
                 One day, she saw a big, red ball.";
    ensure!(text.trim_start().starts_with(story), "{text}");
    Ok(())
}

/// What `generate(max_new_tokens=100, do_sample=False)` of transformers returns for "Once upon a time".
const GREEDY_STORY: [u32; 105] = [
    1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267, 337, 410, 408,
    419, 292, 411, 322, 265, 282, 295, 433, 426, 385, 328, 432, 358, 394, 261, 370, 432, 352, 266, 268, 388, 426, 338,
    391, 266, 267, 337, 335, 312, 432, 398, 312, 286, 267, 414, 270, 333, 415, 426, 13, 438, 310, 439, 419, 357, 336,
    432, 313, 438, 310, 432, 278, 316, 439, 419, 298, 414, 267, 265, 282, 295, 433, 426, 436, 317, 286, 296, 418, 269,
    279, 292, 416, 439, 413, 409, 416, 327, 263, 415, 294, 267, 400,
];

#[test]
fn greedy_tokens_are_those_of_transformers() -> Result<()> {
    let Some(model) = phalanx_needs::shared("models/stories260k") else { return Ok(()) };
    let ids = with_generator_on(CPU, &model, 128, None, |g| {
        let prompt = g.tokenizer().document_start().into_iter().chain(g.tokenizer().encode("Once upon a time")?);
        g.generate(prompt.collect(), 100, Sampling::GREEDY, |_| true)
    })?;

    ensure!(ids == GREEDY_STORY, "{ids:?}");
    Ok(())
}
