//! Quantization to int8 in quant blocks of 32 values along `k`, scale = max|x| / 127.
//!
//! Weights are quantized as ggml does it (scale stored as f16, halves rounded away from zero). Activations
//! are quantized row by row, in the same blocks, with an f32 scale. A block of activations is
//!
//! - zeros with scale 0 if the scale would be below the normal floats (so is a block of zeros);
//! - zeros with scale NaN if it holds infinity or NaN, so that every product with it is NaN.

use super::norm::{inverse_rms, normed_piece};
use super::pieces::load_piece;
use crate::kernels::isa::lanes::{Kernel, LANES, Lanes};
use half::f16;

/// Values in a quant block.
pub const QUANT_BLOCK: usize = 32;

/// f32 words of one quantized row of activations of `blocks` quant blocks.
///
/// ```text
/// quants       [blocks][32]  i8    -127 to 127
/// scales       [blocks]      f32   largest magnitude / 127; 0 or NaN for a block of zeros (below)
/// corrections  [blocks]      i32   -128 x the sum of the block's quants
/// ```
pub const fn quantized_words(blocks: usize) -> usize {
    blocks * (QUANT_BLOCK / 4 + 2)
}

/// A quantized row of activations that is being written.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct QuantizedRow {
    pub start: *mut f32, // [quantized_words(blocks)]
    pub blocks: usize,
}

/// One row of activations to int8.
pub struct QuantizeActivations<'a> {
    pub x: &'a [f32],       // [k]
    pub out: &'a mut [f32], // [quantized_words(ceil(k / 32))]
}

impl Kernel for QuantizeActivations<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        quantize_row(l, self.x.len(), self.out, |i, n| {
            // SAFETY: `quantize_row` asks for pieces of the row.
            unsafe { load_piece(l, self.x.as_ptr().add(i), n) }
        });
    }
}

/// One row to int8 after [`RmsNorm`](super::float::RmsNorm), of which it is told; the normed row itself
/// is not kept.
pub struct QuantizeNormed<'a> {
    pub x: &'a [f32],       // [k]
    pub weight: &'a [f32],  // [k]
    pub out: &'a mut [f32], // [quantized_words(ceil(k / 32))]
    pub eps: f32,
}

impl Kernel for QuantizeNormed<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        assert_eq!(self.weight.len(), self.x.len());
        let scale = l.splat(inverse_rms(l, self.x, self.eps));
        quantize_row(l, self.x.len(), self.out, |i, n| {
            // SAFETY: `quantize_row` asks for pieces of the row, and the weight is as long.
            unsafe { normed_piece(l, self.x.as_ptr().add(i), self.weight.as_ptr().add(i), scale, n) }
        });
    }
}

/// A row of `k` values, `value(i, n)` being the `n` from `i` on.
#[inline(always)]
fn quantize_row<L: Lanes>(l: L, k: usize, out: &mut [f32], value: impl Fn(usize, usize) -> L::F) {
    let blocks = k.div_ceil(QUANT_BLOCK);
    assert_eq!(out.len(), quantized_words(blocks));
    let row = QuantizedRow { start: out.as_mut_ptr(), blocks };
    for first in (0..blocks).step_by(LANES) {
        let values = |i: usize| {
            let at = (first + i) * QUANT_BLOCK;
            let n = LANES.min(k - at);
            (value(at, n), if n < LANES { l.splat(0.0) } else { value(at + n, LANES.min(k - at - n)) })
        };
        // SAFETY: `out` has room for all blocks of the row.
        unsafe { quantize_blocks(l, LANES.min(blocks - first), values, |i| (row, first + i)) };
    }
}

/// The largest magnitudes of up to 16 blocks, that of block `i` in lane `i`, where infinity counts above
/// all numbers and NaN above infinity.
#[inline(always)]
fn largest_each<L: Lanes>(l: L, count: usize, values: impl Fn(usize) -> (L::F, L::F)) -> L::F {
    let mut largest = [l.splat(0.0); LANES];
    for (i, largest) in largest.iter_mut().enumerate().take(count) {
        let (low, high) = values(i);
        *largest = l.max_bits(l.abs(low), l.abs(high));
    }
    l.max_bits_each(&largest)
}

