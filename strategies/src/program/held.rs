//! The boxes of a model file's tensors that a rank holds, and the locations of their elements.
//!
//! Every rank can compute this for every other rank, so saving, loading and resharding need no messages.

use super::held_box::HeldBox;
use super::tiles::{Tiles, shape_of_values, whole_tensors};
use super::{Op, Param, ParamPart, Program, ValueId};
use crate::boxes::TensorBox;
use crate::mesh::{Axis, Group, MeshRank};
use crate::optimizer::{Extent, OptimizerSpec, StateTensor};
use std::ops::Range;

/// Ranks that share the elements of a parameter.
const SHARING: Group = Group::over(&[Axis::DpShard, Axis::Cp, Axis::Tp]);

impl Param {
    /// The boxes of the model file's tensors that make up `elements` of this parameter, which a value holds from its start.
    pub fn boxes(&self, elements: &Range<usize>) -> Vec<HeldBox> {
        boxes_of(&self.parts, elements)
    }
}

fn boxes_of(parts: &[ParamPart], elements: &Range<usize>) -> Vec<HeldBox> {
    let mut first = 0;
    let mut boxes = Vec::new();
    for part in parts {
        let here = first..first + part.n_elements();
        first = here.end;
        let run = elements.start.max(here.start)..elements.end.min(here.end);
        if run.start < run.end {
            let in_part = run.start - here.start..run.end - here.start;
            part_boxes(part, &in_part, run.start - elements.start, &mut boxes);
        }
    }
    boxes
}

/// A rank's part of the optimizer's state for a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct StateBoxes<'a> {
    /// The parameter.
    pub param: &'a Param,
    /// The value that holds it.
    pub value: ValueId,
    /// Boxes of tensors named `exp_avg.<weight>`.
    pub boxes: Vec<HeldBox>,
}

impl Program {
    /// The optimizer's state on this rank, in the order of the updates.
    pub fn optimizer_state(&self) -> Vec<StateBoxes<'_>> {
        let mut found = Vec::new();
        for instr in &self.instrs {
            let Op::Update(update) = &instr.op else { continue };
            let of = update.operands(&instr.reads);
            let Some(param) = self.param_of(*of.param) else { continue };
            for (tensor, value) in update.rule.state(update.n_dims).iter().zip(of.state) {
                let boxes = param.state_boxes(tensor, &self.mesh_rank);
                found.push(StateBoxes { param, value: *value, boxes });
            }
        }
        found
    }
}

impl Param {
    /// Number of values of the optimizer's state for this parameter on a rank.
    pub fn n_state(&self, optimizer: &OptimizerSpec) -> usize {
        let n_values = |tensor: &StateTensor| match tensor.extent {
            Extent::Elements => self.updated.len(),
            // A rank that would have a part of a block compiles no step.
            Extent::Blocks => self.blocks().map_or(0, |blocks| blocks.n_words()),
            extent => Tiles::of(self, &self.updated).n_values(extent),
        };
        optimizer.state(self.shape.len()).iter().map(n_values).sum()
    }

    /// Boxes of a tensor of the optimizer's state. Each rank has all values for rows and columns; one rank saves them.
    fn state_boxes(&self, tensor: &StateTensor, mesh_rank: &MeshRank) -> Vec<HeldBox> {
        let named = |held: HeldBox| HeldBox { name: format!("{}.{}", tensor.name, held.name), ..held };
        if tensor.extent == Extent::Elements {
            return self.boxes(&self.updated).into_iter().map(named).collect();
        }
        if tensor.extent == Extent::Blocks {
            let (stored, _) = self.stored_state().expect("the optimizer's pass refuses parts of blocks");
            return boxes_of(&stored.parts, &stored.words).into_iter().map(named).collect();
        }
        let owned = mesh_rank.position(SHARING) == 0;
        let mut start = 0;
        let whole = |part: &ParamPart| {
            let shape = shape_of_values(&part.shape, tensor.extent);
            let region = TensorBox::whole(&shape);
            let first = start;
            start += region.n_elements();
            named(HeldBox { name: part.name.clone(), shape, stored: region.clone(), region, start: first, owned })
        };
        whole_tensors(self).map(whole).collect()
    }
}

fn part_boxes(part: &ParamPart, run: &Range<usize>, start: usize, out: &mut Vec<HeldBox>) {
    let mut start = start;
    for local in TensorBox::whole(&part.local_shape()).boxes_of_run(run.clone()) {
        let n_elements = local.n_elements();
        restrict(part, &local, start, out);
        start += n_elements;
    }
}

