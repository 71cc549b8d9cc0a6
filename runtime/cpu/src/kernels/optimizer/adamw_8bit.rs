//! AdamW with averages in blocks of 8-bit numbers; see [`phalanx_strategies::optimizer::AdamW8bit`] and
//! [`phalanx_strategies::program::blocks`].

use super::super::parallel::CHUNK;
use super::{Step, adamw, adamw_chunk};
use crate::tasks::{Cut, Tasks};
use phalanx_device::packed::DynamicMap;
use phalanx_strategies::optimizer::{AdamW, STATE_BLOCK as BLOCK, STATE_WORDS as WORDS};
use phalanx_strategies::program::Blocks;

/// Updates `p` and both averages, which are the words of `blocks`.
///
/// # Panics
/// If the numbers of elements or words differ from those of `blocks`.
pub(super) fn update(p: &mut [f32], [m, v]: [&mut [f32]; 2], g: &[f32], blocks: &Blocks, rule: &AdamW, step: &Step) {
    assert!(p.len() == blocks.n_elements() && [m.len(), v.len()] == [blocks.n_words(); 2]);
    let (mut p, mut g, mut m, mut v) = (p, g, m, v);
    for run in &blocks.runs {
        let own_p = p.split_off_mut(..run.n_elements).expect("as many as counted");
        let own_g = g.split_off(..run.n_elements).expect("as many as counted");
        let [own_m, own_v] =
            [&mut m, &mut v].map(|words| words.split_off_mut(..run.n_words()).expect("as many as counted"));
        match run.is_coded {
            false => adamw(own_p, own_m, own_v, own_g, rule, step),
            true => {
                let words = CHUNK / BLOCK * WORDS;
                let state = own_m.par_chunks_mut(words).zip(own_v.par_chunks_mut(words));
                let tasks = own_p.par_chunks_mut(CHUNK).zip(own_g.par_chunks(CHUNK)).zip(state);
                tasks.for_each(|((p, g), (m, v))| update_blocks(p, m, v, g, rule, step));
            }
        }
    }
}

fn update_blocks(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], rule: &AdamW, step: &Step) {
    let (signed, unsigned) = (DynamicMap::signed(), DynamicMap::unsigned());
    let [mut of_m, mut of_v] = [[0.0; BLOCK]; 2];
    let state = m.chunks_mut(WORDS).zip(v.chunks_mut(WORDS));
    for ((p, g), (m, v)) in p.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).zip(state) {
        let (of_m, of_v) = (&mut of_m[..p.len()], &mut of_v[..p.len()]);
        let [m, v]: [&mut [u32]; 2] = [m, v].map(bytemuck::cast_slice_mut);
        decode(signed, m, of_m);
        decode(unsigned, v, of_v);
        adamw_chunk(p, of_m, of_v, g, rule, step);
        encode(signed, of_m, m);
        encode(unsigned, of_v, v);
    }
}

/// The numbers of a block.
fn decode(map: &DynamicMap, words: &[u32], numbers: &mut [f32]) {
    let scale = f32::from_bits(words[0]);
    for (word, numbers) in words[1..].iter().zip(numbers.chunks_mut(4)) {
        for (code, number) in word.to_le_bytes().into_iter().zip(numbers) {
            *number = map.numbers[usize::from(code)] * scale;
        }
    }
}

/// The words of a block: the largest magnitude, and the nearest numbers relative to it.
fn encode(map: &DynamicMap, numbers: &[f32], words: &mut [u32]) {
    let scale = numbers.iter().fold(0.0f32, |largest, x| x.abs().max(largest));
    let factor = 1.0 / scale.max(f32::MIN_POSITIVE);
    words[0] = scale.to_bits();
    for (word, numbers) in words[1..].iter_mut().zip(numbers.chunks(4)) {
        *word = numbers.iter().rev().fold(0, |word, x| word << 8 | u32::from(map.code(x * factor)));
    }
}

#[cfg(test)]
#[path = "adamw_8bit_tests.rs"]
mod tests;
