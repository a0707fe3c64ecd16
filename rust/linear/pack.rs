//! From a checkpoint's tensors to packed weights, in one pass over their bytes.

use super::arena::Arena;
use super::format::Scratch;
use super::weight::{Linear, WeightDtype};
use crate::error::{Error, Result};
use crate::kernels::finite::AllFinite;
use crate::kernels::{Isa, LANES};
use crate::tensor::{StoredTensor, try_resize};
use crate::threads::Threads;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Groups of 16 rows that a task packs.
const GROUPS_PER_TASK: usize = 8;
/// Values that are packed between two looks at whether to go on: a few milliseconds' work.
const SLAB_VALUES: usize = 2 << 20;

/// Packs weights one after another into an arena.
pub struct Packer<'a> {
    arena: Arena,
    isa: Isa,
    threads: &'a Threads,
    /// One for each worker, made when it is first needed.
    idle: Mutex<Vec<Scratch>>,
}

/// Some groups and their part of each plane.
struct Task<'a> {
    groups: Range<usize>,
    planes: [&'a mut [u8]; 2],
    result: Result<()>,
}

impl<'a> Packer<'a> {
    /// `bytes` is the sum of [`WeightDtype::packed_bytes`] of all weights to come.
    ///
    /// # Errors
    /// `Memory` if it cannot be had.
    pub fn new(bytes: usize, isa: Isa, threads: &'a Threads) -> Result<Self> {
        Ok(Self { arena: Arena::new(bytes)?, isa, threads, idle: Mutex::default() })
    }

    /// The arena with all that was packed.
    pub fn finish(self) -> Arena {
        self.arena
    }

    /// Packs the rows of `tensors`, one below the other, as one weight. `go_on` is told every few
    /// milliseconds which share of the arena is filled, and may end the work.
    ///
    /// # Errors
    /// `Model` for a value that is NaN or infinite, or would be in this format: the message names tensor
    /// and row. `File` if the tensors cannot be read; `Memory`; what `go_on` returns.
    pub fn pack(
        &mut self,
        tensors: &[StoredTensor<'_>],
        dtype: WeightDtype,
        go_on: &dyn Fn(f64) -> Result<()>,
    ) -> Result<Linear> {
        let k = tensors[0].cols;
        assert!(tensors.iter().all(|tensor| tensor.cols == k));
        let n = tensors.iter().map(|tensor| tensor.rows).sum::<usize>();
        let groups = n.div_ceil(LANES);
        let before = self.arena.used_share();
        let planes = dtype.0.group_bytes(k).map(|bytes| self.arena.take(groups * bytes));
        let after = self.arena.used_share();
        let weight = Linear { n, k, dtype, planes };
        let slab = (SLAB_VALUES / (LANES * k)).max(1);
        for first in (0..groups).step_by(slab) {
            let end = groups.min(first + slab);
            self.pack_groups(&weight, tensors, first..end)?;
            go_on(before + (after - before) * (end as f64 / groups as f64))?;
        }
        Ok(weight)
    }

    fn pack_groups(
        &mut self,
        weight: &Linear,
        tensors: &[StoredTensor<'_>],
        groups: Range<usize>,
    ) -> Result<()> {
        let (arena, isa, threads, idle) = (&mut self.arena, self.isa, self.threads, &self.idle);
        let bytes = weight.dtype.0.group_bytes(weight.k);
        let mut planes = arena.slices_mut([0, 1].map(|i| {
            let start = weight.planes[i].start;
            start + groups.start * bytes[i]..start + groups.end * bytes[i]
        }));
        let mut tasks = Vec::new();
        let count = groups.len().div_ceil(GROUPS_PER_TASK);
        tasks.try_reserve_exact(count).map_err(|_| Error::Memory(count * size_of::<Task>()))?;
        for first in groups.clone().step_by(GROUPS_PER_TASK) {
            let groups = first..groups.end.min(first + GROUPS_PER_TASK);
            let planes = [0, 1].map(|i| {
                let (own, rest) = std::mem::take(&mut planes[i]).split_at_mut(groups.len() * bytes[i]);
                planes[i] = rest;
                own
            });
            tasks.push(Task { groups, planes, result: Ok(()) });
        }
        threads.for_each_mut(&mut tasks, |_, task| {
            let lock = || idle.lock().unwrap_or_else(PoisonError::into_inner);
            let mut scratch = lock().pop().unwrap_or_default();
            task.result = task.run(weight, tensors, isa, &mut scratch);
            lock().push(scratch);
        });
        tasks.into_iter().try_for_each(|task| task.result)
    }
}

impl Task<'_> {
    fn run(
        &mut self,
        weight: &Linear,
        tensors: &[StoredTensor<'_>],
        isa: Isa,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let format = weight.dtype.0;
        let bytes = format.group_bytes(weight.k);
        for (i, group) in self.groups.clone().enumerate() {
            let rows = group * LANES..weight.n.min((group + 1) * LANES);
            widen(tensors, rows.clone(), format.padded(weight.k), isa, scratch)?;
            let [first, second] = &mut self.planes;
            let planes =
                [&mut first[i * bytes[0]..(i + 1) * bytes[0]], &mut second[i * bytes[1]..(i + 1) * bytes[1]]];
            if let Some(lane) = format.pack_group(isa, scratch, planes)? {
                let row = rows.start + lane;
                let (tensor, part) = parts(tensors, row..row + 1).next().unwrap_or((&tensors[0], 0..1));
                return Err(tensor.error(format_args!(
                    "row {} holds a value too large for {}; dtype f32 holds every value",
                    part.start,
                    format.name()
                )));
            }
        }
        Ok(())
    }
}

/// Rows `rows`, at most 16, to `scratch.wide` `[16][padded]`; the rest is zeros.
fn widen(
    tensors: &[StoredTensor<'_>],
    rows: Range<usize>,
    padded: usize,
    isa: Isa,
    scratch: &mut Scratch,
) -> Result<()> {
    try_resize(&mut scratch.wide, LANES * padded)?;
    let mut wide = scratch.wide.chunks_exact_mut(padded);
    for (tensor, part) in parts(tensors, rows) {
        let width = tensor.cols * tensor.dtype.bytes();
        let stored = tensor.read_rows(part.clone(), &mut scratch.stored)?;
        for ((r, stored), wide) in part.zip(stored.chunks_exact(width)).zip(&mut wide) {
            let (row, padding) = wide.split_at_mut(tensor.cols);
            tensor.dtype.widen(stored, row);
            padding.fill(0.0);
            if !isa.run(AllFinite { x: row }) {
                return Err(tensor.error(format_args!("row {r} holds NaN or infinity")));
            }
        }
    }
    wide.for_each(|row| row.fill(0.0));
    Ok(())
}

/// The parts of `tensors`, which stand one below the other, that rows `range` cover.
fn parts<'s, 'a>(
    tensors: &'s [StoredTensor<'a>],
    range: Range<usize>,
) -> impl Iterator<Item = (&'s StoredTensor<'a>, Range<usize>)> {
    let mut start = 0;
    tensors.iter().filter_map(move |tensor| {
        let here = start..start + tensor.rows;
        start = here.end;
        let part = range.start.max(here.start)..range.end.min(here.end);
        (!part.is_empty()).then(|| (tensor, part.start - here.start..part.end - here.start))
    })
}
