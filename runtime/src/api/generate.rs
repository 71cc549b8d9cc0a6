//! Text from a model directory, to inspect the result of training.
//!
//! A prompt runs through forward programs that also keep the keys and values of its tokens: the first one sees only its own
//! tokens, and the next ones, of at most `CHUNK` tokens each, those in the cache too, so that memory does not grow with the
//! square of a prompt. From then on each token is a run of a program of one token, which reads the cache and adds to it: the
//! time of a token does not depend on the number of earlier ones, except for its attention to their keys.
//!
//! Everything is computed in f32. Matrices that the files have in bf16 stay so in memory, on devices that widen them while they multiply:
//! no number changes, and a token, whose time is that of reading the weights, takes half as long.

use super::sampling::Sampling;
use crate::config::precision::DeviceChoice;
use crate::data::tokenizer::Tokenizer;
use crate::devices;
use crate::error::JobError;
use crate::error::generate::GenerateError;
use crate::train::model_source::{ModelSource, forward_spec};
use phalanx_device::groups::Groups;
use phalanx_device::{Backing, Device, Machine};
use phalanx_strategies::compile::{Compiled, compile_cached};
use phalanx_strategies::model::{BatchShape, Head, ModelConfig, Output};
use phalanx_strategies::passes::cache::{CacheUse, Sees};
use phalanx_strategies::program::{Column, Role, ValueId};
use phalanx_strategies::rng::CounterRng;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A model with its weights in memory.
#[derive(Debug)]
pub struct Generator {
    model: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    machine: Box<dyn Machine>,
    /// Programs of increasing length; the first `n_beginnings` see only their own tokens, which begin at position 0, the others
    /// see the tokens in the cache.
    programs: Vec<Compiled>,
    n_beginnings: usize,
    /// Most tokens of a text.
    capacity: usize,
    /// The tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    /// Whether a text continues from its common beginning with the cached one.
    keeps_prefix: bool,
    /// A copy of the last logits, if the host cannot address them or they are of several runs.
    logits: Vec<f32>,
}

const SHORTEST: usize = 64;
/// Most tokens of a run: logits of a chunk take 300 MB for the largest vocabularies.
const CHUNK: usize = 512;
/// At most this many tokens run one by one: a longer program would compute mostly padding.
const FEW: usize = 16;

impl Generator {
    /// Loads a model directory for texts of at most `max_len` tokens, prompt included.
    ///
    /// # Errors
    /// When the directory is not a supported model.
    pub fn load(dir: &Path, max_len: usize) -> Result<Generator, JobError> {
        Generator::load_on(&*devices::of(DeviceChoice::Auto)?, &ModelSource::find(dir, None)?, max_len)
    }

    pub(super) fn load_on(device: &dyn Device, source: &ModelSource, max_len: usize) -> Result<Generator, JobError> {
        match source.model()?.output {
            Output::Logits => Generator::load_any(device, source, max_len),
            Output::Score => Err(GenerateError::OnlyScores { dir: source.dir().to_owned() }.into()),
        }
    }

