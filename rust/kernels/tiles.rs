//! All choices of tile sizes and prefetch distances of the matmuls, and the tiles of attention, with their
//! reasons. An instruction set names one [`Tiles`] of this file: its own, or one that it shares.
//!
//! A product is cut three times: into tasks for threads (`split`), a task's rows into row tiles, and a row
//! tile, panel by panel, into micro-tiles of `MR` rows of activations by `NR` panels of 16 output rows,
//! whose accumulators stay in registers over all of `k`.

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

/// Values of padding between rows of float activations, one line of 64 bytes: a micro-tile's rows are read
/// side by side, and a stride of a multiple of 4 KiB would put them all into the same few cache sets.
pub const ROW_PADDING: usize = 16;

/// Prefetch distance of float weights under many rows, in values of `k`: from the second-level cache, whose
/// latency the micro-tile's own loads do not hide.
pub(in crate::kernels) const FLOAT_PREFETCH: usize = 16;
/// Prefetch distances of quantized weights, in bytes: first from memory into the second-level cache, then into
/// the first, which has too few line-fill buffers to hide the memory's latency alone.
pub(in crate::kernels) const INT8_PREFETCH_L2: usize = 8192;
pub(in crate::kernels) const INT8_PREFETCH_L1: usize = 1024;

/// A kernel that works on row tiles of several sizes.
pub trait RowTile {
    /// `MR` rows from `row` on, by all panels, `NR` at a time; with or without prefetching weights. Returns
    /// `MR`.
    fn row_tile<const MR: usize, const NR: usize, const PREFETCH: bool>(&self, row: usize) -> usize;
}

/// Prefill's attention, which works on tiles of several sizes.
pub trait QueryTile {
    /// Tiles of `M` queries by `N` vectors of 16 positions, or of 16 values of a row of V; `N` divides 4.
    fn query_tile<const M: usize, const N: usize>(self);
}

/// The tiles of one kind of registers.
pub trait Tiles {
    /// The next row tile of a matmul with quantized weights, from `row` on, where `left` rows are left: how many
    /// it has.
    ///
    /// Weights are prefetched where the hardware does not look far enough ahead: not with one row on wide
    /// registers, where reading is all there is to do, and not with many, whose weights come from a cache.
    fn int8(kernel: &impl RowTile, row: usize, left: usize) -> usize;
    /// The next row tile of a matmul with float weights, as in [`Tiles::int8`].
    fn float(kernel: &impl RowTile, row: usize, left: usize) -> usize;
    /// The tile of the ceilings, whose `MR x NR` chains hide the latency of the instructions and fit in
    /// registers.
    fn ceiling(kernel: &impl RowTile);
    /// The tile of prefill's attention.
    fn prefill_attention(kernel: impl QueryTile);
    /// Whether the weighted sums of V of two heads of 128 stay in registers (16 vectors), or a quarter of them.
    const TWO_HEADS: bool;
}

/// 16 registers that hold half of a 16-lane vector each (AVX2, and the portable code).
pub enum Sixteen256 {}

impl Tiles for Sixteen256 {
    #[inline(always)]
    fn int8(kernel: &impl RowTile, row: usize, left: usize) -> usize {
        match left {
            4.. => kernel.row_tile::<4, 1, true>(row),
            2.. => kernel.row_tile::<2, 1, true>(row),
            _ => kernel.row_tile::<1, 1, true>(row),
        }
    }

    #[inline(always)]
    fn float(kernel: &impl RowTile, row: usize, left: usize) -> usize {
        match left {
            6.. => kernel.row_tile::<6, 1, true>(row), // 12 accumulators
            2.. => kernel.row_tile::<2, 2, false>(row),
            // One row is bound by memory; four chains hide the multiply-add's latency.
            _ => kernel.row_tile::<1, 4, false>(row),
        }
    }

    #[inline(always)]
    fn ceiling(kernel: &impl RowTile) {
        kernel.row_tile::<5, 1, false>(0);
    }

    #[inline(always)]
    fn prefill_attention(kernel: impl QueryTile) {
        kernel.query_tile::<4, 1>(); // 8 accumulators
    }

    const TWO_HEADS: bool = false;
}

/// 32 registers that hold a whole 16-lane vector each (AVX-512).
#[cfg(target_arch = "x86_64")]
pub enum ThirtyTwo512 {}

#[cfg(target_arch = "x86_64")]
impl Tiles for ThirtyTwo512 {
    #[inline(always)]
    fn int8(kernel: &impl RowTile, row: usize, left: usize) -> usize {
        match left {
            8 => kernel.row_tile::<8, 1, true>(row),
            // 12 integer and 12 float accumulators; an activation that is broadcast serves two panels, so
            // that loads keep up with the dot products.
            6.. => kernel.row_tile::<6, 2, false>(row),
            4.. => kernel.row_tile::<4, 2, true>(row),
            2.. => kernel.row_tile::<2, 1, true>(row),
            // One row is bound by memory; several chains hide the dot product's latency.
            _ => kernel.row_tile::<1, 4, false>(row),
        }
    }

    #[inline(always)]
    fn float(kernel: &impl RowTile, row: usize, left: usize) -> usize {
        match left {
            12.. => kernel.row_tile::<12, 2, true>(row), // 24 accumulators
            4.. => kernel.row_tile::<4, 4, false>(row),
            2.. => kernel.row_tile::<2, 2, false>(row),
            // As above.
            _ => kernel.row_tile::<1, 4, false>(row),
        }
    }

    #[inline(always)]
    fn ceiling(kernel: &impl RowTile) {
        kernel.row_tile::<6, 2, false>(0); // as in a matmul, an activation serves two panels
    }

    #[inline(always)]
    fn prefill_attention(kernel: impl QueryTile) {
        kernel.query_tile::<12, 2>(); // 24 accumulators
    }

    const TWO_HEADS: bool = true;
}
