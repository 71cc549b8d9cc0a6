//! The rows and columns of whole tensors to which the elements of a value belong.
//!
//! A parameter holds one or several tensors of a model file. Tensor parallelism cuts them, and a rank holds any run of the
//! elements. An optimizer with values for rows and columns ([`Extent`]) needs the row, the column and the tensor of each
//! element. The elements are listed as [`Tile`]s, parts of matrices. Each rank that has elements of a parameter keeps the
//! values for rows, columns and tensors of *whole* tensors: they are too few to be worth sharding.

use super::held_box::HeldBox;
use super::{Param, ParamPart};
use crate::boxes::TensorBox;
use crate::optimizer::Extent;
use std::ops::Range;

/// A tensor as a stack of matrices, and the indices of its values among those of the parameter's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Number of matrices.
    pub n_matrices: usize,
    /// Rows of a matrix.
    pub n_rows: usize,
    /// Columns of a matrix.
    pub n_columns: usize,
    /// Index of the value of its first row.
    pub first_row: usize,
    /// Index of the value of its first column.
    pub first_column: usize,
}

impl Stack {
    fn new(shape: &[usize], first_row: usize, first_column: usize) -> Stack {
        let (matrices, n_rows, n_columns) = match shape {
            [matrices @ .., rows, columns] => (matrices, *rows, *columns),
            [columns] => (&[][..], 1, *columns),
            [] => (&[][..], 1, 1),
        };
        Stack { n_matrices: matrices.iter().product(), n_rows, n_columns, first_row, first_column }
    }

    /// Number of elements.
    pub const fn n_elements(&self) -> usize {
        self.n_matrices * self.n_rows * self.n_columns
    }

    /// Indices of the values of a matrix's rows.
    pub const fn rows_of(&self, matrix: usize) -> Range<usize> {
        let first = self.first_row + matrix * self.n_rows;
        first..first + self.n_rows
    }

    /// Indices of the values of a matrix's columns.
    pub const fn columns_of(&self, matrix: usize) -> Range<usize> {
        let first = self.first_column + matrix * self.n_columns;
        first..first + self.n_columns
    }
}

/// Elements of a value that are a part of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Index of the tensor in the parameter.
    pub tensor: usize,
    /// Index of the matrix in the tensor.
    pub matrix: usize,
    /// First row of the matrix.
    pub row: usize,
    /// First column of the matrix.
    pub column: usize,
    /// Number of rows.
    pub n_rows: usize,
    /// Number of columns.
    pub n_columns: usize,
    /// First element in the value.
    pub first: usize,
    /// Elements of the value from one row to the next.
    pub stride: usize,
    /// Whether this rank counts it in sums over the ranks: one of the tensor-parallel ranks with the same elements does.
    pub counted: bool,
}

impl Tile {
    /// Elements of the value in a row of the tile.
    pub const fn row_at(&self, i: usize) -> Range<usize> {
        let first = self.first + i * self.stride;
        first..first + self.n_columns
    }
}

/// All elements of a value, and the tensors that they belong to. Empty for rules that work element by element.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tiles {
    /// The parameter's tensors, in order.
    pub tensors: Vec<Stack>,
    /// The elements; no element is in two tiles.
    pub tiles: Vec<Tile>,
}

impl Tiles {
    /// The tiles of a run of a parameter's elements, which a value holds from its start.
    pub fn of(param: &Param, run: &Range<usize>) -> Tiles {
        let names: Vec<&str> = whole_tensors(param).map(|part| part.name.as_str()).collect();
        let mut tensors: Vec<Stack> = Vec::with_capacity(names.len());
        let mut next = (0, 0);
        for part in whole_tensors(param) {
            let stack = Stack::new(&part.shape, next.0, next.1);
            next = (stack.rows_of(stack.n_matrices).start, stack.columns_of(stack.n_matrices).start);
            tensors.push(stack);
        }
        let shared = is_shared(param);
        let mut tiles = Vec::new();
        for held in param.boxes(run) {
            let tensor =
                names.iter().position(|name| *name == held.name).expect("a box is of a tensor of its parameter");
            tiles_of(&held, tensor, !shared || held.owned, &mut tiles);
        }
        Tiles { tensors, tiles }
    }

    /// Number of values that state or sums of this extent have.
    pub fn n_values(&self, extent: Extent) -> usize {
        match extent {
            Extent::Elements => self.tiles.iter().map(|tile| tile.n_rows * tile.n_columns).sum(),
            Extent::Blocks => 0,
            Extent::Rows => self.tensors.iter().map(|t| t.n_matrices * t.n_rows).sum(),
            Extent::Columns => self.tensors.iter().map(|t| t.n_matrices * t.n_columns).sum(),
            Extent::Tensor => self.tensors.len(),
        }
    }
}

/// The tensors of a parameter, each once: a rank that owns only some ranges of a tensor has several parts of it.
pub fn whole_tensors(param: &Param) -> impl Iterator<Item = &ParamPart> {
    let is_first = |(i, part): &(usize, &ParamPart)| param.parts[..*i].iter().all(|before| before.name != part.name);
    param.parts.iter().enumerate().filter(is_first).map(|(_, part)| part)
}

/// Whether tensor-parallel ranks have different elements of this parameter. All ranks give the same answer: heads, columns
/// and tokens are cut evenly, and copies are on all ranks or on equal runs of ranks.
pub fn is_shared(param: &Param) -> bool {
    let n_here: usize = param.parts.iter().map(ParamPart::n_elements).sum();
    let n_whole: usize = whole_tensors(param).map(|part| part.shape.iter().product::<usize>()).sum();
    n_here != n_whole
}

