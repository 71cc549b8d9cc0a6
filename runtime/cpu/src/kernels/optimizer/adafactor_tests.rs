use super::super::super::testing::{bits, close, random, same_on_every_number_of_threads, wide};
use super::super::{self as optimizer, Step, Whole};
use phalanx_strategies::optimizer::{Adafactor, OptimizerSpec};
use phalanx_strategies::program::Blocks;
use phalanx_strategies::program::tiles::Tiles;
use phalanx_strategies::program::{Init, Param, ParamPart, ValueId};
use std::ops::Range;

const RULE: Adafactor = Adafactor { beta2_decay: -0.8, eps1: 1e-4, eps2: 1e-3, d: 1.0, weight_decay: 0.1 };

fn param(shapes: &[&[usize]]) -> Param {
    let parts = shapes.iter().enumerate().map(|(i, shape)| ParamPart::whole(format!("w{i}"), shape)).collect();
    let mut stacked = shapes[0].to_vec();
    stacked[0] = shapes.iter().map(|shape| shape[0]).sum();
    Param::whole(ValueId(0), &stacked, parts, Init::Zeros)
}

/// One rank's part of a parameter and of its gradients, and the state.
struct Rank {
    run: Range<usize>,
    tiles: Tiles,
    p: Vec<f32>,
    state: Vec<Vec<f32>>,
}

impl Rank {
    fn new(param: &Param, p: &[f32], run: Range<usize>) -> Rank {
        let tiles = Tiles::of(param, &run);
        let spec = OptimizerSpec::Adafactor(RULE);
        let of = spec.state(param.shape.len()).iter().map(|tensor| vec![0.0; tiles.n_values(tensor.extent)]);
        Rank { p: p[run.clone()].to_vec(), state: of.collect(), run, tiles }
    }
}

/// A step of ranks that share a parameter, as in the compiled program.
fn step(ranks: &mut [Rank], n_dims: usize, g: &[f32], step: &Step) {
    let spec = OptimizerSpec::Adafactor(RULE);
    let mut sums: Vec<Vec<f32>> = Vec::new();
    for round in spec.sums(n_dims) {
        let mut totals: Vec<Vec<f32>> = round.iter().map(|e| vec![0.0; ranks[0].tiles.n_values(*e)]).collect();
        for rank in ranks.iter() {
            let views: Vec<&[f32]> = sums.iter().map(Vec::as_slice).collect();
            let state: Vec<&[f32]> = rank.state.iter().map(Vec::as_slice).collect();
            let mut out: Vec<Vec<f32>> = totals.iter().map(|total| vec![f32::NAN; total.len()]).collect();
            let mut outs: Vec<&mut [f32]> = out.iter_mut().map(Vec::as_mut_slice).collect();
            let whole = Whole { tiles: &rank.tiles, blocks: &Blocks::default(), sums: &views };
            optimizer::sums(&spec, &rank.p, &state, &g[rank.run.clone()], &whole, step, &mut outs);
            for (total, out) in totals.iter_mut().zip(out) {
                total.iter_mut().zip(out).for_each(|(total, x)| *total += x);
            }
        }
        sums.extend(totals);
    }
    let views: Vec<&[f32]> = sums.iter().map(Vec::as_slice).collect();
    for rank in ranks {
        let mut state: Vec<&mut [f32]> = rank.state.iter_mut().map(Vec::as_mut_slice).collect();
        let whole = Whole { tiles: &rank.tiles, blocks: &Blocks::default(), sums: &views };
        optimizer::update(&spec, &mut rank.p, &mut state, &g[rank.run.clone()], &whole, step);
    }
}

fn step_of(t: u64) -> Step {
    Step { lr: 0.05, scalars: OptimizerSpec::Adafactor(RULE).scalars(t), grad_scale: 0.5 }
}

/// `torch.optim.Adafactor` of one tensor in f64, matrix by matrix.
struct Reference {
    shape: [usize; 3],
    p: Vec<f64>,
    rows: Vec<f64>,
    columns: Vec<f64>,
}

impl Reference {
    fn new(shape: &[usize], p: &[f32]) -> Reference {
        let shape = match *shape {
            [n, r, c] => [n, r, c],
            [r, c] => [1, r, c],
            [c] => [1, 0, c],
            _ => unreachable!(),
        };
        let [n, r, c] = shape;
        Reference { shape, p: wide(p), rows: vec![0.0; n * r], columns: vec![0.0; n * c] }
    }

