//! Q8_0 kernels: blocks of 32 values along `k`, scale = max|x| / 127.
//!
//! Weights are quantized as ggml does it (scale stored as f16, halves rounded away from zero) and
//! kept unsigned, value + 128, which is what the int8 dot product instructions take on one side.
//! Activations are quantized row by row, in the same blocks, with an f32 scale. A block's dot
//! product is an exact integer; it is added by one fused multiply-add with the product of the two
//! scales, blocks ascending.

use super::float::{inverse_rms, load_piece, normed_piece, pieces};
use crate::kernels::isa::lanes::{Kernel, LANES, Lanes, Registers};
use crate::kernels::tiles::{OutputTiles, Tile};
use half::f16;

/// Values in a block.
pub const BLOCK: usize = 32;
/// Bytes of one block of 16 output rows, packed.
pub const GROUP_BLOCK: usize = BLOCK * LANES;

/// f32 words of one quantized row of activations of `blocks` blocks: the quants `[blocks * 32]` i8,
/// then the scales `[blocks]` f32, then the corrections `[blocks]` i32 (-128 x the block's sum).
pub const fn quantized_words(blocks: usize) -> usize {
    blocks * (BLOCK / 4 + 2)
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
    let blocks = k.div_ceil(BLOCK);
    assert_eq!(out.len(), quantized_words(blocks));
    let row = QuantizedRow { start: out.as_mut_ptr(), blocks };
    for first in (0..blocks).step_by(LANES) {
        let values = |i: usize| {
            let at = (first + i) * BLOCK;
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
            let quants = row.start.cast::<i8>().add(block * BLOCK);
            l.store_i8(quants, l.mul(low, inverse));
            l.store_i8(quants.add(LANES), l.mul(high, inverse));
            let scale = row.start.add(row.blocks * BLOCK / 4 + block);
            *scale = scales[i];
            let quants = std::slice::from_raw_parts(quants, BLOCK);
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
        assert!(self.x.len() == self.scales.len() * BLOCK && self.quants.len() == self.x.len());
        for (first, scales) in self.scales.chunks_mut(LANES).enumerate() {
            let first = first * LANES;
            // SAFETY: callers ask for blocks of this chunk, and `x` has them all.
            let values = |i: usize| unsafe {
                let x = self.x.as_ptr().add((first + i) * BLOCK);
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
                    let out = self.quants.as_mut_ptr().add((first + i) * BLOCK);
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

/// How far ahead of a few rows' products weights are asked for: between one row on wide registers, where
/// reading is all there is to do, and many, where weights come from a cache, the hardware does not look
/// far enough.
/// From memory to the second-level cache first, then to the first, which has too few places for lines
/// on their way to hide the memory's latency alone.
const PREFETCH_L2: usize = 8192;
const PREFETCH_L1: usize = 1024;

/// See the module's text for the order of operations.
pub(in crate::kernels) struct MatmulQ8_0<'a> {
    pub x: &'a [f32],      // [m, quantized_words(blocks)]
    pub quants: &'a [u8],  // [ceil(n / 16)][blocks][8][16][4], value + 128
    pub scales: &'a [f16], // [ceil(n / 16)][blocks][16]
    pub blocks: usize,
    pub out: OutputTiles,
    pub tile: Tile,
}

impl MatmulQ8_0<'_> {
    /// `MR` rows of activations by `NR` groups of 16 output rows, all of `k`.
    #[inline(always)]
    fn block<L: Lanes, const MR: usize, const NR: usize, const PREFETCH: bool>(
        &self,
        l: L,
        row: usize,
        group: usize,
    ) {
        let blocks = self.blocks;
        let mut out = [[l.splat(0.0); NR]; MR];
        for m in 0..MR {
            for g in 0..NR {
                self.out.prefetch(l, row + m, group + g);
            }
        }
        // SAFETY: `run` checked that the tile's rows and groups are inside all arrays; the task owns
        // the tile of the output.
        unsafe {
            let words = quantized_words(blocks);
            let x = self.x.as_ptr().add(row * words);
            let (a, a_scales) = (x.cast::<i8>(), x.add(blocks * BLOCK / 4));
            let corrections = a_scales.add(blocks).cast::<i32>();
            let w = self.quants.as_ptr().add(group * blocks * GROUP_BLOCK);
            let w_scales = self.scales.as_ptr().add(group * blocks * LANES);
            for b in 0..blocks {
                let mut dots = [[l.dot_start(0); NR]; MR];
                for (m, dots) in dots.iter_mut().enumerate() {
                    *dots = [l.dot_start(*corrections.add(m * words + b)); NR];
                }
                for j in 0..BLOCK / 4 {
                    for g in 0..NR {
                        let w = w.add((g * blocks + b) * GROUP_BLOCK + j * 4 * LANES);
                        if PREFETCH {
                            l.prefetch_l2(w.wrapping_add(PREFETCH_L2));
                            l.prefetch(w.wrapping_add(PREFETCH_L1));
                        }
                        let w = l.load_q8_0(w);
                        for (m, dots) in dots.iter_mut().enumerate() {
                            let a = a.add(m * words * 4 + b * BLOCK + j * 4);
                            dots[g] = l.dot_q8_0(dots[g], w, a);
                        }
                    }
                }
                for g in 0..NR {
                    let scale = l.load_f16(w_scales.add((g * blocks + b) * LANES));
                    for m in 0..MR {
                        let scale = l.mul(scale, l.splat(*a_scales.add(m * words + b)));
                        out[m][g] = l.mul_add(l.to_f32(dots[m][g]), scale, out[m][g]);
                    }
                }
            }
            for (m, out) in out.iter().enumerate() {
                for (g, &out) in out.iter().enumerate() {
                    self.out.store(l, row + m, group + g, out);
                }
            }
        }
    }

    #[inline(always)]
    fn groups<L: Lanes, const MR: usize, const NR: usize, const PREFETCH: bool>(&self, l: L, row: usize) {
        let mut group = self.tile.groups.start;
        while group + NR <= self.tile.groups.end {
            self.block::<L, MR, NR, PREFETCH>(l, row, group);
            group += NR;
        }
        while group < self.tile.groups.end {
            self.block::<L, MR, 1, PREFETCH>(l, row, group);
            group += 1;
        }
    }
}

impl Kernel for MatmulQ8_0<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let blocks = self.blocks;
        assert!(self.tile.rows.end * quantized_words(blocks) <= self.x.len());
        assert!(self.tile.groups.end * blocks * GROUP_BLOCK <= self.quants.len());
        assert!(self.tile.groups.end * blocks * LANES <= self.scales.len());
        let (mut row, end) = (self.tile.rows.start, self.tile.rows.end);
        while row < end {
            let left = end - row;
            row += match L::REGISTERS {
                // 12 integer and 12 float accumulators of 32 registers; an activation that is
                // broadcast serves two groups, so that loads keep up with the dot products.
                Registers::ThirtyTwo512 if left >= 6 && left != 8 => {
                    self.groups::<L, 6, 2, false>(l, row);
                    6
                }
                Registers::ThirtyTwo512 if left >= 8 => {
                    self.groups::<L, 8, 1, true>(l, row);
                    8
                }
                Registers::ThirtyTwo512 if left >= 4 => {
                    self.groups::<L, 4, 2, true>(l, row);
                    4
                }
                Registers::Sixteen256 if left >= 4 => {
                    self.groups::<L, 4, 1, true>(l, row);
                    4
                }
                _ if left >= 2 => {
                    self.groups::<L, 2, 1, true>(l, row);
                    2
                }
                // One row is bound by memory; several chains hide the dot product's latency.
                Registers::ThirtyTwo512 => {
                    self.groups::<L, 1, 4, false>(l, row);
                    1
                }
                Registers::Sixteen256 => {
                    self.groups::<L, 1, 1, true>(l, row);
                    1
                }
            };
        }
    }
}

/// 16 quantized rows to the packed layout of a group.
pub struct InterleaveRows<'a> {
    pub quants: &'a [i8],          // [16][blocks * 32]
    pub scales: &'a [f16],         // [16][blocks]
    pub out: &'a mut [u8],         // [blocks][8][16][4], value + 128
    pub out_scales: &'a mut [f16], // [blocks][16]
}