/// Converts a box of a rank's part of a tensor to boxes of the tensor: one for each range of the cut dim that it meets.
fn restrict(part: &ParamPart, local: &TensorBox, start: usize, out: &mut Vec<HeldBox>) {
    let held = |region, stored| {
        let (name, shape, owned) = (part.name.clone(), part.shape.clone(), part.owned);
        HeldBox { name, shape, region, stored, start, owned }
    };
    if part.shape.is_empty() {
        return out.push(held(local.clone(), local.clone()));
    }
    let mut first = 0;
    for range in &part.ranges {
        let mut here = local.clone();
        (here.offset[part.dim], here.extent[part.dim]) = (first, range.len());
        if let Some(mut region) = local.intersection(&here) {
            // From positions in the rank's part to positions in the tensor.
            let shift = range.start.checked_sub(first).expect("ranges of a tensor ascend");
            let mut stored = local.clone();
            region.offset[part.dim] += shift;
            stored.offset[part.dim] += shift;
            out.push(held(region, stored));
        }
        first += range.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Init, ValueId};
    use proptest::prelude::*;

    /// A parameter of this shape, cut to these ranges of one dim.
    fn cut(shape: [usize; 2], dim: usize, ranges: &[Range<usize>]) -> Param {
        let mut param = Param::whole(ValueId(0), &shape, vec![ParamPart::whole("w", &shape)], Init::Zeros);
        param.cut(dim, ranges);
        param
    }

    #[test]
    fn shard_of_three_column_ranges_has_one_box_per_range_for_each_box_of_its_run() {
        let param = cut([4, 12], 1, &[0..2, 4..6, 8..10]);

        let boxes = param.boxes(&(3..18));

        let regions: Vec<(&[usize], &[usize])> =
            boxes.iter().map(|held| (&held.region.offset[..], &held.region.extent[..])).collect();
        let end_of_row: [(&[usize], &[usize]); 2] = [(&[0, 5], &[1, 1]), (&[0, 8], &[1, 2])];
        let rows: [(&[usize], &[usize]); 3] = [(&[1, 0], &[2, 2]), (&[1, 4], &[2, 2]), (&[1, 8], &[2, 2])];
        assert_eq!(regions, [&end_of_row[..], &rows].concat());
        assert_eq!([boxes[0].span(), boxes[2].span()], [0..1, 3..11]);
        assert_eq!(boxes[3].runs().collect::<Vec<_>>(), [(16, 5..7), (28, 11..13)]);
    }

    proptest! {
        #[test]
        fn boxes_of_all_shards_of_all_cuts_cover_every_element_once(
            rows in 2usize..7, columns in 2usize..9, dim in 0usize..2, cuts in 1usize..3, shards in 1usize..4,
        ) {
            let shape = [rows, columns];
            let mut seen = vec![0; rows * columns];
            for number in 0..cuts {
                // Two ranges each, as of a packed tensor.
                let half = shape[dim] / 2;
                let in_half = |first: usize, n: usize| first + n * number / cuts..first + n * (number + 1) / cuts;
                let ranges = [in_half(0, half), in_half(half, shape[dim] - half)];
                let param = cut(shape, dim, &ranges);
                let local: Vec<usize> = local_elements(&shape, dim, &ranges);
                for shard in 0..shards {
                    let held = local.len() * shard / shards..local.len() * (shard + 1) / shards;
                    for held_box in param.boxes(&held) {
                        let mut places = Vec::new();
                        for (index, place) in held_box.runs() {
                            for (i, at) in place.enumerate() {
                                prop_assert_eq!(local[held.start + at], index + i);
                                seen[index + i] += 1;
                                places.push(at);
                            }
                        }
                        prop_assert_eq!(places.len(), held_box.n_elements());
                        prop_assert_eq!(held_box.span(), places[0]..places[places.len() - 1] + 1);
                    }
                }
            }

            prop_assert!(seen.iter().all(|n| *n == 1), "{:?}", seen);
        }

        #[test]
        fn runs_of_a_box_part_are_the_positions_of_its_elements(
            rows in 2usize..7, columns in 3usize..9, dim in 0usize..2, held in (0usize..40, 0usize..40),
            part in (0usize..7, 0usize..9, 1usize..7, 1usize..9),
        ) {
            let shape = [rows, columns];
            let ranges = [0..1, 2..shape[dim]];
            let n_elements = local_elements(&shape, dim, &ranges).len();
            let held = held.0.min(held.1).min(n_elements)..held.0.max(held.1).min(n_elements);
            let part = TensorBox { offset: vec![part.0, part.1], extent: vec![part.2, part.3] };

            for held_box in cut(shape, dim, &ranges).boxes(&held) {
                let Some(part) = held_box.region.intersection(&part) else { continue };

                let places: Vec<usize> = held_box.runs_of(&part).flatten().collect();

                let of_part: Vec<usize> = local_elements(&shape, 0, &[0..rows, 0..0])
                    .into_iter()
                    .filter(|index| {
                        let position = [index / columns, index % columns];
                        let inside = |d: usize| (part.offset[d]..part.offset[d] + part.extent[d]).contains(&position[d]);
                        inside(0) && inside(1)
                    })
                    .collect();
                let all: Vec<(usize, usize)> = held_box
                    .runs()
                    .flat_map(|(index, at)| at.enumerate().map(move |(i, place)| (index + i, place)))
                    .collect();
                let place_of = |index: &usize| all.iter().find(|(of, _)| of == index).unwrap().1;
                prop_assert_eq!(places, of_part.iter().map(place_of).collect::<Vec<_>>());
            }
        }
    }

    /// Index in the whole tensor of each element of the cut tensor.
    fn local_elements(shape: &[usize; 2], dim: usize, ranges: &[Range<usize>; 2]) -> Vec<usize> {
        let inside = |r: usize, c: usize| ranges.iter().any(|range| range.contains(&[r, c][dim]));
        let all = (0..shape[0]).flat_map(|r| (0..shape[1]).map(move |c| (r, c)));
        all.filter(|(r, c)| inside(*r, *c)).map(|(r, c)| r * shape[1] + c).collect()
    }
}
