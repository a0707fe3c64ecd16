//! `PagedKvCache`: sequences share a pool of fixed-size blocks (after vLLM's PagedAttention, Kwon et
//! al. 2023).
//!
//! A sequence has a block table; blocks are reference-counted, so that a common prefix is stored
//! once, and copied only on write. For each layer a block holds `[kv_heads][block_rows][head_dim]`
//! of K and of V, so each head's part is one contiguous run, which is lent as it is.

use super::kv_cache::{KvCache, KvShape};
use super::view::{KvView, Lent, RunShape};
use crate::error::{Error, Result};
use crate::kernels::attention::KvRun;
use crate::tensor::{Buffer, KvDtype, Rows, Tensor};
use crate::threads::Threads;
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Blocks of a fixed size, shared by all sequences that were given this pool.
pub struct BlockPool {
    shape: KvShape,
    dtype: KvDtype,
    block_rows: usize,
    capacity: usize,
    state: Mutex<PoolState>,
}

struct PoolState {
    /// Buffers of blocks that were given back.
    free: Vec<BlockData>,
    /// Blocks in use.
    taken: usize,
}

/// `[num_layers][K, V][kv_heads][block_rows][head_dim]`
enum BlockData {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
}

/// A block in use; its buffer goes back to the pool when the last sequence lets go of it.
pub(super) struct Block {
    data: BlockData,
    pool: Arc<BlockPool>,
}

impl BlockPool {
    /// A pool of `capacity` blocks of `block_rows` tokens. Memory is claimed as blocks are taken.
    ///
    /// # Errors
    /// `Argument` if either is 0, or a block is larger than any memory.
    pub fn new(shape: KvShape, dtype: KvDtype, block_rows: usize, capacity: usize) -> Result<Arc<Self>> {
        if block_rows == 0 || capacity == 0 {
            return Err(Error::argument("a block pool needs at least 1 block of at least 1 row"));
        }
        let block_bytes = shape.token_bytes(dtype).checked_mul(block_rows);
        if block_bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::argument(format!("a block of {block_rows} rows is larger than any memory")));
        }
        let state = Mutex::new(PoolState { free: Vec::new(), taken: 0 });
        Ok(Arc::new(Self { shape, dtype, block_rows, capacity, state }))
    }

    pub fn block_rows(&self) -> usize {
        self.block_rows
    }

    /// Blocks in all.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Blocks that no sequence holds.
    pub fn free_blocks(&self) -> usize {
        self.capacity - self.lock().taken
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.shape.token_bytes(self.dtype) * self.block_rows
    }

    /// Takes `count` blocks, or none.
    fn take(self: &Arc<Self>, count: usize, out: &mut Vec<Arc<Block>>) -> Result<()> {
        let mut state = self.lock();
        let free = self.capacity - state.taken;
        if count > free {
            return Err(Error::cache(format!(
                "the block pool is exhausted: {count} more blocks of {} rows are needed, {free} of {} \
                 are free",
                self.block_rows, self.capacity
            )));
        }
        let held = out.len();
        for _ in 0..count {
            let data = match state.free.pop() {
                Some(data) => data,
                None => match self.new_data() {
                    Ok(data) => data,
                    Err(error) => {
                        drop(state);
                        out.truncate(held); // gives back those that were taken
                        return Err(error);
                    }
                },
            };
            state.taken += 1;
            out.push(Arc::new(Block { data, pool: self.clone() }));
        }
        Ok(())
    }

    fn new_data(&self) -> Result<BlockData> {
        let values = self.block_values();
        let failed = |_| Error::cache(format!("no memory for a cache block of {} bytes", self.block_bytes()));
        Ok(match self.dtype {
            KvDtype::F32 => BlockData::F32(Buffer::zeroed(values).map_err(failed)?),
            KvDtype::F16 => BlockData::F16(Buffer::zeroed(values).map_err(failed)?),
        })
    }

    fn block_values(&self) -> usize {
        2 * self.shape.num_layers * self.shape.kv_width() * self.block_rows
    }

    /// Where a head's rows of a layer start in a block; `side` is 0 for K, 1 for V.
    fn offset(&self, layer: usize, side: usize, head: usize) -> usize {
        ((layer * 2 + side) * self.shape.num_key_value_heads + head) * self.block_rows * self.shape.head_dim
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, PoolState> {
        // The counters are right even if a panic went by: nothing below panics half-way.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let empty = BlockData::F32(Buffer::default());
        let mut state = self.pool.lock();
        state.free.push(std::mem::replace(&mut self.data, empty));
        state.taken -= 1;
    }
}