/// Up to 16 blocks, `values(i)` to block `place(i)` of a row: finding their largest values and dividing
/// are vector operations.
///
/// # Safety
/// The rows have room for these blocks, and nobody else uses them meanwhile.
#[inline(always)]
pub(in crate::kernels) unsafe fn quantize_blocks<L: Lanes>(
    l: L,
    count: usize,
    values: impl Fn(usize) -> (L::F, L::F),
    place: impl Fn(usize) -> (QuantizedRow, usize),
) {
    let largest = largest_each(l, count, &values);
    let scale = l.div(largest, l.splat(127.0));
    let inverse = l.div(l.splat(127.0), largest);
    // A scale below the normal floats (that of zeros too) is 0, and so is the block: 127 / largest may
    // be infinite there.
    let smallest = l.splat(f32::MIN_POSITIVE);
    let inverse = l.zero_if_lt(scale, smallest, inverse);
    let kept = l.zero_if_lt(scale, smallest, scale);
    // What is not finite has a scale of NaN, so that every product with it is NaN; its quants are 0, for
    // its inverse is 0 or NaN.
    let scale = l.add(kept, l.sub(largest, largest));
    let (mut inverses, mut scales) = ([0f32; LANES], [0f32; LANES]);
    // SAFETY: both hold 16 values.
    unsafe {
        l.store(inverses.as_mut_ptr(), inverse);
        l.store(scales.as_mut_ptr(), scale);
    }
    for i in 0..count {
        let (low, high) = values(i);
        let (row, block) = place(i);
        let inverse = l.splat(inverses[i]);
        // SAFETY: the caller lends room for the block.
        unsafe {
            let quants = row.start.cast::<i8>().add(block * QUANT_BLOCK);
            l.store_i8(quants, l.mul(low, inverse));
            l.store_i8(quants.add(LANES), l.mul(high, inverse));
            let scale = row.start.add(row.blocks * QUANT_BLOCK / 4 + block);
            *scale = scales[i];
            let quants = std::slice::from_raw_parts(quants, QUANT_BLOCK);
            let sum = quants.iter().map(|&q| i32::from(q)).sum::<i32>();
            *scale.add(row.blocks).cast::<i32>() = -128 * sum;
        }
    }
}

/// Weights to Q8_0, exactly as the `gguf` package does it: each block's scale d = max|x| / 127 in
/// f32, quants round(x * (1 / d)) with halves away from zero, then d rounded to f16. Where 1 / d is not
/// finite (d rounds to 0 in f16 then) `gguf` leaves the quants undefined: they are 0. A block that holds
/// infinity or NaN has such a scale, and quants of 0.
pub struct QuantizeWeights<'a> {
    pub x: &'a [f32],          // [blocks * 32]
    pub quants: &'a mut [i8],  // [blocks * 32]
    pub scales: &'a mut [f16], // [blocks]
}

impl Kernel for QuantizeWeights<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        assert!(self.x.len() == self.scales.len() * QUANT_BLOCK && self.quants.len() == self.x.len());
        for (first, scales) in self.scales.chunks_mut(LANES).enumerate() {
            let first = first * LANES;
            // SAFETY: callers ask for blocks of this chunk, and `x` has them all.
            let values = |i: usize| unsafe {
                let x = self.x.as_ptr().add((first + i) * QUANT_BLOCK);
                (l.load(x), l.load(x.add(LANES)))
            };
            let d = l.div(largest_each(l, scales.len(), values), l.splat(127.0));
            let inverse = l.div(l.splat(1.0), d);
            let inverse = l.zero_if_lt(l.splat(f32::MAX), inverse, inverse);
            let (mut ds, mut inverses) = ([0f32; LANES], [0f32; LANES]);
            // SAFETY: both hold 16 values; `quants` has as many blocks as `scales`.
            unsafe {
                l.store(ds.as_mut_ptr(), d);
                l.store(inverses.as_mut_ptr(), inverse);
                for (i, scale) in scales.iter_mut().enumerate() {
                    *scale = f16::from_f32(ds[i]);
                    let (low, high) = values(i);
                    let inverse = l.splat(inverses[i]);
                    let out = self.quants.as_mut_ptr().add((first + i) * QUANT_BLOCK);
                    l.store_i8(out, round_half_away(l, l.mul(low, inverse)));
                    l.store_i8(out.add(LANES), round_half_away(l, l.mul(high, inverse)));
                }
            }
        }
    }
}

/// To the nearest integer, halves away from zero; infinity and NaN stay or become NaN.
#[inline(always)]
fn round_half_away<L: Lanes>(l: L, x: L::F) -> L::F {
    let zero = l.splat(0.0);
    let magnitude = l.abs(x);
    let down = l.floor(magnitude);
    let up = l.zero_if_lt(l.sub(magnitude, down), l.splat(0.5), l.splat(1.0));
    let rounded = l.add(down, up);
    // The sign again: one of the two is 0.
    let positive = l.zero_if_lt(x, zero, rounded);
    let negative = l.sub(rounded, positive);
    l.sub(positive, negative)
}
