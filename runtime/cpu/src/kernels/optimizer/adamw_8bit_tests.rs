use super::super::super::testing::{random, same_on_every_number_of_threads};
use super::super::{self as optimizer, Step, Whole};
use super::*;
use phalanx_strategies::optimizer::{AdamW8bit, OptimizerSpec};
use phalanx_strategies::program::tiles::Tiles;
use phalanx_strategies::program::{Init, Param, ParamPart, ValueId};
use std::ops::Range;

const RULE: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
/// Whole blocks and a short one.
const CODED: usize = 4096 + 2 * 256 + 37;
/// Too few elements for blocks.
const PLAIN: usize = 4000;
const STEPS: u64 = 6;

/// Updates of a run of a parameter's elements.
struct Run {
    blocks: Blocks,
    p: Vec<f32>,
    state: [Vec<f32>; 2],
}

impl Run {
    fn new(param: &Param, p: &[f32]) -> Run {
        let blocks = param.blocks().unwrap();
        let state = [(); 2].map(|()| vec![0.0; blocks.n_words()]);
        Run { p: p[param.updated.clone()].to_vec(), blocks, state }
    }

    fn step(&mut self, g: &[f32], t: u64, grad_scale: f64) {
        let rule = OptimizerSpec::AdamW8bit(AdamW8bit(RULE));
        let whole = Whole { tiles: &Tiles::default(), blocks: &self.blocks, sums: &[] };
        let step = Step { lr: 1e-2, scalars: rule.scalars(t), grad_scale };
        let [m, v] = &mut self.state;
        optimizer::update(&rule, &mut self.p, &mut [m, v], g, &whole, &step);
    }

    /// Scales and codes of one of the averages.
    fn stored(&self, i: usize) -> (Vec<u32>, Vec<u8>) {
        let words: &[u32] = bytemuck::cast_slice(&self.state[i]);
        let codes = words.chunks(WORDS).flat_map(|block| block[1..].iter().flat_map(|word| word.to_le_bytes()));
        (words.chunks(WORDS).map(|block| block[0]).collect(), codes.take(self.p.len()).collect())
    }
}

fn param(n: usize) -> Param {
    Param::whole(ValueId(0), &[n], vec![ParamPart::whole("w", &[n])], Init::Zeros)
}

/// The numbers of `tests/peers/adamw_8bit.py`.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    (0..n as u64).map(|i| ((i * 7919 + 104_729 * seed + 13) % 2003) as f32 - 1001.0).map(|x| x / 1024.0).collect()
}

fn gradient(n: usize, step: u64) -> Vec<f32> {
    let sizes = [0.0, 1.0, 2f32.powi(-4), 2f32.powi(-10), 8.0, 2f32.powi(-20)];
    numbers(n, step).into_iter().enumerate().map(|(i, x)| x * sizes[i % 6]).collect()
}

/// A line of what `tests/peers/adamw_8bit.py` wrote.
fn golden(name: &str) -> Vec<u32> {
    let lines = include_str!("adamw_8bit_golden.txt").lines();
    let mut found = lines.map(str::split_whitespace).find_map(|mut line| (line.next() == Some(name)).then_some(line));
    let found = found.as_mut().unwrap_or_else(|| panic!("no line {name}"));
    found.map(|number| u32::from_str_radix(number, 16).unwrap()).collect()
}

/// The share of the numbers that differ from the golden ones by more than rounding.
fn share_that_differs(found: &[f32], name: &str) -> f64 {
    let golden = golden(name);
    assert_eq!(found.len(), golden.len(), "{name}");
    let differs = |(x, golden): &(&f32, u32)| {
        let golden = f32::from_bits(*golden);
        (**x - golden).abs() > 1e-6 * golden.abs().max(0.1)
    };
    found.iter().zip(golden).filter(differs).count() as f64 / found.len() as f64
}

