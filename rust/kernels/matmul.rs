//! Matmul: `y = x W^T` with weights packed 16 output rows interleaved, split over threads in tiles of
//! rows and groups of 16 output rows. Vectors run across output rows, never across `k`, so neither
//! the lane count nor the tile matters to a result.

use super::Isa;
use super::float::store_piece;
use super::lanes::{Element, Kernel, LANES, Lanes, Registers};
use super::q8_0::{GROUP_BLOCK, MatmulQ8_0, quantized_words};
use crate::threads::Threads;
use half::f16;
use std::ops::Range;

/// The rows of activations and the groups of 16 output rows of one task.
pub(super) struct Tile {
    pub rows: Range<usize>,
    pub groups: Range<usize>,
}

/// The output of a matmul, `[m, width]`: tasks write disjoint tiles of it.
#[derive(Clone, Copy)]
pub(super) struct OutputTiles {
    start: *mut f32,
    width: usize,
}

// SAFETY: `split` hands out disjoint tiles.
unsafe impl Sync for OutputTiles {}
// SAFETY: as above.
unsafe impl Send for OutputTiles {}

impl OutputTiles {
    /// # Safety
    /// `row` is a row of the output, and no other task writes this group of it.
    #[inline(always)]
    pub(super) unsafe fn store<L: Lanes>(self, l: L, row: usize, group: usize, v: L::F) {
        let column = group * LANES;
        // SAFETY: the row holds `width` values, of which at most 16 from `column` on are written.
        unsafe {
            let p = self.start.add(row * self.width + column);
            store_piece(l, p, v, LANES.min(self.width - column));
        }
    }
}

/// Bytes of weights that one task reads when there are few rows: small enough to share out evenly,
/// large enough that claiming a task costs nothing beside it.
const TASK_BYTES: usize = 128 << 10;
/// Rows of activations that stay in the second-level cache while a task's weights pass over them.
const ROW_BLOCK: usize = 256;

/// Calls `run` with every tile of an `[m, n]` output; `group_bytes` is the size of 16 output rows of
/// weights.
fn split(
    threads: &Threads,
    out: &mut [f32],
    n: usize,
    group_bytes: usize,
    run: impl Fn(OutputTiles, Tile) + Sync,
) {
    let m = out.len() / n;
    assert_eq!(out.len(), m * n);
    let tiles = OutputTiles { start: out.as_mut_ptr(), width: n };
    let groups = n.div_ceil(LANES);
    // Many rows take pairs of groups together, and want a few of them.
    let (least, most) = if m > 16 { (4, 8) } else { (1, groups) };
    let groups_per_task = (TASK_BYTES / group_bytes).clamp(least, most);
    let (group_tasks, row_tasks) = (groups.div_ceil(groups_per_task), m.div_ceil(ROW_BLOCK));
    threads.run(group_tasks * row_tasks, &|task| {
        let row = task / group_tasks * ROW_BLOCK;
        let group = task % group_tasks * groups_per_task;
        run(
            tiles,
            Tile { rows: row..m.min(row + ROW_BLOCK), groups: group..groups.min(group + groups_per_task) },
        );
    });
}

/// Values between the rows of a matmul's activations beyond a row's own: the rows of a tile are read
/// side by side, and rows a multiple of 4 KiB apart would share the same few places in the cache.
pub const ROW_PADDING: usize = LANES;

/// `out[m, n] = x[m, k] W^T`, with float weights packed `[ceil(n / 16)][k][16]`; row `r` of `x` is at
/// `r * stride`.
pub fn matmul_float<T: Element>(
    isa: Isa,
    threads: &Threads,
    (x, stride): (&[f32], usize),
    weights: &[T],
    k: usize,
    n: usize,
    out: &mut [f32],
) {
    assert!(stride >= k && x.len() * n >= out.len() * stride);
    assert_eq!(weights.len(), n.div_ceil(LANES) * k * LANES);
    let group_bytes = k * LANES * size_of::<T>();
    split(threads, out, n, group_bytes, |out, tile| {
        isa.run(MatmulFloat { x, stride, weights, k, out, tile });
    });
}

/// `out[m, n] = x[m, k] W^T`, with Q8_0 weights packed `[ceil(n / 16)][blocks][8][16][4]` and scales
/// `[ceil(n / 16)][blocks][16]`.
pub fn matmul_q8_0(
    isa: Isa,
    threads: &Threads,
    x: &[f32], // [m, quantized_words(blocks)]
    (quants, scales): (&[u8], &[f16]),
    blocks: usize,
    n: usize,
    out: &mut [f32],
) {
    let groups = n.div_ceil(LANES);
    assert_eq!(x.len() * n, out.len() * quantized_words(blocks));
    assert_eq!(quants.len(), groups * blocks * GROUP_BLOCK);
    assert_eq!(scales.len(), groups * blocks * LANES);
    split(threads, out, n, blocks * GROUP_BLOCK, |out, tile| {
        isa.run(MatmulQ8_0 { x, quants, scales, blocks, out, tile });
    });
}

/// `y[n]` = a chain of fused multiply-adds over `k`, ascending, from 0.0.
struct MatmulFloat<'a, T> {
    x: &'a [f32], // row r at r * stride: [k]
    stride: usize,
    weights: &'a [T], // [ceil(n / 16)][k][16]
    k: usize,
    out: OutputTiles, // [m, n]
    tile: Tile,
}

impl<T: Element> MatmulFloat<'_, T> {
    /// `MR` rows of `x` by `NR` groups of 16 output rows, all of `k`.
    #[inline(always)]
    fn block<L: Lanes, const MR: usize, const NR: usize>(&self, l: L, row: usize, group: usize) {
        let k = self.k;
        let mut acc = [[l.splat(0.0); NR]; MR];
        // SAFETY: `run` checked that the tile's rows and groups are inside `x` and `weights`; the
        // task owns the tile of the output.
        unsafe {
            let x = self.x.as_ptr().add(row * self.stride);
            let w = self.weights.as_ptr().add(group * k * LANES);
            for i in 0..k {
                let mut wide = [l.splat(0.0); NR];
                for (g, wide) in wide.iter_mut().enumerate() {
                    *wide = T::load(l, w.add((g * k + i) * LANES));
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
