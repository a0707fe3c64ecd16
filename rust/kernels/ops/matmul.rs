//! Matmul: `y = x W^T` with weights packed 16 output rows interleaved. Vectors run across output rows,
//! never across `k`, so neither the lane count nor the tile matters to a result.

use super::q8_0::{GROUP_BLOCK, MatmulQ8_0, quantized_words};
use crate::kernels::Isa;
use crate::kernels::isa::lanes::{Element, Kernel, LANES, Lanes, Registers};
use crate::kernels::tiles::{OutputTiles, Tile, for_each_tile};
use crate::threads::Threads;
use half::f16;

pub use crate::kernels::tiles::Output;

/// Values between the rows of a matmul's activations beyond a row's own: the rows of a tile are read
/// side by side, and rows a multiple of 4 KiB apart would share the same few places in the cache.
pub const ROW_PADDING: usize = LANES;

/// The product `x[m, k] W^T`, with float weights packed `[ceil(n / 16)][k][16]`; row `r` of `x` is at
/// `r * (k + ROW_PADDING)`.
pub fn matmul_float<T: Element>(
    isa: Isa,
    threads: &Threads,
    x: &[f32],
    weights: &[T],
    (k, n): (usize, usize),
    out: Output<'_>,
) {
    let (stride, groups) = (k + ROW_PADDING, n.div_ceil(LANES));
    let m = x.len() / stride;
    assert!(x.len() == m * stride && weights.len() == groups * k * LANES);
    for_each_tile(threads, (m, n), k * LANES * size_of::<T>(), out, |out, tile| {
        isa.run(MatmulFloat { x, stride, weights, k, out, tile });
    });
}

/// The product `x[m, k] W^T`, with Q8_0 weights packed `[ceil(n / 16)][blocks][8][16][4]` and scales
/// `[ceil(n / 16)][blocks][16]`.
pub fn matmul_q8_0(
    isa: Isa,
    threads: &Threads,
    x: &[f32], // [m, quantized_words(blocks)]
    (quants, scales): (&[u8], &[f16]),
    (blocks, n): (usize, usize),
    out: Output<'_>,
) {
    let (words, groups) = (quantized_words(blocks), n.div_ceil(LANES));
    let m = x.len() / words;
    assert!(x.len() == m * words && quants.len() == groups * blocks * GROUP_BLOCK);
    assert_eq!(scales.len(), groups * blocks * LANES);
    for_each_tile(threads, (m, n), blocks * GROUP_BLOCK, out, |out, tile| {
        isa.run(MatmulQ8_0 { x, quants, scales, blocks, out, tile });
    });
}

/// How far ahead of many rows' products weights are asked for, in values of `k`: from the second-level
/// cache, whose latency the tile's own loads do not hide.
const PREFETCH: usize = 16;

/// `y[n]` = a chain of fused multiply-adds over `k`, ascending, from 0.0.
pub(in crate::kernels) struct MatmulFloat<'a, T> {
    pub x: &'a [f32], // row r at r * stride: [k]
    pub stride: usize,
    pub weights: &'a [T], // [ceil(n / 16)][k][16]
    pub k: usize,
    pub out: OutputTiles,
    pub tile: Tile,
}

impl<T: Element> MatmulFloat<'_, T> {
    /// `MR` rows of `x` by `NR` groups of 16 output rows, all of `k`.
    #[inline(always)]
    fn block<L: Lanes, const MR: usize, const NR: usize>(&self, l: L, row: usize, group: usize) {
        let k = self.k;
        let mut acc = [[l.splat(0.0); NR]; MR];
        for m in 0..MR {
            for g in 0..NR {
                self.out.prefetch(l, row + m, group + g);
            }
        }
        // SAFETY: `run` checked that the tile's rows and groups are inside `x` and `weights`; the
        // task owns the tile of the output.
        unsafe {
            let x = self.x.as_ptr().add(row * self.stride);
            let w = self.weights.as_ptr().add(group * k * LANES);
            for i in 0..k {
                let mut wide = [l.splat(0.0); NR];
                for (g, wide) in wide.iter_mut().enumerate() {
                    let w = w.add((g * k + i) * LANES);
                    if MR >= 6 {
                        l.prefetch(w.wrapping_add(PREFETCH * LANES).cast());
                    }
                    *wide = T::load(l, w);
                }
                for (m, acc) in acc.iter_mut().enumerate() {
                    let x = l.splat(*x.add(m * self.stride + i));
                    for g in 0..NR {
                        acc[g] = l.mul_add(x, wide[g], acc[g]);
                    }
                }
            }
            for (m, acc) in acc.iter().enumerate() {
                for (g, &acc) in acc.iter().enumerate() {
                    self.out.store(l, row + m, group + g, acc);
                }
            }
        }
    }

    #[inline(always)]
    fn groups<L: Lanes, const MR: usize, const NR: usize>(&self, l: L, row: usize) {
        let mut group = self.tile.groups.start;
        while group + NR <= self.tile.groups.end {
            self.block::<L, MR, NR>(l, row, group);
            group += NR;
        }
        while group < self.tile.groups.end {
            self.block::<L, MR, 1>(l, row, group);
            group += 1;
        }
    }
}

impl<T: Element> Kernel for MatmulFloat<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        assert!(self.tile.rows.end * self.stride <= self.x.len() && self.k <= self.stride);
        assert!(self.tile.groups.end * self.k * LANES <= self.weights.len());
        let (mut row, end) = (self.tile.rows.start, self.tile.rows.end);
        while row < end {
            let left = end - row;
            row += match L::REGISTERS {
                // 24 accumulators of 32 registers.
                Registers::ThirtyTwo512 if left >= 12 => {
                    self.groups::<L, 12, 2>(l, row);
                    12
                }
                // 12 accumulators of 16 registers.
                Registers::Sixteen256 if left >= 6 => {
                    self.groups::<L, 6, 1>(l, row);
                    6
                }
                Registers::ThirtyTwo512 if left >= 4 => {
                    self.groups::<L, 4, 4>(l, row);
                    4
                }
                _ if left >= 2 => {
                    self.groups::<L, 2, 2>(l, row);
                    2
                }
                // One row is bound by memory; four chains hide the multiply-add's latency.
                _ => {
                    self.groups::<L, 1, 4>(l, row);
                    1
                }
            };
        }
    }
}