    /// A model with any head.
    pub(super) fn load_any(device: &dyn Device, source: &ModelSource, max_len: usize) -> Result<Generator, JobError> {
        let model = source.model()?;
        let tokenizer = Arc::new(source.tokenizer()?);
        let capacity = max_len.clamp(1, model.max_positions);
        let halves = source.tensors_in_bf16()?;
        let compile = |seq_len, sees| {
            let path = source.base.join("config.json");
            compile(device, &model, seq_len, CacheUse { capacity, sees }, &halves, &path)
        };
        let mut programs = Vec::new();
        let longest = CHUNK.min(capacity);
        let mut len = SHORTEST.min(longest);
        loop {
            programs.push(compile(len, Sees::OwnTokens)?);
            if len == longest {
                break;
            }
            len = (2 * len).min(longest);
        }
        let n_beginnings = programs.len();
        programs.push(compile(1, Sees::Cache)?);
        for len in [SHORTEST, CHUNK].into_iter().filter(|len| *len < capacity) {
            programs.push(compile(len, Sees::Cache)?);
        }
        let mut machine = device.machine(&programs.iter().collect::<Vec<_>>(), &Backing::default())?;
        source.load(&mut *machine, &programs[n_beginnings], &model)?;
        let (cached, logits) = (Vec::new(), Vec::new());
        Ok(Generator {
            model,
            tokenizer,
            machine,
            programs,
            n_beginnings,
            capacity,
            cached,
            keeps_prefix: false,
            logits,
        })
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Tokens of the vocabulary.
    pub const fn vocab_size(&self) -> usize {
        self.model.vocab_size
    }

    /// Most tokens of a text, prompt included.
    pub const fn max_len(&self) -> usize {
        self.capacity
    }

    /// From now on, a text whose beginning is in the cache continues from there, even if it differs later. This saves the time
    /// of the earlier turns of a conversation. Logits may then differ in their last bits from those of the text alone.
    pub fn keep_prefix(&mut self) {
        self.keeps_prefix = true;
    }

    /// From now on, nothing of earlier texts is used.
    pub(super) fn forget(&mut self) {
        self.cached.clear();
    }

    /// Logits `[V]` of the token that follows `ids`. If all of `ids` but the last were in an earlier call, only the last one is
    /// computed.
    ///
    /// # Errors
    /// When `ids` is empty or longer than `max_len` of [`Generator::load`].
    pub fn logits(&mut self, ids: &[u32]) -> Result<&[f32], JobError> {
        self.check(ids)?;
        let last = ids.len() - 1;
        let common = self.cached.iter().zip(&ids[..last]).take_while(|(a, b)| a == b).count();
        let first = if common == last || self.keeps_prefix { common } else { 0 };
        let ran = self.advance(ids, first)?;
        Ok(self.rows(&ran, last..ids.len()))
    }

    /// Logits `[ids.len(), V]`.
    ///
    /// # Errors
    /// As [`Generator::logits`].
    pub fn all_logits(&mut self, ids: &[u32]) -> Result<&[f32], JobError> {
        self.check(ids)?;
        if ids.len() <= CHUNK {
            let ran = self.advance(ids, 0)?;
            return Ok(self.rows(&ran, 0..ids.len()));
        }
        let mut all = Vec::new();
        self.each_logits(ids, |_, rows| all.extend_from_slice(rows))?;
        self.logits = all;
        Ok(&self.logits)
    }

    /// Passes the logits of all tokens to `see`, some rows at a time: the position of the first one, and rows `[n, V]`.
    ///
    /// # Errors
    /// As [`Generator::logits`].
    pub fn each_logits(&mut self, ids: &[u32], mut see: impl FnMut(usize, &[f32])) -> Result<(), JobError> {
        self.check(ids)?;
        let mut first = 0;
        while first < ids.len() {
            let ran = self.run(ids, first)?;
            first = ran.at.end;
            see(ran.at.start, self.rows(&ran, ran.at.clone()));
        }
        Ok(())
    }

    /// Refuses texts that cannot be run.
    pub(crate) fn check(&self, ids: &[u32]) -> Result<(), GenerateError> {
        if ids.is_empty() || ids.len() > self.capacity {
            return Err(GenerateError::Length { n_tokens: ids.len(), longest: self.capacity });
        }
        let vocab_size = self.model.vocab_size;
        match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size) {
            Some((position, id)) => Err(GenerateError::Token { id: *id, position, vocab_size }),
            None => Ok(()),
        }
    }

    /// Computes the tokens from position `first` on; returns the last run.
    fn advance(&mut self, ids: &[u32], first: usize) -> Result<Ran, JobError> {
        let mut ran = self.run(ids, first)?;
        while ran.at.end < ids.len() {
            ran = self.run(ids, ran.at.end)?;
        }
        Ok(ran)
    }

    /// The program for the next tokens of a text: its `n_left` last ones, from position `first` on.
    fn program(&self, first: usize, n_left: usize) -> usize {
        let (beginnings, others) = self.programs.split_at(self.n_beginnings);
        if first == 0 {
            return beginnings.iter().position(|c| n_tokens(c) >= n_left).unwrap_or(self.n_beginnings - 1);
        }
        // The longest one without padding, or else the shortest one.
        let fits = |c: &&Compiled| n_left > FEW && first + n_tokens(c) <= self.capacity;
        let full = others[1..].iter().filter(fits).take_while(|c| n_tokens(c) <= n_left).count();
        let padded = usize::from(others[1..].first().as_ref().is_some_and(fits));
        self.n_beginnings + full.max(padded)
    }

