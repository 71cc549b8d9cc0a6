//! Text from a model directory, to inspect the result of training.
//!
//! For each token, the whole prefix runs through a forward program of the next power-of-two length. There is no cache of
//! keys and values, which only serving needs.

use crate::config::precision::{AttentionEngine, DeviceChoice};
use crate::data::tokenizer::Tokenizer;
use crate::devices;
use crate::error::JobError;
use crate::error::generate::GenerateError;
use crate::train::weights::FirstValues;
use crate::train::{plan, weights};
use phalanx_device::groups::Groups;
use phalanx_device::{Backing, Device, Machine};
use phalanx_storage::hf::source::{TensorSource, read_json};
use phalanx_strategies::compile::{Compiled, Parallel, StepSpec, compile_forward};
use phalanx_strategies::model::{BatchShape, Head, ModelConfig};
use phalanx_strategies::optimizer::{OptimizerSpec, Sgd};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::Role;
use phalanx_strategies::rng::CounterRng;
use std::path::Path;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens to sample from; 0 means all.
    pub top_k: usize,
    /// Total probability of the most likely tokens to sample from.
    pub top_p: f32,
    /// Seed; the same seed gives the same text.
    pub seed: u64,
}

impl Sampling {
    /// Always takes the most likely token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
}

/// A model with its weights in memory.
#[derive(Debug)]
pub struct Generator {
    model: ModelConfig,
    tokenizer: Tokenizer,
    machine: Box<dyn Machine>,
    /// Forward programs of increasing length.
    programs: Vec<Compiled>,
    /// A copy of the last logits, if the host cannot address them.
    logits: Vec<f32>,
}

const SHORTEST: usize = 64;

impl Generator {
    /// Loads a model directory for texts of at most `max_len` tokens, prompt included.
    ///
    /// # Errors
    /// When the directory is not a supported model.
    pub fn load(dir: &Path, max_len: usize) -> Result<Generator, JobError> {
        Generator::load_on(&*devices::of(DeviceChoice::Auto, AttentionEngine::Auto)?, dir, max_len)
    }

    pub(super) fn load_on(device: &dyn Device, dir: &Path, max_len: usize) -> Result<Generator, JobError> {
        let path = dir.join("config.json");
        let model = plan::parse_model(&read_json(&path)?, &path.display().to_string())?;
        let tokenizer = Tokenizer::from_dir(dir)?;
        let longest = max_len.clamp(1, model.max_positions);
        let mut programs = Vec::new();
        let mut len = SHORTEST.min(longest);
        loop {
            programs.push(forward(device, &model, len, &path)?);
            if len == longest {
                break;
            }
            len = (2 * len).min(longest);
        }
        let mut machine = device.machine(&programs.iter().collect::<Vec<_>>(), &Backing::default())?;
        let source = Some(TensorSource::open(dir)?);
        let first = FirstValues { model: Some(&model), params: &[], source, seed: 0 };
        weights::initialise(&mut *machine, &programs[0], &first, |_| true)?;
        Ok(Generator { model, tokenizer, machine, programs, logits: Vec::new() })
    }

    /// The model's tokenizer.
    pub const fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Logits `[V]` of the token that follows `ids`.
    ///
    /// # Errors
    /// When `ids` is empty or longer than `max_len` of [`Generator::load`].
    pub fn logits(&mut self, ids: &[u32]) -> Result<&[f32], JobError> {
        let all = self.all_logits(ids)?;
        let v = all.len() / ids.len();
        Ok(&all[(ids.len() - 1) * v..])
    }

    /// Logits `[ids.len(), V]`.
    ///
    /// # Errors
    /// As [`Generator::logits`].
    pub fn all_logits(&mut self, ids: &[u32]) -> Result<&[f32], JobError> {
        let length = |c: &Compiled| c.program.bound(Role::Ids).next().map_or(0, |v| c.program.value(v).n_elements());
        let fits = self.programs.iter().find(|c| !ids.is_empty() && length(c) >= ids.len());
        let c = fits.ok_or(GenerateError::Length { n_tokens: ids.len() })?;
        for (i, id) in ids.iter().enumerate() {
            if *id as usize >= self.model.vocab_size {
                let vocab_size = self.model.vocab_size;
                return Err(GenerateError::Token { id: *id, position: i, vocab_size }.into());
            }
        }
        let machine = &mut *self.machine;
        for role in [Role::Ids, Role::Positions, Role::DocStart] {
            let Some(value) = c.program.bound(role).next() else { continue };
            let token = |i: usize| match role {
                Role::Ids => ids.get(i).copied().unwrap_or(0) as i32,
                Role::Positions => i as i32,
                _ => 0,
            };
            let tokens: Vec<i32> = (0..c.program.value(value).n_elements()).map(token).collect();
            machine.write(c, value, 0, &tokens);
        }
        // The tables of a program depend on its length, and all programs share one buffer for them.
        weights::fill_constants(machine, c, Some(&self.model));
        machine.run_all(c, &mut Groups::none())?;
        let logits = c.program.bound(Role::Logits).next();
        let logits = logits.ok_or(GenerateError::NoLogits)?;
        let wanted = 0..ids.len() * self.model.vocab_size;
        Ok(match machine.host(c, logits) {
            Some(bytes) => &bytemuck::cast_slice(bytes)[wanted],
            None => {
                self.logits.resize(wanted.len(), 0.0);
                machine.get(c, logits, 0, bytemuck::cast_slice_mut(&mut self.logits));
                &self.logits
            }
        })
    }