fn each_seventh(p: &[f32]) -> Vec<f32> {
    p.iter().step_by(7).copied().collect()
}

/// bitsandbytes multiplies and adds in one rounding, so a number between two codes may get the other one, and differ from then on.
const SHARE_MAX: f64 = 2e-3;

#[test]
fn updates_in_blocks_have_the_numbers_codes_and_scales_of_bitsandbytes() {
    let mut run = Run::new(&param(CODED), &numbers(CODED, 0));

    for t in 1..=STEPS {
        run.step(&gradient(CODED, t), t, 1.0);
        if ![1, STEPS].contains(&t) {
            continue;
        }
        let share = share_that_differs(&each_seventh(&run.p), &format!("coded_p_{t}"));
        assert!(share <= SHARE_MAX, "{share} of the numbers differ at step {t}");
        for i in 0..2 {
            let (scales, codes) = run.stored(i);
            let scales: Vec<f32> = scales.into_iter().map(f32::from_bits).collect();
            assert_eq!(share_that_differs(&scales, &format!("scales{}_{t}", i + 1)), 0.0);
            let golden = golden(&format!("codes{}_{t}", i + 1));
            let apart: Vec<u32> = codes.iter().zip(&golden).map(|(a, b)| u32::from(*a).abs_diff(*b)).collect();
            let n_apart = apart.iter().filter(|apart| **apart > 0).count();
            assert!(n_apart as f64 <= SHARE_MAX * CODED as f64, "{n_apart} codes differ at step {t}");
            assert!(apart.iter().all(|apart| *apart <= 1), "codes {i} at step {t}");
        }
    }
}

#[test]
fn updates_of_small_tensors_have_the_numbers_of_bitsandbytes() {
    let mut run = Run::new(&param(PLAIN), &numbers(PLAIN, 0));

    for t in 1..=STEPS {
        run.step(&gradient(PLAIN, t), t, 1.0);
        if [1, STEPS].contains(&t) {
            assert_eq!(share_that_differs(&each_seventh(&run.p), &format!("plain_p_{t}")), 0.0);
        }
    }
}

#[test]
fn shards_of_whole_blocks_have_the_bits_of_the_whole_parameter() {
    let parts = [ParamPart::whole("a", &[40, 256]), ParamPart::whole("b", &[3, 256])];
    let whole = Param::whole(ValueId(0), &[43, 256], parts.to_vec(), Init::Zeros);
    let n = whole.updated.end;
    let p = random(n, 1);
    let trained = |updated: Range<usize>| {
        let mut run = Run::new(&Param { updated: updated.clone(), ..whole.clone() }, &p);
        (1..=3).for_each(|t| run.step(&random(n, 10 + t)[updated.clone()], t, 0.5));
        run
    };

    let (together, cuts) = (trained(0..n), [0, 3 * 256, 41 * 256, n]);
    let shards: Vec<Run> = cuts.windows(2).map(|cut| trained(cut[0]..cut[1])).collect();

    let of = |of: fn(&Run) -> &Vec<f32>| -> Vec<u32> { shards.iter().flat_map(of).map(|x| x.to_bits()).collect() };
    let bits = |x: &[f32]| -> Vec<u32> { x.iter().map(|x| x.to_bits()).collect() };
    assert_eq!(of(|run| &run.p), bits(&together.p));
    assert_eq!(of(|run| &run.state[0]), bits(&together.state[0]));
    assert_eq!(of(|run| &run.state[1]), bits(&together.state[1]));
}

#[test]
fn updates_in_blocks_do_not_depend_on_the_number_of_threads() {
    let n = 3 * CHUNK + 4097;
    same_on_every_number_of_threads(|| {
        let mut run = Run::new(&param(n), &random(n, 3));
        (1..=2).for_each(|t| run.step(&random(n, 20 + t), t, 1.0));
        [run.p, run.state[0].clone(), run.state[1].clone()].concat().iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
    });
}
