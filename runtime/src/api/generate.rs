//! Text from a model directory, to inspect the result of training.
//!
//! A prompt runs through a forward program of the next power-of-two length, which also keeps the keys and values of its
//! tokens. From then on each token is a run of a program of one token, which reads the cache and adds to it: the time of a
//! token does not depend on the number of earlier ones, except for its attention to their keys.

use crate::config::precision::DeviceChoice;
use crate::data::tokenizer::Tokenizer;
use crate::devices;
use crate::error::JobError;
use crate::error::generate::GenerateError;
use crate::train::weights::FirstValues;
use crate::train::{located, plan, weights};
use phalanx_device::groups::Groups;
use phalanx_device::{Backing, Device, Machine};
use phalanx_storage::hf::source::{TensorSource, read_json};
use phalanx_strategies::compile::{Compiled, Parallel, StepSpec, compile_cached};
use phalanx_strategies::model::{BatchShape, Head, ModelConfig};
use phalanx_strategies::optimizer::{OptimizerSpec, Sgd};
use phalanx_strategies::passes::cache::{CacheUse, Sees};
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
    /// Forward programs of increasing length, whose tokens begin at position 0.
    prompts: Vec<Compiled>,
    /// The program of one token, which sees the tokens in the cache.
    token: Compiled,
    /// The tokens whose keys and values are in the cache.
    cached: Vec<u32>,
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
        Generator::load_on(&*devices::of(DeviceChoice::Auto)?, dir, max_len)
    }

    pub(super) fn load_on(device: &dyn Device, dir: &Path, max_len: usize) -> Result<Generator, JobError> {
        let dir = &*located::model(dir)?;
        let path = dir.join("config.json");
        let model = plan::parse_model(&read_json(&path)?, &path.display().to_string())?;
        let tokenizer = Tokenizer::from_dir(dir)?;
        let capacity = max_len.clamp(1, model.max_positions);
        let compile = |seq_len, sees| compile(device, &model, seq_len, CacheUse { capacity, sees }, &path);
        let mut prompts = Vec::new();
        let mut len = SHORTEST.min(capacity);
        loop {
            prompts.push(compile(len, Sees::OwnTokens)?);
            if len == capacity {
                break;
            }
            len = (2 * len).min(capacity);
        }
        let token = compile(1, Sees::Cache)?;
        let programs: Vec<&Compiled> = prompts.iter().chain([&token]).collect();
        let mut machine = device.machine(&programs, &Backing::default())?;
        let source = Some(TensorSource::open(dir)?);
        let first = FirstValues { model: Some(&model), params: &[], source, grown: None, adapter: None, seed: 0 };
        weights::initialise(&mut *machine, &token, &first, |_| true)?;
        Ok(Generator { model, tokenizer, machine, prompts, token, cached: Vec::new(), logits: Vec::new() })
    }

    /// The model's tokenizer.
    pub const fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Logits `[V]` of the token that follows `ids`. If all of `ids` but the last were in an earlier call, only the last one is
    /// computed.
    ///
    /// # Errors
    /// When `ids` is empty or longer than `max_len` of [`Generator::load`].
    pub fn logits(&mut self, ids: &[u32]) -> Result<&[f32], JobError> {
        let prompt = self.prompt(ids)?;
        let last = ids.len() - 1;
        if self.cached.get(..last) == Some(&ids[..last]) {
            self.run(None, ids, last)
        } else {
            self.run(Some(prompt), ids, last)
        }
    }

    /// Logits `[ids.len(), V]`.
    ///
    /// # Errors
    /// As [`Generator::logits`].
    pub fn all_logits(&mut self, ids: &[u32]) -> Result<&[f32], JobError> {
        let prompt = self.prompt(ids)?;
        self.run(Some(prompt), ids, 0)
    }

    /// The shortest program that holds `ids`.
    fn prompt(&self, ids: &[u32]) -> Result<usize, GenerateError> {
        let holds = |c: &Compiled| n_tokens(c) >= ids.len();
        let fits = self.prompts.iter().position(|c| !ids.is_empty() && holds(c));
        let vocab_size = self.model.vocab_size;
        match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size) {
            Some((position, id)) if fits.is_some() => Err(GenerateError::Token { id: *id, position, vocab_size }),
            _ => fits.ok_or(GenerateError::Length { n_tokens: ids.len() }),
        }
    }

    /// Runs the program of a prompt over `ids`, or that of a token over the last of them. Returns the logits from position
    /// `wanted` on.
    fn run(&mut self, prompt: Option<usize>, ids: &[u32], wanted: usize) -> Result<&[f32], JobError> {
        let c = prompt.map_or(&self.token, |prompt| &self.prompts[prompt]);
        let first = if prompt.is_some() { 0 } else { ids.len() - 1 };
        let machine = &mut *self.machine;
        for role in [Role::Ids, Role::Positions, Role::DocStart] {
            let Some(value) = c.program.bound(role).next() else { continue };
            // Tokens behind `ids` are padding: no earlier token sees them, and whatever they leave in the cache is replaced before
            // a later token sees it.
            let token = |i: usize| match role {
                Role::Ids => ids.get(i).copied().unwrap_or(0) as i32,
                Role::Positions => i as i32,
                _ => 0,
            };
            let tokens: Vec<i32> = (first..first + n_tokens(c)).map(token).collect();
            machine.write(c, value, 0, &tokens);
        }
        // A run that fails may have written a part of the cache.
        let mut cached = std::mem::take(&mut self.cached);
        machine.run_all(c, &mut Groups::none())?;
        cached.truncate(first);
        cached.extend(&ids[first..]);
        self.cached = cached;
        let logits = c.program.bound(Role::Logits).next().ok_or(GenerateError::NoLogits)?;
        let v = self.model.vocab_size;
        let wanted = (wanted - first) * v..(ids.len() - first) * v;
        Ok(match machine.host(c, logits) {
            Some(bytes) => &bytemuck::cast_slice(bytes)[wanted],
            None => {
                self.logits.resize(wanted.len(), 0.0);
                machine.get(c, logits, wanted.start * size_of::<f32>(), bytemuck::cast_slice_mut(&mut self.logits));
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
        let longest = self.prompts.last().map_or(0, n_tokens);
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

/// As [`with_generator_on`], on the best device of this machine.
///
/// # Errors
/// As [`Generator::load`] and `work`.
pub fn with_generator<R: Send>(
    dir: &Path,
    max_len: usize,
    n_threads: Option<usize>,
    work: impl FnOnce(&mut Generator) -> Result<R, JobError> + Send,
) -> Result<R, JobError> {
    with_generator_on(DeviceChoice::Auto, dir, max_len, n_threads, work)
}

/// Loads a model on the device thread and runs `work` with it there.
///
/// # Errors
/// When this machine has no such device; as [`Generator::load`] and `work`.
pub fn with_generator_on<R: Send>(
    device: DeviceChoice,
    dir: &Path,
    max_len: usize,
    n_threads: Option<usize>,
    work: impl FnOnce(&mut Generator) -> Result<R, JobError> + Send,
) -> Result<R, JobError> {
    let device = devices::of(device)?;
    let n_threads = n_threads.unwrap_or_else(|| device.available_threads());
    device.on_device_thread(n_threads, || work(&mut Generator::load_on(&*device, dir, max_len)?))?
}

/// Tokens of a program.
fn n_tokens(c: &Compiled) -> usize {
    c.program.bound(Role::Ids).next().map_or(0, |v| c.program.value(v).n_elements())
}

fn compile(
    device: &dyn Device,
    model: &ModelConfig,
    seq_len: usize,
    cache: CacheUse,
    path: &Path,
) -> Result<Compiled, JobError> {
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
    Ok(compile_cached(program, &spec, cache, device.target())?)
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
