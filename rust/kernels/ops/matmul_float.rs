//! Matmul with float weights: `y = x W^T`, where `y[n]` is a chain of fused multiply-adds over `k`,
//! ascending, from 0.0. Vectors run across output rows, never across `k`, so neither the lane count nor the
//! tile matters to a result.
//!
//! Weights are packed in panels of 16 output rows, interleaved: a load is one value of `k` of 16 rows.
//!
//! ```text
//! weights  [panel][k][16]
//!
//! panel 0:  row 0 | row 1 | ... | row 15    k = 0
//!           row 0 | row 1 | ... | row 15    k = 1
//!           ...
//! ```

use crate::kernels::Isa;
use crate::kernels::isa::lanes::{Element, Kernel, LANES, Lanes};
use crate::kernels::split::{Destination, OutputTiles, Tile, for_each_tile};
use crate::kernels::tiles::{self, RowTile, Tiles};
use crate::threads::Threads;

pub use crate::kernels::tiles::ROW_PADDING;

/// The product `x[m, k] W^T`, with float weights packed `[ceil(n / 16)][k][16]`; row `r` of `x` is at
/// `r * (k + ROW_PADDING)`.
pub fn matmul_float<T: Element>(
    isa: Isa,
    threads: &Threads,
    x: &[f32],
    weights: &[T],
    (k, n): (usize, usize),
    out: Destination<'_>,
) {
    let (stride, panels) = (k + ROW_PADDING, n.div_ceil(LANES));
    let m = x.len() / stride;
    assert!(x.len() == m * stride && weights.len() == panels * k * LANES);
    for_each_tile(threads, (m, n), k * LANES * size_of::<T>(), out, |out, tile| {
        isa.run(MatmulFloat { x, stride, weights, k, out, tile });
    });
}

/// One task's tile of the product.
pub(in crate::kernels) struct MatmulFloat<'a, T> {
    pub x: &'a [f32], // row r at r * stride: [k]
    pub stride: usize,
    pub weights: &'a [T], // [ceil(n / 16)][k][16]
    pub k: usize,
    pub out: OutputTiles<'a>,
    pub tile: Tile,
}

impl<T: Element> MatmulFloat<'_, T> {
    /// `MR` rows of `x` by `NR` panels, all of `k`.
    #[inline(always)]
    fn micro_tile<L: Lanes, const MR: usize, const NR: usize, const PREFETCH: bool>(
        &self,
        l: L,
        row: usize,
        panel: usize,
    ) {
        let k = self.k;
        let mut acc = [[l.splat(0.0); NR]; MR];
        for m in 0..MR {
            for p in 0..NR {
                self.out.prefetch(l, row + m, panel + p);
            }
        }
        // SAFETY: `run` checked that the tile's rows and panels are inside `x` and `weights`; the
        // task owns the tile of the output.
        unsafe {
            let x = self.x.as_ptr().add(row * self.stride);
            let w = self.weights.as_ptr().add(panel * k * LANES);
            for i in 0..k {
                let mut wide = [l.splat(0.0); NR];
                for (p, wide) in wide.iter_mut().enumerate() {
                    let w = w.add((p * k + i) * LANES);
                    if PREFETCH {
                        l.prefetch(w.wrapping_add(tiles::FLOAT_PREFETCH * LANES).cast());
                    }
                    *wide = T::load(l, w);
                }
                for (m, acc) in acc.iter_mut().enumerate() {
                    let x = l.splat(*x.add(m * self.stride + i));
                    for p in 0..NR {
                        acc[p] = l.mul_add(x, wide[p], acc[p]);
                    }
                }
            }
            for (m, acc) in acc.iter().enumerate() {
                for (p, &acc) in acc.iter().enumerate() {
                    self.out.store(l, row + m, panel + p, acc);
                }
            }
        }
    }
}

impl<L: Lanes, T: Element> RowTile for (L, &MatmulFloat<'_, T>) {
    #[inline(always)]
    fn row_tile<const MR: usize, const NR: usize, const PREFETCH: bool>(&self, row: usize) -> usize {
        let &(l, kernel) = self;
        let mut panel = kernel.tile.panels.start;
        while panel + NR <= kernel.tile.panels.end {
            kernel.micro_tile::<L, MR, NR, PREFETCH>(l, row, panel);
            panel += NR;
        }
        while panel < kernel.tile.panels.end {
            kernel.micro_tile::<L, MR, 1, PREFETCH>(l, row, panel);
            panel += 1;
        }
        MR
    }
}

impl<T: Element> Kernel for MatmulFloat<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        assert!(self.tile.rows.end * self.stride <= self.x.len() && self.k <= self.stride);
        assert!(self.tile.panels.end * self.k * LANES <= self.weights.len());
        let (mut row, end) = (self.tile.rows.start, self.tile.rows.end);
        while row < end {
            row += L::Tiles::float(&(l, &self), row, end - row);
        }
    }
}
