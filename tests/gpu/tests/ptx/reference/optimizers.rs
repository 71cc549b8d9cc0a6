//! Updates of parameters, and the sums that they need; formulas of `phalanx_strategies::optimizer`.

use super::{Matrix, squares};
use phalanx_device::packed::DynamicMap;
use phalanx_strategies::optimizer::{
    Adafactor, AdamW, Lion, OptimizerSpec, STATE_BLOCK as BLOCK, STATE_WORDS as WORDS, Sgd,
};
use phalanx_strategies::program::tiles::Tile;
use phalanx_strategies::program::{Hyper, Update};

/// The operands of an update.
struct Step<'a> {
    update: &'a Update,
    state: Vec<Vec<f64>>,
    sums: Vec<&'a [f64]>,
    /// The elements that this rank updates.
    p: &'a [f64],
    /// The scaled gradient.
    g: Vec<f64>,
    lr: f64,
    scalars: [f64; 2],
}

impl<'a> Step<'a> {
    fn new(update: &'a Update, x: &'a [Matrix]) -> Step<'a> {
        let operands = update.operands(x);
        let (coefficient, hyper) = (operands.coefficient.at[0], &operands.hyper.at);
        Step {
            update,
            state: operands.state.iter().map(|state| state.at.clone()).collect(),
            sums: operands.sums.iter().map(|sum| &sum.at[..]).collect(),
            p: &operands.param.at[update.first..][..operands.grad.at.len()],
            g: operands.grad.map(|g| coefficient * g),
            lr: hyper[update.rate],
            scalars: [hyper[Hyper::RULE], hyper[Hyper::RULE + 1]],
        }
    }
}

/// The parameter and the state after the update.
pub fn update(update: &Update, x: &[Matrix]) -> Vec<Vec<f64>> {
    let mut step = Step::new(update, x);
    let mut param = x[0].at.clone();
    // After an overflow nothing changes.
    if update.operands(x).coefficient.at[0].is_finite() {
        let p = &mut param[update.first..][..step.g.len()];
        match &update.rule {
            OptimizerSpec::Adafactor(rule) => adafactor(rule, &mut step, p),
            OptimizerSpec::AdamW8bit(rule) => in_blocks(OptimizerSpec::AdamW(rule.0), &mut step, p),
            rule => p.iter_mut().enumerate().for_each(|(i, p)| by_element(rule, &mut step, i, p)),
        }
    }
    [vec![param], step.state].concat()
}

fn by_element(rule: &OptimizerSpec, step: &mut Step<'_>, i: usize, p: &mut f64) {
    let (lr, [bias1, bias2], g) = (step.lr, step.scalars, step.g[i]);
    match rule {
        OptimizerSpec::AdamW(AdamW { beta1, beta2, eps, weight_decay }) => {
            let [m, v] = &mut step.state[..] else { panic!("two tensors of state") };
            m[i] = beta1 * m[i] + (1.0 - beta1) * g;
            v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
            *p = *p * (1.0 - lr * weight_decay) - lr * (m[i] / bias1) / ((v[i] / bias2).sqrt() + eps);
        }
        OptimizerSpec::Sgd(Sgd { momentum, weight_decay }) => {
            let buffer = &mut step.state[0][i];
            *buffer = momentum * *buffer + g + weight_decay * *p;
            *p -= lr * *buffer;
        }
        OptimizerSpec::Lion(Lion { beta1, beta2, weight_decay }) => {
            let m = &mut step.state[0][i];
            let direction = beta1 * *m + (1.0 - beta1) * g;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *p = *p * (1.0 - lr * weight_decay) - lr * sign;
            *m = beta2 * *m + (1.0 - beta2) * g;
        }
        OptimizerSpec::AdamW8bit(_) => unreachable!("works on blocks"),
        OptimizerSpec::Adafactor(_) => unreachable!("works on whole tensors"),
    }
}

/// Updates by the rule of f32 state, whose state is read from words and written to words.
fn in_blocks(rule: OptimizerSpec, step: &mut Step<'_>, p: &mut [f64]) {
    let maps = [DynamicMap::signed(), DynamicMap::unsigned()];
    let words = step.state.clone();
    let number = |word: f64| f32::from_bits((word as i32).cast_unsigned());
    let word = |number: f32| f64::from(number.to_bits().cast_signed());
    // First element and word of each piece, its elements, and whether it is a block.
    let (mut pieces, mut first, mut first_word) = (Vec::new(), 0, 0);
    for run in &step.update.blocks.runs {
        for at in (0..run.n_elements).step_by(BLOCK) {
            let n = BLOCK.min(run.n_elements - at);
            pieces.push((first + at, first_word + if run.is_coded { at / BLOCK * WORDS } else { at }, n, run.is_coded));
        }
        (first, first_word) = (first + run.n_elements, first_word + run.n_words());
    }
    for (i, map) in maps.into_iter().enumerate() {
        let numbers = pieces.iter().flat_map(|(_, at, n, is_coded)| {
            let words = &words[i][*at..];
            let coded = |j: usize| {
                let code = (words[1 + j / 4] as i32).to_le_bytes()[j % 4];
                f64::from(map.numbers[usize::from(code)] * number(words[0]))
            };
            let plain = |j: usize| f64::from(number(words[j]));
            (0..*n).map(|j| if *is_coded { coded(j) } else { plain(j) }).collect::<Vec<f64>>()
        });
        step.state[i] = numbers.collect();
    }
    p.iter_mut().enumerate().for_each(|(j, p)| by_element(&rule, step, j, p));
    for (i, map) in maps.into_iter().enumerate() {
        let mut out = words[i].clone();
        for (first, at, n, is_coded) in &pieces {
            let own: Vec<f32> = step.state[i][*first..first + n].iter().map(|x| *x as f32).collect();
            if !is_coded {
                out[*at..at + n].iter_mut().zip(own).for_each(|(out, x)| *out = word(x));
                continue;
            }
            let scale = own.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            out[*at] = word(scale);
            for (j, four) in own.chunks(4).enumerate() {
                // Bytes of the last word that no element has are zero.
                let mut codes = [0; 4];
                codes.iter_mut().zip(four).for_each(|(code, x)| *code = map.code(x * (1.0 / scale)));
                out[at + 1 + j] = f64::from(i32::from_le_bytes(codes));
            }
        }
        step.state[i] = out;
    }
}