    /// Runs one program over tokens from position `first` on, as many as it takes.
    fn run(&mut self, ids: &[u32], first: usize) -> Result<Ran, JobError> {
        let program = self.program(first, ids.len() - first);
        let c = &self.programs[program];
        let at = first..ids.len().min(first + n_tokens(c));
        let machine = &mut *self.machine;
        for b in &c.program.bindings {
            let Role::Column(column) = b.role else { continue };
            // Tokens behind `at` are padding: no earlier token sees them, and whatever they leave in the cache is replaced before
            // a later token sees it.
            let token = |i: usize| match column {
                Column::Ids => ids.get(i).copied().unwrap_or(0) as i32,
                Column::Positions => i as i32,
                Column::DocStart
                | Column::Labels
                | Column::LossWeights
                | Column::DesirableLabels
                | Column::NextIds
                | Column::LastId
                | Column::DropoutKeys => 0,
            };
            let tokens: Vec<i32> = (first..first + n_tokens(c)).map(token).collect();
            machine.write(c, b.value, 0, &tokens);
        }
        // A run that fails may have written a part of the cache.
        let mut cached = std::mem::take(&mut self.cached);
        machine.run_all(c, &mut Groups::none())?;
        cached.truncate(first);
        cached.extend(&ids[at.clone()]);
        self.cached = cached;
        let logits = c.program.bound(Role::Logits).next().ok_or(GenerateError::NoLogits)?;
        Ok(Ran { program, at, logits })
    }

    /// Logits of some positions of the last run.
    fn rows(&mut self, ran: &Ran, wanted: Range<usize>) -> &[f32] {
        let (c, v) = (&self.programs[ran.program], self.model.n_outputs());
        let wanted = (wanted.start - ran.at.start) * v..(wanted.end - ran.at.start) * v;
        match self.machine.host(c, ran.logits) {
            Some(bytes) => &bytemuck::cast_slice(bytes)[wanted],
            None => {
                self.logits.resize(wanted.len(), 0.0);
                let at = wanted.start * size_of::<f32>();
                self.machine.get(c, ran.logits, at, bytemuck::cast_slice_mut(&mut self.logits));
                &self.logits
            }
        }
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
        let rng = CounterRng::new(sampling.seed).fork_named("generate");
        for i in 0..max_new {
            if ids.len() >= self.capacity {
                break;
            }
            let next = sampling.choose(self.logits(&ids)?, &ids, rng.uniform(i as u64));
            ids.push(next);
            if self.tokenizer.stop_ids().contains(&next) || !on_token(next) {
                break;
            }
        }
        Ok(ids)
    }
}

/// A run of a program.
struct Ran {
    program: usize,
    /// Positions of its tokens, without padding.
    at: Range<usize>,
    logits: ValueId,
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
    with_model(device, &ModelSource::find(dir, None)?, max_len, n_threads, work)
}

/// As [`with_generator_on`], of a model directory or of an adapter with its base model.
///
/// # Errors
/// As [`with_generator_on`].
pub fn with_model<R: Send>(
    device: DeviceChoice,
    source: &ModelSource,
    max_len: usize,
    n_threads: Option<usize>,
    work: impl FnOnce(&mut Generator) -> Result<R, JobError> + Send,
) -> Result<R, JobError> {
    let device = devices::of(device)?;
    let n_threads = n_threads.unwrap_or_else(|| device.available_threads());
    device.on_device_thread(n_threads, || work(&mut Generator::load_on(&*device, source, max_len)?))?
}

/// Tokens of a program.
fn n_tokens(c: &Compiled) -> usize {
    c.program.bound(Role::Column(Column::Ids)).next().map_or(0, |v| c.program.value(v).n_elements())
}

fn compile(
    device: &dyn Device,
    model: &ModelConfig,
    seq_len: usize,
    cache: CacheUse,
    halves: &BTreeSet<String>,
    path: &Path,
) -> Result<Compiled, JobError> {
    let program = model
        .forward(BatchShape { n_rows: 1, seq_len }, Head::Logits)
        .map_err(|source| JobError::Model { path: path.display().to_string(), source })?;
    Ok(compile_cached(program, &forward_spec(), cache, &|name| halves.contains(name), device.target())?)
}