    fn step(&mut self, g: &[f32], t: u64) {
        let [n, r, c] = self.shape;
        let g: Vec<f64> = wide(g).iter().map(|g| 0.5 * g).collect();
        let w = (t as f64).powf(-0.8);
        let mut v: Vec<f64> = Vec::new();
        for matrix in 0..n {
            let (n_rows, g) = (r.max(1), &g[matrix * r.max(1) * c..(matrix + 1) * r.max(1) * c]);
            let rows = &mut self.rows[matrix * r..(matrix + 1) * r];
            let columns = &mut self.columns[matrix * c..(matrix + 1) * c];
            for (i, row) in rows.iter_mut().enumerate() {
                let mean = (0..c).map(|j| g[i * c + j].powi(2)).sum::<f64>() / c as f64;
                *row = (1.0 - w) * *row + w * mean;
            }
            for (j, column) in columns.iter_mut().enumerate() {
                let mean = (0..n_rows).map(|i| g[i * c + j].powi(2)).sum::<f64>() / n_rows as f64;
                *column = (1.0 - w) * *column + w * mean;
            }
            let mean = (rows.iter().sum::<f64>() / n_rows as f64).max(RULE.eps1);
            let factor = |i: usize| if r == 0 { 1.0 } else { rows[i] / mean };
            v.extend((0..n_rows).flat_map(|i| columns.iter().map(move |column| factor(i) * column)));
        }
        let u: Vec<f64> = g.iter().zip(&v).map(|(g, v)| g / v.max(RULE.eps1 * RULE.eps1).sqrt()).collect();
        let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let alpha = rms(&self.p).max(RULE.eps2) * 0.05f64.min(1.0 / (t as f64).sqrt());
        let denominator = (rms(&u) / RULE.d).max(1.0);
        let after = self.p.iter().zip(&u).map(|(p, u)| p * (1.0 - 0.05 * 0.1) - alpha / denominator * u);
        self.p = after.collect();
    }
}

/// Gradients of very different magnitudes, some of them zero.
fn gradient(n: usize, seed: u64) -> Vec<f32> {
    let sizes = |i: usize| if i.is_multiple_of(29) { 0.0 } else { (1 + i % 7) as f32 };
    random(n, seed).iter().enumerate().map(|(i, g)| g * sizes(i)).collect()
}

#[test]
fn adafactor_follows_its_definition_for_every_division_of_the_elements_among_ranks() {
    let cases: [&[&[usize]]; 4] = [&[&[40, 70], &[9, 70]], &[&[130], &[50]], &[&[3, 5, 18]], &[&[1, 33]]];
    for shapes in cases {
        for cuts in [&[][..], &[1][..], &[7, 25, 80][..]] {
            let param = param(shapes);
            let n = param.updated.end;
            let start = random(n, 1);
            let bounds: Vec<usize> = [0].iter().chain(cuts).copied().map(|at| at.min(n)).chain([n]).collect();
            let mut ranks: Vec<Rank> = bounds.windows(2).map(|b| Rank::new(&param, &start, b[0]..b[1])).collect();
            let mut first = 0;
            let mut references: Vec<(usize, Reference)> = Vec::new();
            for shape in shapes {
                let end = first + shape.iter().product::<usize>();
                references.push((first, Reference::new(shape, &start[first..end])));
                first = end;
            }

            for t in 1..=4 {
                let g = gradient(n, 10 + t);
                step(&mut ranks, param.shape.len(), &g, &step_of(t));
                for (first, reference) in &mut references {
                    let len = reference.p.len();
                    reference.step(&g[*first..*first + len], t);
                }
            }

            let found: Vec<f32> = ranks.iter().flat_map(|rank| rank.p.clone()).collect();
            let expected: Vec<f64> = references.iter().flat_map(|(_, reference)| reference.p.clone()).collect();
            close(&found, &expected, 2e-6);
            let columns: Vec<f64> = references.iter().flat_map(|(_, reference)| reference.columns.clone()).collect();
            let rows: Vec<f64> = references.iter().flat_map(|(_, reference)| reference.rows.clone()).collect();
            for rank in &ranks {
                close(rank.state.last().unwrap(), &columns, 2e-6);
                if rank.state.len() == 2 {
                    close(&rank.state[0], &rows, 2e-6);
                }
            }
        }
    }
}

#[test]
fn adafactor_has_the_same_bits_on_every_number_of_threads() {
    let param = param(&[&[300, 170], &[33, 170]]);
    let n = param.updated.end;
    let (start, g) = (random(n, 3), gradient(n, 4));

    same_on_every_number_of_threads(|| {
        let mut ranks = [Rank::new(&param, &start, 0..n)];
        step(&mut ranks, 2, &g, &step_of(3));
        (bits(&ranks[0].p), bits(&ranks[0].state[0]), bits(&ranks[0].state[1]))
    });
}
