//! Adafactor: sums over whole tensors in two rounds, and the update.

use super::optimizer::Step;
use super::{Lowering, THREADS};
use crate::command::{Args, Buffer};
use crate::kernels::{ADAFACTOR, Instance};
use phalanx_strategies::optimizer::Adafactor;
use phalanx_strategies::program::tiles::{Stack, Tile};
use phalanx_strategies::program::{DType, Update};

/// Columns of a block; rows of a block are a multiple of `ROWS`.
const COLUMNS: usize = 1024;
const ROWS: usize = 64;
/// Most blocks along the rows of a tile: as many sums are added for each column.
const ROW_BLOCKS_MAX: usize = 256;

/// How a launch divides a tile.
#[derive(Clone, Copy, Debug)]
struct Division {
    /// Rows of a block.
    rows: usize,
    /// Blocks along the columns and along the rows.
    blocks: [usize; 2],
}

impl Division {
    fn of(tile: &Tile) -> Division {
        let rows = tile.n_rows.div_ceil(ROW_BLOCKS_MAX).next_multiple_of(ROWS).max(ROWS);
        Division { rows, blocks: [tile.n_columns.div_ceil(COLUMNS), tile.n_rows.div_ceil(rows)] }
    }

    fn grid(self) -> [u32; 3] {
        [self.blocks[0] as u32, self.blocks[1] as u32, 1]
    }

    fn n_blocks(self) -> usize {
        self.blocks[0] * self.blocks[1]
    }
}

/// The averages of a parameter's rows and columns, and this step's sums for them; vectors have no rows.
struct Factors {
    rows: Option<(Buffer, Buffer)>,
    columns: (Buffer, Buffer),
}

impl Factors {
    fn new(state: &[Buffer], sums: &[Buffer]) -> Factors {
        match (state, sums) {
            ([rows, columns], [of_rows, of_columns, ..]) => {
                Factors { rows: Some((*rows, *of_rows)), columns: (*columns, *of_columns) }
            }
            ([columns], [of_columns, ..]) => Factors { rows: None, columns: (*columns, *of_columns) },
            _ => unreachable!("{} tensors of state, {} sums", state.len(), sums.len()),
        }
    }

    /// The kernels' `Averages` of a tile.
    fn of(&self, stack: &Stack, tile: &Tile) -> [u64; 6] {
        let at = |values: Buffer, first: usize, len: usize| values.elements(first, len).address;
        let row = stack.rows_of(tile.matrix).start + tile.row;
        let column = stack.columns_of(tile.matrix).start + tile.column;
        let of_rows = |values| at(values, row, tile.n_rows);
        let of_columns = |values| at(values, column, tile.n_columns);
        let (rows, row_sums) = self.rows.map_or((0, 0), |(a, b)| (of_rows(a), of_rows(b)));
        let (columns, column_sums) = (of_columns(self.columns.0), of_columns(self.columns.1));
        [rows, row_sums, columns, column_sums, stack.n_rows as u64, stack.n_columns as u64]
    }
}

impl Lowering {
    /// The next round of sums over this rank's elements.
    pub(super) fn adafactor_sums(&mut self, update: &Update, rule: &Adafactor) {
        let operands = update.operands(&self.reads);
        let step = Step::new(update, *operands.hyper, *operands.coefficient);
        let (state, sums) = (operands.state.to_vec(), operands.sums.to_vec());
        let out = self.writes.clone();
        out.iter().for_each(|out| self.zero(*out));
        match (&sums[..], &out[..]) {
            ([], [rows, columns, tensors]) => self.squares(update, step, Some(*rows), *columns, *tensors),
            ([], [columns, tensors]) => self.squares(update, step, None, *columns, *tensors),
            (_, [tensors]) => self.squares_of_updates(update, rule, &Factors::new(&state, &sums), step, *tensors),
            (sums, out) => unreachable!("{} sums after {}", out.len(), sums.len()),
        }
    }

    /// First round: the squares of the gradient, by row and column, and of the parameter.
    fn squares(&mut self, update: &Update, step: Step, rows: Option<Buffer>, columns: Buffer, tensors: Buffer) {
        let operands = update.operands(&self.reads);
        let g = *operands.grad;
        let p = operands.param.elements(update.first, g.len());
        let most = |of: fn(&Tile, Division) -> usize| {
            update.tiles.tiles.iter().map(|tile| of(tile, Division::of(tile))).max().unwrap_or(0)
        };
        let n_rows = rows.map_or(0, |_| most(|tile, division| division.blocks[0] * tile.n_rows));
        let row_parts = self.take(1, n_rows, DType::F64);
        let column_parts = self.take(1, most(|tile, division| division.blocks[1] * tile.n_columns), DType::F64);
        let tensor_parts = self.take(1, most(|_, division| division.n_blocks()), DType::F64);
        for tile in update.tiles.tiles.iter().filter(|tile| tile.counted && has_elements(tile)) {
            let (stack, division) = (&update.tiles.tensors[tile.tensor], Division::of(tile));
            let args = Args::new().words(&tile_of(tile, p, g)).int(division.rows).ptr(step.coefficient);
            let args = args.ptr_or_null(rows.map(|_| row_parts)).ptr(column_parts).ptr(tensor_parts);
            self.launch(kernel("square_parts"), division.grid(), THREADS, 0, args);
            if let Some(rows) = rows {
                let first = stack.rows_of(tile.matrix).start + tile.row;
                self.add_parts(row_parts, division.blocks[0], rows.elements(first, tile.n_rows));
            }
            let first = stack.columns_of(tile.matrix).start + tile.column;
            self.add_parts(column_parts, division.blocks[1], columns.elements(first, tile.n_columns));
            self.add_all_parts(tensor_parts, division.n_blocks(), tensors.elements(tile.tensor, 1));
        }
    }

