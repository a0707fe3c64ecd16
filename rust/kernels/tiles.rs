//! All choices of tile sizes and prefetch distances of the matmuls, with their reasons. (Those of attention
//! stand in its two files.)
//!
//! A product is cut three times: into tasks for threads (`split`), a task's rows into row tiles, and a row
//! tile, panel by panel, into micro-tiles of `MR` rows of activations by `NR` panels of 16 output rows,
//! whose accumulators stay in registers over all of `k`.

use super::isa::lanes::{LANES, Lanes, Registers};
use std::ops::Range;

/// Bytes of weights that one task reads when there are few rows: small enough to share out evenly, large
/// enough that claiming a task costs nothing beside it.
pub(in crate::kernels) const TASK_BYTES: usize = 128 << 10;
/// From so many rows on, weights are read from a cache more often than from memory: a task then takes
/// [`MANY_ROWS_PANELS`].
pub(in crate::kernels) const MANY_ROWS: usize = 17;
/// Panels of a task with many rows: micro-tiles take them in pairs, and want a few of them.
pub(in crate::kernels) const MANY_ROWS_PANELS: (usize, usize) = (4, 8);
/// Rows of activations that stay in the second-level cache while a task's weights pass over them.
pub(in crate::kernels) const TASK_ROWS: usize = 256;

/// Rows of a gated pair's strip: a multiple of all `MR`, and so few that what they hold of the first-level
/// cache lasts from one weight to the other.
pub(in crate::kernels) const STRIP_ROWS: usize = 12;
/// The most panels of each weight of a gated pair that a task takes: its scratch is as wide.
pub(in crate::kernels) const STRIP_PANELS: usize = 32;

/// Values of padding between rows of float activations: a micro-tile's rows are read side by side, and a
/// stride of a multiple of 4 KiB would put them all into the same few cache sets.
pub const ROW_PADDING: usize = LANES;

/// Prefetch distance of float weights under many rows, in values of `k`: from the second-level cache, whose
/// latency the micro-tile's own loads do not hide.
pub(in crate::kernels) const FLOAT_PREFETCH: usize = 16;
/// Prefetch distances of quantized weights, in bytes: first from memory into the second-level cache, then into
/// the first, which has too few line-fill buffers to hide the memory's latency alone.
pub(in crate::kernels) const INT8_PREFETCH_L2: usize = 8192;
pub(in crate::kernels) const INT8_PREFETCH_L1: usize = 1024;

/// A kernel that works on tiles of several sizes.
pub(in crate::kernels) trait RowTile {
    /// `MR` rows from `row` on, by all panels, `NR` at a time; with or without prefetching weights.
    fn row_tile<L: Lanes, const MR: usize, const NR: usize, const PREFETCH: bool>(&self, l: L, row: usize);
}

/// The row tiles of a matmul with quantized weights.
///
/// Weights are prefetched where the hardware does not look far enough ahead: not with one row on wide
/// registers, where reading is all there is to do, and not with many, whose weights come from a cache.
#[inline(always)]
pub(in crate::kernels) fn int8<L: Lanes>(l: L, rows: Range<usize>, kernel: &impl RowTile) {
    let (mut row, end) = (rows.start, rows.end);
    while row < end {
        let left = end - row;
        row += match L::REGISTERS {
            // 12 integer and 12 float accumulators of 32 registers; an activation that is broadcast
            // serves two panels, so that loads keep up with the dot products.
            Registers::ThirtyTwo512 if left >= 6 && left != 8 => {
                kernel.row_tile::<L, 6, 2, false>(l, row);
                6
            }
            Registers::ThirtyTwo512 if left >= 8 => {
                kernel.row_tile::<L, 8, 1, true>(l, row);
                8
            }
            Registers::ThirtyTwo512 if left >= 4 => {
                kernel.row_tile::<L, 4, 2, true>(l, row);
                4
            }
            Registers::Sixteen256 if left >= 4 => {
                kernel.row_tile::<L, 4, 1, true>(l, row);
                4
            }
            _ if left >= 2 => {
                kernel.row_tile::<L, 2, 1, true>(l, row);
                2
            }
            // One row is bound by memory; several chains hide the dot product's latency.
            Registers::ThirtyTwo512 => {
                kernel.row_tile::<L, 1, 4, false>(l, row);
                1
            }
            Registers::Sixteen256 => {
                kernel.row_tile::<L, 1, 1, true>(l, row);
                1
            }
        };
    }
}

/// The row tiles of a matmul with float weights.
#[inline(always)]
pub(in crate::kernels) fn float<L: Lanes>(l: L, rows: Range<usize>, kernel: &impl RowTile) {
    let (mut row, end) = (rows.start, rows.end);
    while row < end {
        let left = end - row;
        row += match L::REGISTERS {
            // 24 accumulators of 32 registers.
            Registers::ThirtyTwo512 if left >= 12 => {
                kernel.row_tile::<L, 12, 2, true>(l, row);
                12
            }
            // 12 accumulators of 16 registers.
            Registers::Sixteen256 if left >= 6 => {
                kernel.row_tile::<L, 6, 1, true>(l, row);
                6
            }
            Registers::ThirtyTwo512 if left >= 4 => {
                kernel.row_tile::<L, 4, 4, false>(l, row);
                4
            }
            _ if left >= 2 => {
                kernel.row_tile::<L, 2, 2, false>(l, row);
                2
            }
            // One row is bound by memory; four chains hide the multiply-add's latency.
            _ => {
                kernel.row_tile::<L, 1, 4, false>(l, row);
                1
            }
        };
    }
}

/// The tile of the ceilings, whose `MR x NR` chains hide the latency of the instructions and fit in
/// registers; as in [`int8`], an activation that is broadcast serves two panels on wide registers.
#[inline(always)]
pub(in crate::kernels) fn ceiling<L: Lanes>(l: L, kernel: &impl RowTile) {
    match L::REGISTERS {
        Registers::ThirtyTwo512 => kernel.row_tile::<L, 6, 2, false>(l, 0),
        Registers::Sixteen256 => kernel.row_tile::<L, 5, 1, false>(l, 0),
    }
}