    /// Continues `ids` by at most `max_new` tokens and calls `on_token` for each. Ends after an end-of-text token, when
    /// `on_token` returns `false`, or at the maximum length. Returns prompt and continuation.
    ///
    /// # Errors
    /// As [`Generator::logits`].
    pub fn generate(
        &mut self,
        mut ids: Vec<u32>,
        max_new: usize,
        sampling: Sampling,
        mut on_token: impl FnMut(u32) -> bool,
    ) -> Result<Vec<u32>, JobError> {
        let longest = self.programs.last().and_then(|c| c.program.bound(Role::Ids).next().map(|v| (c, v)));
        let longest = longest.map_or(0, |(c, v)| c.program.value(v).n_elements());
        let rng = CounterRng::new(sampling.seed).fork_named("generate");
        for i in 0..max_new {
            if ids.len() >= longest {
                break;
            }
            let next = choose(self.logits(&ids)?, sampling, rng.uniform(i as u64));
            ids.push(next);
            if self.tokenizer.stop_ids().contains(&next) || !on_token(next) {
                break;
            }
        }
        Ok(ids)
    }
}

/// Loads a model on the device thread and runs `work` with it there.
///
/// # Errors
/// As [`Generator::load`] and `work`.
pub fn with_generator<R: Send>(
    dir: &Path,
    max_len: usize,
    n_threads: Option<usize>,
    work: impl FnOnce(&mut Generator) -> Result<R, JobError> + Send,
) -> Result<R, JobError> {
    let device = devices::of(DeviceChoice::Auto, AttentionEngine::Auto)?;
    let n_threads = n_threads.unwrap_or_else(|| device.available_threads());
    device.on_device_thread(n_threads, || work(&mut Generator::load_on(&*device, dir, max_len)?))?
}

fn forward(device: &dyn Device, model: &ModelConfig, seq_len: usize, path: &Path) -> Result<Compiled, JobError> {
    let spec = StepSpec {
        n_microbatches: 1,
        precision: Precision::F32,
        recompute: Recompute::None,
        lora: None,
        optimizer: OptimizerSpec::Sgd(Sgd::default()),
        max_grad_norm: None,
        offload_optimizer: false,
        parallel: Parallel::default(),
    };
    let program = model
        .forward(BatchShape { n_rows: 1, seq_len }, Head::Logits)
        .map_err(|source| JobError::Model { path: path.display().to_string(), source })?;
    Ok(compile_forward(program, &spec, device.target())?)
}

/// The next token, given a uniform variate.
fn choose(logits: &[f32], sampling: Sampling, uniform: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // Ties go to the lower id, as in PyTorch's argmax.
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
    if sampling.temperature <= 0.0 {
        return order[0];
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let max = f64::from(logits[order[0] as usize]);
    let weight = |id: &u32| ((f64::from(logits[*id as usize]) - max) / f64::from(sampling.temperature)).exp();
    let mut weights: Vec<f64> = order.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let mut kept = 0.0;
    let nucleus = weights.iter().position(|w| {
        kept += w;
        kept >= f64::from(sampling.top_p) * total
    });
    weights.truncate(nucleus.map_or(weights.len(), |i| i + 1));
    let mut left = uniform * weights.iter().sum::<f64>();
    for (id, w) in order.iter().zip(&weights) {
        left -= w;
        if left < 0.0 {
            return *id;
        }
    }
    order[weights.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_sampling_takes_the_most_likely_token_and_the_lower_id_on_a_tie() {
        assert_eq!(choose(&[0.0, 3.0, 3.0, 1.0], Sampling::GREEDY, 0.99), 1);
    }

    #[test]
    fn sampling_follows_the_probabilities_within_top_k_and_top_p() {
        let logits = [4f32.ln(), 3f32.ln(), 2f32.ln(), 1f32.ln()];
        let count = |s: Sampling| {
            let mut n = [0; 4];
            (0..1000).for_each(|i| n[choose(&logits, s, (f64::from(i) + 0.5) / 1000.0) as usize] += 1);
            n
        };
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 };
        assert_eq!(count(all), [400, 300, 200, 100]);
        assert_eq!(count(Sampling { top_k: 2, ..all }), [571, 429, 0, 0]);
        assert_eq!(count(Sampling { top_p: 0.65, ..all }), [571, 429, 0, 0]);
        let cold = count(Sampling { temperature: 0.1, ..all });
        assert!(cold[0] > 900, "{cold:?}");
    }
}