    /// Second round: the squares of the updates before they are clipped.
    fn squares_of_updates(
        &mut self,
        update: &Update,
        rule: &Adafactor,
        factors: &Factors,
        step: Step,
        tensors: Buffer,
    ) {
        let g = *update.operands(&self.reads).grad;
        let most = update.tiles.tiles.iter().map(|tile| Division::of(tile).n_blocks()).max().unwrap_or(0);
        let parts = self.take(1, most, DType::F64);
        let inverse_mean = self.take(1, 1, DType::F32);
        for tile in update.tiles.tiles.iter().filter(|tile| tile.counted && has_elements(tile)) {
            let (stack, division) = (&update.tiles.tensors[tile.tensor], Division::of(tile));
            self.inverse_mean(rule, factors, stack, tile, step, inverse_mean);
            let args = Args::new().words(&tile_of(tile, g, g)).int(division.rows).words(&factors.of(stack, tile));
            let args = args.ptr(inverse_mean).ptr(step.scalars).ptr(step.coefficient).float(least(rule)).ptr(parts);
            self.launch(kernel("update_squares"), division.grid(), THREADS, 0, args);
            self.add_all_parts(parts, division.n_blocks(), tensors.elements(tile.tensor, 1));
        }
    }

    /// Updates this rank's elements `p`, then the averages of all rows and columns.
    pub(super) fn adafactor(&mut self, update: &Update, rule: &Adafactor, p: Buffer, step: Step) {
        let operands = update.operands(&self.reads);
        let (g, sums, state) = (*operands.grad, operands.sums.to_vec(), self.writes[1..].to_vec());
        let [.., of_tensors, of_updates] = sums[..] else { unreachable!("{} sums of an update", sums.len()) };
        let factors = Factors::new(&state, &sums);
        let inverse_mean = self.take(1, 1, DType::F32);
        for tile in update.tiles.tiles.iter().filter(|tile| has_elements(tile)) {
            let (stack, division) = (&update.tiles.tensors[tile.tensor], Division::of(tile));
            self.inverse_mean(rule, &factors, stack, tile, step, inverse_mean);
            let change = [rule.eps2, rule.d, rule.weight_decay, stack.n_elements() as f64].map(f64::to_bits);
            let args = Args::new().words(&tile_of(tile, p, g)).int(division.rows).words(&factors.of(stack, tile));
            let args = args.ptr(inverse_mean).ptr(step.lr).ptr(step.scalars).ptr(step.coefficient).float(least(rule));
            let args = args.words(&change).ptr(of_tensors.elements(tile.tensor, 1));
            let args = args.ptr(of_updates.elements(tile.tensor, 1));
            self.launch(kernel("update"), division.grid(), THREADS, 0, args);
        }
        for stack in &update.tiles.tensors {
            let (n_rows, n_columns) = (stack.n_matrices * stack.n_rows, stack.n_matrices * stack.n_columns);
            if let Some((averages, sums)) = factors.rows {
                self.move_averages(averages, sums, (stack.first_row, n_rows), stack.n_columns, step);
            }
            let (averages, sums) = factors.columns;
            self.move_averages(averages, sums, (stack.first_column, n_columns), stack.n_rows, step);
        }
    }

    /// Launches the mean over all rows of a tile's matrix; vectors have no rows.
    fn inverse_mean(
        &mut self,
        rule: &Adafactor,
        factors: &Factors,
        stack: &Stack,
        tile: &Tile,
        step: Step,
        out: Buffer,
    ) {
        let Some((averages, sums)) = factors.rows else { return };
        let all = stack.rows_of(tile.matrix);
        let args = Args::new().ptr(averages.elements(all.start, all.len())).ptr(sums.elements(all.start, all.len()));
        let args = args.long(stack.n_rows).long(stack.n_columns).ptr(step.scalars).double(rule.eps1).ptr(out);
        self.launch(kernel("inverse_mean"), [1, 1, 1], THREADS, 0, args);
    }

    /// Adds this step's squares to the averages of a run of rows or columns, each of `of` elements.
    fn move_averages(&mut self, averages: Buffer, sums: Buffer, run: (usize, usize), of: usize, step: Step) {
        let args = Args::new().ptr(averages.elements(run.0, run.1)).ptr(sums.elements(run.0, run.1));
        let args = args.long(run.1).long(of).ptr(step.scalars).ptr(step.coefficient);
        self.launch_strided(kernel("move_averages"), run.1, args);
    }

    fn add_parts(&mut self, parts: Buffer, n_parts: usize, to: Buffer) {
        let args = Args::new().ptr(parts).long(n_parts).long(to.len()).ptr(to);
        self.launch_strided(kernel("add_parts"), to.len(), args);
    }

    fn add_all_parts(&mut self, parts: Buffer, n: usize, to: Buffer) {
        self.launch(kernel("add_all_parts"), [1, 1, 1], THREADS, 0, Args::new().ptr(parts).long(n).ptr(to));
    }
}

fn kernel(name: &'static str) -> Instance {
    Instance::of(ADAFACTOR, name)
}

const fn has_elements(tile: &Tile) -> bool {
    tile.n_rows > 0 && tile.n_columns > 0
}

/// The least averaged square, as the CPU rounds it.
fn least(rule: &Adafactor) -> f32 {
    (rule.eps1 * rule.eps1) as f32
}

/// The kernels' `Tile`.
fn tile_of(tile: &Tile, p: Buffer, g: Buffer) -> [u64; 5] {
    let from = |values: Buffer| values.address + (tile.first * values.dtype.size_bytes()) as u64;
    [from(p), from(g), tile.n_rows as u64, tile.n_columns as u64, tile.stride as u64]
}