/// Shape of the values for the rows, or columns, of a tensor.
///
/// # Panics
/// For other extents: a rank does not have all elements, and no rule has state for whole tensors.
pub fn shape_of_values(shape: &[usize], extent: Extent) -> Vec<usize> {
    let n_dims = shape.len();
    let mut of = shape.to_vec();
    match extent {
        Extent::Rows => of.truncate(n_dims.saturating_sub(1)),
        Extent::Columns if n_dims >= 2 => drop(of.remove(n_dims - 2)),
        Extent::Columns => {}
        Extent::Elements | Extent::Tensor | Extent::Blocks => {
            unreachable!("{extent:?} are not the rows or columns of a tensor")
        }
    }
    of
}

fn tiles_of(held: &HeldBox, tensor: usize, counted: bool, out: &mut Vec<Tile>) {
    let (region, stored, n_dims) = (&held.region, &held.stored, held.shape.len());
    let last = |of: &[usize], from_end: usize, none: usize| n_dims.checked_sub(from_end).map_or(none, |dim| of[dim]);
    let of_rows = |of: &[usize], none: usize| last(of, 2, none);
    let of_columns = |of: &[usize], none: usize| last(of, 1, none);
    let n_outer = n_dims.saturating_sub(2);
    let outer = TensorBox { offset: region.offset[..n_outer].to_vec(), extent: region.extent[..n_outer].to_vec() };
    let all = TensorBox::whole(&held.shape[..n_outer]);
    let mut position = region.offset.clone();
    for i in 0..outer.n_elements() {
        let mut rest = i;
        for dim in (0..n_outer).rev() {
            position[dim] = outer.offset[dim] + rest % outer.extent[dim];
            rest /= outer.extent[dim];
        }
        out.push(Tile {
            tensor,
            matrix: all.index_of(&position[..n_outer]),
            row: of_rows(&region.offset, 0),
            column: of_columns(&region.offset, 0),
            n_rows: of_rows(&region.extent, 1),
            n_columns: of_columns(&region.extent, 1),
            first: held.start + stored.index_of(&position),
            stride: of_columns(&stored.extent, 1),
            counted,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Init, ValueId};
    use proptest::prelude::*;

    fn param(shapes: &[Vec<usize>]) -> Param {
        let parts = shapes.iter().enumerate().map(|(i, shape)| ParamPart::whole(format!("w{i}"), shape)).collect();
        let mut stacked = shapes[0].clone();
        if let Some(rows) = stacked.first_mut() {
            *rows = shapes.iter().map(|shape| shape[0]).sum();
        }
        Param::whole(ValueId(0), &stacked, parts, Init::Zeros)
    }

    /// Tensor, matrix, row and column of each element of a run, from its tiles.
    fn elements(tiles: &Tiles, len: usize) -> Vec<Option<[usize; 4]>> {
        let mut found = vec![None; len];
        for tile in &tiles.tiles {
            for i in 0..tile.n_rows {
                for (j, at) in tile.row_at(i).enumerate() {
                    let before = found[at].replace([tile.tensor, tile.matrix, tile.row + i, tile.column + j]);
                    assert_eq!(before, None, "an element is in two tiles");
                }
            }
        }
        found
    }

    proptest! {
        #[test]
        fn tiles_of_a_run_give_the_row_and_column_of_each_element(
            rows in prop::collection::vec(1usize..5, 1..3), inner in prop::collection::vec(1usize..5, 0..3),
            run in (0usize..200, 0usize..200),
        ) {
            let shapes: Vec<Vec<usize>> = rows.iter().map(|rows| [&[*rows][..], &inner].concat()).collect();
            let param = param(&shapes);
            let n = param.updated.end;
            let run = run.0.min(run.1).min(n)..run.0.max(run.1).min(n);

            let tiles = Tiles::of(&param, &run);

            let mut expected = Vec::new();
            for (tensor, shape) in shapes.iter().enumerate() {
                let [n_rows, n_columns] = match shape[..] {
                    [columns] => [1, columns],
                    [.., rows, columns] => [rows, columns],
                    [] => [1, 1],
                };
                expected.extend((0..shape.iter().product()).map(|i: usize| {
                    Some([tensor, i / (n_rows * n_columns), i / n_columns % n_rows, i % n_columns])
                }));
            }
            prop_assert_eq!(elements(&tiles, run.len()), &expected[run]);
            for (shape, stack) in shapes.iter().zip(&tiles.tensors) {
                prop_assert_eq!(stack.n_elements(), shape.iter().product::<usize>());
            }
        }
    }

    #[test]
    fn columns_of_a_cut_tensor_are_numbered_as_in_the_whole_tensor() {
        let mut param = param(&[vec![3, 8]]);
        param.cut(1, &[1..3, 5..6]);

        let tiles = Tiles::of(&param, &(0..9));

        let columns: Vec<usize> = elements(&tiles, 9).into_iter().map(|at| at.unwrap()[3]).collect();
        assert_eq!(columns, [1, 2, 5, 1, 2, 5, 1, 2, 5]);
        assert_eq!([Extent::Rows, Extent::Columns, Extent::Tensor].map(|extent| tiles.n_values(extent)), [3, 8, 1]);
        assert!(is_shared(&param));
    }

    #[test]
    fn copies_count_once_if_ranks_split_other_tensors_and_on_each_rank_otherwise() {
        let mut whole = param(&[vec![4, 2], vec![2, 2]]);
        whole.parts[1].owned = false;
        let mut shared = whole.clone();
        shared.cut(0, &[0..2, 4..6]);

        let counted = |param: &Param| -> Vec<bool> {
            Tiles::of(param, &param.updated).tiles.iter().map(|tile| tile.counted).collect()
        };

        assert_eq!(counted(&whole), [true, true]);
        assert_eq!(counted(&shared), [true, false]);
    }
}