/// The averages of the rows and of the columns of all tensors, moved by this step's squares; vectors have no rows.
fn averages(step: &Step<'_>) -> (Option<Vec<f64>>, Vec<f64>) {
    let weight = step.scalars[0];
    let moved = |i: usize, of: &dyn Fn(usize) -> f64| -> Vec<f64> {
        let pairs = step.state[i].iter().zip(step.sums[i]).enumerate();
        pairs.map(|(at, (average, sum))| (1.0 - weight) * average + weight * sum / of(at)).collect()
    };
    let stacks = &step.update.tiles.tensors;
    let columns_of = |at: usize| stacks.iter().rev().find(|s| at >= s.first_row).map_or(1.0, |s| s.n_columns as f64);
    let rows_of = |at: usize| stacks.iter().rev().find(|s| at >= s.first_column).map_or(1.0, |s| s.n_rows as f64);
    match step.state.len() {
        1 => (None, moved(0, &rows_of)),
        _ => (Some(moved(0, &columns_of)), moved(1, &rows_of)),
    }
}

/// The elements of a tile's rows, with their update before it is clipped.
fn updates(rule: &Adafactor, step: &Step<'_>, tile: &Tile) -> Vec<(usize, f64)> {
    let stack = &step.update.tiles.tensors[tile.tensor];
    let (rows, columns) = averages(step);
    let (first_row, first_column) = (stack.rows_of(tile.matrix).start, stack.columns_of(tile.matrix).start);
    let mean =
        rows.as_ref().map_or(1.0, |rows| rows[stack.rows_of(tile.matrix)].iter().sum::<f64>() / stack.n_rows as f64);
    let mut updates = Vec::new();
    for (i, j) in (0..tile.n_rows).flat_map(|i| (0..tile.n_columns).map(move |j| (i, j))) {
        let of_row = rows.as_ref().map_or(1.0, |rows| rows[first_row + tile.row + i]);
        let average = of_row * columns[first_column + tile.column + j] / mean.max(rule.eps1);
        let at = tile.row_at(i).start + j;
        updates.push((at, step.g[at] / average.max(rule.eps1 * rule.eps1).sqrt()));
    }
    updates
}

fn adafactor(rule: &Adafactor, step: &mut Step<'_>, p: &mut [f64]) {
    let [.., of_tensors, of_updates] = step.sums[..] else { panic!("sums of the parameter and of the update") };
    for tile in &step.update.tiles.tiles {
        let rms =
            |sums: &[f64]| (sums[tile.tensor] / step.update.tiles.tensors[tile.tensor].n_elements() as f64).sqrt();
        let length = rms(of_tensors).max(rule.eps2) * step.lr.min(step.scalars[1]);
        let clipped = (rms(of_updates) / rule.d).max(1.0);
        for (at, u) in updates(rule, step, tile) {
            p[at] = p[at] * (1.0 - step.lr * rule.weight_decay) - length * u / clipped;
        }
    }
    let (rows, columns) = averages(step);
    step.state = rows.into_iter().chain([columns]).collect();
}

/// The next round of sums over the elements that this rank counts.
pub fn sums(update: &Update, x: &[Matrix]) -> Vec<Vec<f64>> {
    let OptimizerSpec::Adafactor(rule) = &update.rule else { panic!("{} needs no sums", update.rule.name()) };
    let step = Step::new(update, x);
    let round = update.rule.sums(update.n_dims)[update.n_rounds];
    let mut out: Vec<Vec<f64>> = round.iter().map(|extent| vec![0.0; update.tiles.n_values(*extent)]).collect();
    for tile in update.tiles.tiles.iter().filter(|tile| tile.counted) {
        if let [tensors] = &mut out[..] {
            tensors[tile.tensor] += updates(rule, &step, tile).iter().map(|(_, u)| u * u).sum::<f64>();
            continue;
        }
        let stack = &update.tiles.tensors[tile.tensor];
        let (first_row, first_column) = (stack.rows_of(tile.matrix).start, stack.columns_of(tile.matrix).start);
        for i in 0..tile.n_rows {
            let g = &step.g[tile.row_at(i)];
            let [rows @ .., columns, tensors] = &mut out[..] else { panic!("sums of columns and tensors") };
            rows.iter_mut().for_each(|rows| rows[first_row + tile.row + i] += squares(g));
            columns[first_column + tile.column..].iter_mut().zip(g).for_each(|(sum, g)| *sum += g * g);
            tensors[tile.tensor] += squares(&step.p[tile.row_at(i)]);
        }
    }
    out
}
