//! The first half of a gated MLP in one pass: `silu(gate_proj x) * up_proj x`, left as the activations
//! that `down_proj` reads.
//!
//! A task multiplies a strip of rows at a time with the same columns of both weights into scratch that
//! stays in the first-level cache, and finishes them there: neither the two products, the widest values
//! of a layer, nor their combination as f32 go to memory.

use super::matmul_float::MatmulFloat;
use super::matmul_int8::{MatmulInt8, QuantFormat};
use super::quantize::{QUANT_BLOCK, QuantizedRow, quantize_blocks, quantized_words};
use super::swiglu::SwiGlu;
use crate::kernels::Isa;
use crate::kernels::isa::lanes::{Element, Kernel, LANES, Lanes};
use crate::kernels::split::{OutputTiles, Split, Tile};
use crate::kernels::tiles::{ROW_PADDING, STRIP_PANELS, STRIP_ROWS};
use crate::threads::{Disjoint, Threads};
use half::f16;
use std::marker::PhantomData;

/// f32 words of scratch for each worker: the two products of a strip.
pub const GATED_WORDS: usize = 2 * STRIP_ROWS * STRIP_PANELS * LANES;

/// Calls `multiply` for both products of every strip of every tile, with their scratch `[rows, width]`
/// (`width` is a multiple of 32, and what no panel fills is 0), then `finish` with both.
fn for_each_strip(
    threads: &Threads,
    (m, n): (usize, usize),
    panel_bytes: usize,
    scratch: &mut [f32],
    multiply: impl Fn(usize, OutputTiles<'_>, Tile) + Sync,
    finish: impl Fn(Tile, usize, &mut [f32], &[f32]) + Sync,
) {
    assert!(scratch.len() >= threads.count() * GATED_WORDS);
    let split = Split::new(m, n.div_ceil(LANES), panel_bytes, 2, STRIP_PANELS);
    let scratch = Disjoint::new(scratch);
    threads.run_on(split.tasks(), &|worker, task| {
        let Tile { rows, panels } = split.tile(task);
        // SAFETY: a worker runs one task at a time, and its number is below the count.
        let own = unsafe { scratch.part(worker * GATED_WORDS..(worker + 1) * GATED_WORDS) };
        let (gate, up) = own.split_at_mut(GATED_WORDS / 2);
        let width = panels.len().next_multiple_of(2) * LANES;
        for first in rows.clone().step_by(STRIP_ROWS) {
            let strip = Tile { rows: first..rows.end.min(first + STRIP_ROWS), panels: panels.clone() };
            let values = strip.rows.len() * width;
            for (which, product) in [&mut *gate, &mut *up].into_iter().enumerate() {
                for row in product[..values].chunks_exact_mut(width) {
                    row[panels.len() * LANES..].fill(0.0);
                }
                multiply(which, OutputTiles::tile(product, width, &strip), strip.clone());
            }
            finish(strip, width, &mut gate[..values], &up[..values]);
        }
    });
}

/// With quantized weights `[n, 32 blocks]`, packed as [`matmul_int8`](super::matmul_int8::matmul_int8) takes
/// them.
pub fn gated_int8<Q: QuantFormat>(
    isa: Isa,
    threads: &Threads,
    x: &[f32], // [m, quantized_words(blocks)]
    [gate, up]: [(&[u8], &[f16]); 2],
    (blocks, n): (usize, usize),
    scratch: &mut [f32], // [GATED_WORDS] for each worker
    out: &mut [f32],     // [m, quantized_words(ceil(n / 32))]
) {
    let (panels, words) = (n.div_ceil(LANES), quantized_words(n.div_ceil(QUANT_BLOCK)));
    let m = out.len() / words;
    assert!(out.len() == m * words && x.len() == m * quantized_words(blocks));
    for (quants, scales) in [gate, up] {
        assert!(
            quants.len() == panels * blocks * Q::PANEL_BLOCK_BYTES && scales.len() == panels * blocks * LANES
        );
    }
    let out = Disjoint::new(out);
    for_each_strip(
        threads,
        (m, n),
        blocks * Q::PANEL_BLOCK_BYTES,
        scratch,
        |which, out, tile| {
            let (quants, scales) = [gate, up][which];
            isa.run(MatmulInt8::<Q> { x, quants, scales, blocks, out, tile, format: PhantomData });
        },
        |tile, width, gate, up| {
            isa.run(SwiGlu { gate, up });
            let out =
                QuantizedRow { start: out.at(tile.rows.start * words), blocks: n.div_ceil(QUANT_BLOCK) };
            isa.run(QuantizeTile {
                x: gate,
                width,
                out,
                first_block: tile.panels.start * LANES / QUANT_BLOCK,
            });
        },
    );
}

/// Rows of whole blocks, to the blocks from `first_block` on of as many quantized rows.
struct QuantizeTile<'a> {
    x: &'a [f32], // [rows, width]
    width: usize,
    out: QuantizedRow, // the first of the rows
    first_block: usize,
}

impl Kernel for QuantizeTile<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let across = self.width / QUANT_BLOCK;
        let (x, rest) = self.x.as_chunks::<QUANT_BLOCK>();
        assert!(rest.is_empty() && self.first_block + across <= self.out.blocks);
        let (mut row, mut block) = (0, 0);
        for x in x.chunks(LANES) {
            let mut places = [(self.out, 0); LANES];
            for place in places.iter_mut().take(x.len()) {
                let start = self.out.start.wrapping_add(row * quantized_words(self.out.blocks));
                *place = (QuantizedRow { start, ..self.out }, self.first_block + block);
                block += 1;
                if block == across {
                    (row, block) = (row + 1, 0);
                }
            }
            // SAFETY: a block holds 32 values; the rows are this task's, the blocks inside them.
            unsafe {
                let values = |i: usize| (l.load(x[i].as_ptr()), l.load(x[i].as_ptr().add(LANES)));
                quantize_blocks(l, x.len(), values, |i| places[i]);
            }
        }
    }
}

/// With float weights `[n, k]`, packed as [`matmul_float`](super::matmul_float::matmul_float) takes them.
pub fn gated_float<T: Element>(
    isa: Isa,
    threads: &Threads,
    x: &[f32], // [m, k + ROW_PADDING]
    [gate, up]: [&[T]; 2],
    (k, n): (usize, usize),
    scratch: &mut [f32], // [GATED_WORDS] for each worker
    out: &mut [f32],     // [m, n + ROW_PADDING]
) {
    let (stride, words) = (k + ROW_PADDING, n + ROW_PADDING);
    let m = out.len() / words;
    assert!(out.len() == m * words && x.len() == m * stride);
    for weights in [gate, up] {
        assert_eq!(weights.len(), n.div_ceil(LANES) * k * LANES);
    }
    let out = Disjoint::new(out);
    for_each_strip(
        threads,
        (m, n),
        k * LANES * size_of::<T>(),
        scratch,
        |which, out, tile| isa.run(MatmulFloat { x, stride, weights: [gate, up][which], k, out, tile }),
        |tile, width, gate, up| {
            isa.run(SwiGlu { gate, up });
            let first = tile.panels.start * LANES;
            let columns = width.min(n - first);
            for (row, x) in tile.rows.zip(gate.chunks_exact(width)) {
                // SAFETY: these columns of the row are this task's.
                let out = unsafe { out.part(row * words + first..row * words + first + columns) };
                out.copy_from_slice(&x[..columns]);
            }
        },
    );
}