impl Block {
    fn copy_from(&mut self, other: &Block) {
        match (&mut self.data, &other.data) {
            (BlockData::F32(to), BlockData::F32(from)) => to.copy_from_slice(from),
            (BlockData::F16(to), BlockData::F16(from)) => to.copy_from_slice(from),
            _ => unreachable!("a pool has one dtype"),
        }
    }

    fn write(&mut self, at: usize, row: &[f32]) {
        match &mut self.data {
            BlockData::F32(to) => to[at..at + row.len()].copy_from_slice(row),
            BlockData::F16(to) => to[at..at + row.len()].convert_from_f32_slice(row),
        }
    }
}

/// One sequence's block table.
pub struct PagedKvCache {
    pool: Arc<BlockPool>,
    table: Vec<Arc<Block>>,
    rows: Vec<usize>, // [num_layers]
    /// The block that was shared and is now this sequence's own copy, until the pass that copied it
    /// commits: rolled back, it is shared again and the copy is free.
    replaced: Option<(usize, Arc<Block>)>,
}

impl PagedKvCache {
    pub fn new(pool: Arc<BlockPool>) -> Self {
        let rows = vec![0; pool.shape.num_layers];
        Self { pool, table: Vec::new(), rows, replaced: None }
    }

    /// A sequence whose first rows are in blocks that others hold too.
    pub(super) fn starting_with(pool: Arc<BlockPool>, table: Vec<Arc<Block>>, rows: usize) -> Self {
        let rows = vec![rows; pool.shape.num_layers];
        Self { pool, table, rows, replaced: None }
    }

    pub fn pool(&self) -> &Arc<BlockPool> {
        &self.pool
    }

    pub(super) fn blocks_mut(&mut self) -> impl Iterator<Item = &mut Arc<Block>> {
        self.table.iter_mut()
    }

    /// Blocks that `reserve(rows)` would take from the pool.
    pub fn blocks_needed(&mut self, rows: usize) -> usize {
        self.needed(self.seq_len(), rows).iter().sum()
    }

    /// New blocks, and copies of shared ones (at most 1), for `rows` rows after the first `held`.
    fn needed(&mut self, held: usize, rows: usize) -> [usize; 2] {
        let block_rows = self.pool.block_rows;
        let missing = held.saturating_add(rows).div_ceil(block_rows).saturating_sub(self.table.len());
        let first = held / block_rows;
        let shared = rows > 0 && self.table.get_mut(first).is_some_and(|block| Arc::get_mut(block).is_none());
        [missing, usize::from(shared)]
    }

    /// Blocks for `rows` rows after the first `held`, of which the first may be in a block that other
    /// sequences hold too: it is copied.
    fn claim(&mut self, held: usize, rows: usize) -> Result<()> {
        let [missing, copies] = self.needed(held, rows);
        if missing + copies == 0 {
            return Ok(());
        }
        let first = held / self.pool.block_rows;
        self.pool.take(missing + copies, &mut self.table)?;
        if copies > 0
            && let Some(mut copy) = self.table.pop()
        {
            if let Some(block) = Arc::get_mut(&mut copy) {
                block.copy_from(&self.table[first]);
            }
            self.replaced = Some((first, std::mem::replace(&mut self.table[first], copy)));
        }
        Ok(())
    }

    fn read(&self, side: usize, layer: usize, head: usize, position: usize, out: &mut [f32]) {
        let inside = position % self.pool.block_rows * out.len();
        let start = self.pool.offset(layer, side, head) + inside;
        match &self.table[position / self.pool.block_rows].data {
            BlockData::F32(values) => out.copy_from_slice(&values[start..start + out.len()]),
            BlockData::F16(values) => values[start..start + out.len()].convert_to_f32_slice(out),
        }
    }

    /// Where run `i` of `[kv_heads][blocks]` is: its block, and its K and its V in there.
    fn run(&self, layer: usize, i: usize) -> (usize, [Range<usize>; 2]) {
        let (head, block) = (i / self.table.len(), i % self.table.len());
        let part = |side| {
            let start = self.pool.offset(layer, side, head);
            start..start + self.pool.block_rows * self.pool.shape.head_dim
        };
        (block, [part(0), part(1)])
    }
}

impl KvCache for PagedKvCache {
    fn reserve(&mut self, rows: usize) -> Result<()> {
        self.replaced = None; // of a pass before, which nobody rolls back any more
        self.claim(self.seq_len(), rows)
    }

    fn commit(&mut self) {
        self.replaced = None;
    }

    fn roll_back(&mut self, rows: usize) {
        self.truncate(rows);
        if let Some((index, block)) = self.replaced.take() {
            self.table[index] = block;
        }
    }

