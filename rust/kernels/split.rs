//! How a matmul is split over threads: every task has a tile of the output, some rows of activations by
//! some panels of 16 output rows of the weights.

use super::isa::lanes::{LANES, Lanes};
use super::ops::pieces::{load_piece, store_piece};
use super::tiles::{MANY_ROWS, MANY_ROWS_PANELS, TASK_BYTES, TASK_ROWS};
use crate::threads::{Disjoint, Threads};
use std::ops::Range;

/// The rows of activations and the panels of one task.
#[derive(Clone)]
pub(in crate::kernels) struct Tile {
    pub rows: Range<usize>,
    pub panels: Range<usize>,
}

/// Where a product goes, `[m, n]`.
pub enum Destination<'a> {
    /// `out = product`.
    Overwrite(&'a mut [f32]),
    /// `out = out + product`.
    Accumulate(&'a mut [f32]),
}

/// An output of rows `stride` apart, of which tasks write disjoint tiles.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct OutputTiles<'a> {
    values: Disjoint<'a, f32>, // from row `first_row` and panel `first_panel` on
    stride: usize,
    columns: usize, // from `first_panel` on
    first_row: usize,
    first_panel: usize,
    accumulate: bool,
}

impl<'a> OutputTiles<'a> {
    /// One tile, `[rows, stride]`.
    pub(in crate::kernels) fn tile(out: &'a mut [f32], stride: usize, tile: &Tile) -> Self {
        assert!(out.len() >= tile.rows.len() * stride && stride >= tile.panels.len() * LANES);
        Self {
            values: Disjoint::new(out),
            stride,
            columns: stride,
            first_row: tile.rows.start,
            first_panel: tile.panels.start,
            accumulate: false,
        }
    }

    #[inline(always)]
    fn at(self, row: usize, panel: usize) -> (*mut f32, usize) {
        let column = (panel - self.first_panel) * LANES;
        let p = self.values.at((row - self.first_row) * self.stride + column);
        (p, LANES.min(self.columns - column))
    }

    /// Prefetches what [`OutputTiles::store`] will write or add to.
    #[inline(always)]
    pub(in crate::kernels) fn prefetch<L: Lanes>(self, l: L, row: usize, panel: usize) {
        l.prefetch(self.at(row, panel).0.cast());
    }

    /// # Safety
    /// `row` and `panel` are of the output, and no other task uses them.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn store<L: Lanes>(self, l: L, row: usize, panel: usize, v: L::F) {
        let (p, n) = self.at(row, panel);
        // SAFETY: the row holds `columns` values, of which at most 16 from the panel's on are used.
        unsafe {
            let v = if self.accumulate { l.add(load_piece(l, p, n), v) } else { v };
            store_piece(l, p, v, n);
        }
    }
}

/// How `m` rows and `panels` of weights are split into tasks.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Split {
    m: usize,
    panels: usize,
    panels_per_task: usize,
}

impl Split {
    /// For `matrices` weights of the same shape that a task multiplies with together: 1, or 2 of a gated
    /// pair. `panel_bytes` is the size of a panel of one of them.
    ///
    /// A task with few rows takes the panels that hold [`TASK_BYTES`] of all matrices together, at least one
    /// and at most `most_panels` of each; with many rows a few. Of each matrix it takes the same panels, and
    /// a multiple of `matrices`: a gated pair's task leaves an even number, which are whole quant blocks of
    /// 32 columns.
    pub(in crate::kernels) fn new(
        m: usize,
        panels: usize,
        panel_bytes: usize,
        matrices: usize,
        most_panels: usize,
    ) -> Self {
        let few_rows = (1, most_panels.min(panels) * matrices);
        let (least, most) = if m >= MANY_ROWS { MANY_ROWS_PANELS } else { few_rows };
        let of_all = (TASK_BYTES / panel_bytes).clamp(least, most);
        Self { m, panels, panels_per_task: of_all.div_ceil(matrices).next_multiple_of(matrices) }
    }

    pub(in crate::kernels) fn tasks(self) -> usize {
        self.panels.div_ceil(self.panels_per_task) * self.m.div_ceil(TASK_ROWS)
    }

    pub(in crate::kernels) fn tile(self, task: usize) -> Tile {
        let tasks_across = self.panels.div_ceil(self.panels_per_task);
        let row = task / tasks_across * TASK_ROWS;
        let panel = task % tasks_across * self.panels_per_task;
        Tile {
            rows: row..self.m.min(row + TASK_ROWS),
            panels: panel..self.panels.min(panel + self.panels_per_task),
        }
    }
}

/// Calls `multiply` with every tile of an `[m, n]` output.
pub(in crate::kernels) fn for_each_tile(
    threads: &Threads,
    (m, n): (usize, usize),
    panel_bytes: usize,
    out: Destination<'_>,
    multiply: impl Fn(OutputTiles<'_>, Tile) + Sync,
) {
    let accumulate = matches!(out, Destination::Accumulate(_));
    let (Destination::Overwrite(out) | Destination::Accumulate(out)) = out;
    assert_eq!(out.len(), m * n);
    let values = Disjoint::new(out);
    let out = OutputTiles { values, stride: n, columns: n, first_row: 0, first_panel: 0, accumulate };
    let panels = n.div_ceil(LANES);
    let split = Split::new(m, panels, panel_bytes, 1, panels);
    threads.run(split.tasks(), &|task| multiply(out, split.tile(task)));
}