impl Kernel for InterleaveRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let blocks = self.scales.len() / LANES;
        let words = blocks * BLOCK / 4; // of 4 values, in a row
        assert!(self.quants.len() == words * 4 * LANES && self.out.len() == self.quants.len());
        assert!(self.out_scales.len() == blocks * LANES);
        // Words of 4 values are moved as f32 lanes, which moves bits as they are.
        let (rows, out) = (self.quants.as_ptr().cast::<f32>(), self.out.as_mut_ptr().cast::<f32>());
        for (first, count) in pieces(words) {
            let mut tile = [l.splat(0.0); LANES];
            // SAFETY: first + count <= words; rows and out hold 16 x words.
            unsafe {
                for (i, tile) in tile.iter_mut().enumerate() {
                    *tile = load_piece(l, rows.add(i * words + first), count);
                }
                for (i, &column) in l.transpose(&tile).iter().take(count).enumerate() {
                    l.store(out.add((first + i) * LANES), column);
                }
            }
        }
        self.out.iter_mut().for_each(|q| *q ^= 0x80); // signed to value + 128
        for (b, out) in self.out_scales.chunks_exact_mut(LANES).enumerate() {
            for (i, out) in out.iter_mut().enumerate() {
                *out = self.scales[i * blocks + b];
            }
        }
    }
}

/// Row `lane` of a group, back to f32: what an embedding look-up reads.
pub fn dequantize_packed_row(quants: &[u8], scales: &[f16], lane: usize, out: &mut [f32]) {
    for (i, _) in pieces(out.len()) {
        let end = out.len().min(i + LANES);
        for (k, y) in (i..end).zip(&mut out[i..end]) {
            let (b, j) = (k / BLOCK, k % BLOCK);
            let q = quants[b * GROUP_BLOCK + (j / 4) * 4 * LANES + lane * 4 + j % 4];
            *y = (i32::from(q) - 128) as f32 * scales[b * LANES + lane].to_f32();
        }
    }
}