    fn set_prefill(
        &mut self,
        layer: usize,
        k: Rows<'_>,
        v: Rows<'_>,
        threads: Option<&Threads>,
    ) -> Result<()> {
        if self.rows[layer] != 0 {
            return Err(Error::cache(format!("layer {layer} has been prefilled already")));
        }
        self.push_rows(layer, k, v, threads)
    }

    fn push_rows(&mut self, layer: usize, k: Rows<'_>, v: Rows<'_>, threads: Option<&Threads>) -> Result<()> {
        let (block_rows, width) = (self.pool.block_rows, self.pool.shape.head_dim);
        let start = self.rows[layer];
        self.claim(start, k.rows)?;
        let touched = start / block_rows..(start + k.rows).div_ceil(block_rows);
        let pool = &self.pool;
        let write = |i: usize, block: &mut Arc<Block>| {
            let index = touched.start + i;
            let first = start.max(index * block_rows);
            let end = (start + k.rows).min((index + 1) * block_rows);
            let Some(block) = Arc::get_mut(block) else {
                unreachable!("claimed above");
            };
            for (side, rows) in [k, v].into_iter().enumerate() {
                for head in 0..pool.shape.num_key_value_heads {
                    let at = pool.offset(layer, side, head);
                    for position in first..end {
                        let row = &rows.row(position - start)[head * width..(head + 1) * width];
                        block.write(at + position % block_rows * width, row);
                    }
                }
            }
        };
        let table = &mut self.table[touched.clone()];
        match threads {
            Some(threads) => threads.for_each_mut(table, write),
            None => table.iter_mut().enumerate().for_each(|(i, block)| write(i, block)),
        }
        self.rows[layer] += k.rows;
        Ok(())
    }

    fn materialize(&self, layer: usize) -> Result<(Tensor, Tensor)> {
        let KvShape { num_key_value_heads: heads, head_dim, .. } = self.pool.shape;
        let gather = |side: usize| {
            Tensor::gather_heads(self.rows[layer], heads, head_dim, |head, position, out| {
                self.read(side, layer, head, position, out);
                Ok(())
            })
        };
        Ok((gather(0)?, gather(1)?))
    }

    fn kv_view<'a>(&'a self, layer: usize, lent: &mut Lent<'a>) -> Result<Option<KvView>> {
        let KvShape { num_key_value_heads: heads, head_dim: stride, .. } = self.pool.shape;
        let shape = RunShape { run_rows: self.pool.block_rows, stride, rows: self.rows[layer] };
        let runs = (0..heads * self.table.len()).map(|i| self.run(layer, i));
        let view = match self.pool.dtype {
            KvDtype::F32 => {
                let values = |block: usize| match &self.table[block].data {
                    BlockData::F32(values) => values,
                    BlockData::F16(_) => unreachable!("a pool has one dtype"),
                };
                lent.lend_f32(
                    shape,
                    heads,
                    runs.map(|(block, [k, v])| KvRun { k: &values(block)[k], v: &values(block)[v] }),
                )
            }
            KvDtype::F16 => {
                let values = |block: usize| match &self.table[block].data {
                    BlockData::F16(values) => values,
                    BlockData::F32(_) => unreachable!("a pool has one dtype"),
                };
                lent.lend_f16(
                    shape,
                    heads,
                    runs.map(|(block, [k, v])| KvRun { k: &values(block)[k], v: &values(block)[v] }),
                )
            }
        };
        view.map(Some)
    }

    fn seq_len(&self) -> usize {
        self.rows.last().copied().unwrap_or(0)
    }

    fn num_layers(&self) -> usize {
        self.rows.len()
    }

    fn shape(&self) -> KvShape {
        self.pool.shape
    }

    fn dtype(&self) -> KvDtype {
        self.pool.dtype
    }

    fn truncate(&mut self, rows: usize) {
        self.rows.iter_mut().for_each(|held| *held = rows.min(*held));
        self.table.truncate(rows.div_ceil(self.pool.block_rows));
    }

    fn kv_bytes(&self) -> usize {
        self.table.len() * self.pool.block_bytes()
    }

    /// Nothing is copied until one of the two writes into a block that both hold.
    fn fork(&self) -> Option<Box<dyn KvCache>> {
        let used = self.seq_len().div_ceil(self.pool.block_rows);
        let (pool, table, rows) = (self.pool.clone(), self.table[..used].to_vec(), self.rows.clone());
        Some(Box::new(Self { pool, table, rows, replaced: None }))
    }

    fn name(&self) -> &'static str {
        "paged"
    }
}
