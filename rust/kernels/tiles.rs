//! How a matmul is split over threads: every task has a tile of the output, some rows of activations by
//! some groups of 16 output rows of the weights.

use super::isa::lanes::{LANES, Lanes};
use super::ops::float::{load_piece, store_piece};
use crate::threads::Threads;
use std::ops::Range;

/// Bytes of weights that one task reads when there are few rows: small enough to share out evenly,
/// large enough that claiming a task costs nothing beside it.
const TASK_BYTES: usize = 128 << 10;
/// Rows of activations that stay in the second-level cache while a task's weights pass over them.
const ROW_BLOCK: usize = 256;

/// The rows of activations and the groups of 16 output rows of one task.
#[derive(Clone)]
pub(in crate::kernels) struct Tile {
    pub rows: Range<usize>,
    pub groups: Range<usize>,
}

/// Where a product goes, `[m, n]`.
pub enum Output<'a> {
    /// It is written.
    Set(&'a mut [f32]),
    /// It is added, `out + product`.
    Add(&'a mut [f32]),
}

/// An output of rows `stride` apart, of which tasks write disjoint tiles.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct OutputTiles {
    start: *mut f32, // of row `first_row` and group `first_group`
    stride: usize,
    columns: usize, // from `start` on
    first_row: usize,
    first_group: usize,
    add: bool,
}

// SAFETY: tasks write disjoint tiles.
unsafe impl Sync for OutputTiles {}
// SAFETY: as above.
unsafe impl Send for OutputTiles {}

impl OutputTiles {
    /// One tile, `[rows, stride]`.
    pub(in crate::kernels) fn tile(out: &mut [f32], stride: usize, tile: &Tile) -> Self {
        assert!(out.len() >= tile.rows.len() * stride && stride >= tile.groups.len() * LANES);
        let (start, first_row, first_group) = (out.as_mut_ptr(), tile.rows.start, tile.groups.start);
        Self { start, stride, columns: stride, first_row, first_group, add: false }
    }

    #[inline(always)]
    fn at(self, row: usize, group: usize) -> (*mut f32, usize) {
        let column = (group - self.first_group) * LANES;
        let p = self.start.wrapping_add((row - self.first_row) * self.stride + column);
        (p, LANES.min(self.columns - column))
    }

    /// Asks for what [`OutputTiles::store`] will write or add to.
    #[inline(always)]
    pub(in crate::kernels) fn prefetch<L: Lanes>(self, l: L, row: usize, group: usize) {
        l.prefetch(self.at(row, group).0.cast());
    }

    /// # Safety
    /// `row` and `group` are of the output, and no other task uses them.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn store<L: Lanes>(self, l: L, row: usize, group: usize, v: L::F) {
        let (p, n) = self.at(row, group);
        // SAFETY: the row holds `columns` values, of which at most 16 from the group's on are used.
        unsafe {
            let v = if self.add { l.add(load_piece(l, p, n), v) } else { v };
            store_piece(l, p, v, n);
        }
    }
}

/// How `m` rows and `groups` of 16 output rows are split into tasks.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Split {
    m: usize,
    groups: usize,
    groups_per_task: usize,
}

impl Split {
    /// `group_bytes` is the size of 16 output rows of weights. A task takes at most `most` groups of each of
    /// `weights` matrices, and a multiple of as many.
    pub(in crate::kernels) fn new(
        m: usize,
        groups: usize,
        group_bytes: usize,
        weights: usize,
        most: usize,
    ) -> Self {
        // Many rows take pairs of groups together, and want a few of them.
        let (least, most) = if m > 16 { (4, 8) } else { (1, most.min(groups) * weights) };
        let all = (TASK_BYTES / group_bytes).clamp(least, most);
        Self { m, groups, groups_per_task: all.div_ceil(weights).next_multiple_of(weights) }
    }

    pub(in crate::kernels) fn tasks(self) -> usize {
        self.groups.div_ceil(self.groups_per_task) * self.m.div_ceil(ROW_BLOCK)
    }

    pub(in crate::kernels) fn tile(self, task: usize) -> Tile {
        let tasks_across = self.groups.div_ceil(self.groups_per_task);
        let row = task / tasks_across * ROW_BLOCK;
        let group = task % tasks_across * self.groups_per_task;
        Tile {
            rows: row..self.m.min(row + ROW_BLOCK),
            groups: group..self.groups.min(group + self.groups_per_task),
        }
    }
}

/// Calls `run` with every tile of an `[m, n]` output.
pub(in crate::kernels) fn for_each_tile(
    threads: &Threads,
    (m, n): (usize, usize),
    group_bytes: usize,
    out: Output<'_>,
    run: impl Fn(OutputTiles, Tile) + Sync,
) {
    let add = matches!(out, Output::Add(_));
    let (Output::Set(out) | Output::Add(out)) = out;
    assert_eq!(out.len(), m * n);
    let start = out.as_mut_ptr();
    let out = OutputTiles { start, stride: n, columns: n, first_row: 0, first_group: 0, add };
    let groups = n.div_ceil(LANES);
    let split = Split::new(m, groups, group_bytes, 1, groups);
    threads.run(split.tasks(), &|task| run(out, split.tile(task)));
}
