//! `PagedKvCache`: sequences share a pool of fixed-size blocks (after vLLM's PagedAttention, Kwon et
//! al. 2023).
//!
//! A sequence has a block table; blocks are reference-counted, so that a common prefix is stored
//! once, and copied only on write. For each layer a block holds `[kv_heads][block_rows][head_dim]`
//! of K and of V, so each head's part is one contiguous run, which is lent as it is.

use super::kv_cache_trait::{KvCache, KvShape, KvView};
use crate::error::{Error, Result};
use crate::kernels::attention::KvRun;
use crate::tensor::{Buffer, KvDtype, Rows, Tensor};
use crate::threads::Threads;
use half::f16;
use half::slice::HalfFloatSliceExt;
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
struct Block {
    data: BlockData,
    pool: Arc<BlockPool>,
}

impl BlockPool {
    /// A pool of `capacity` blocks of `block_rows` tokens. Memory is claimed as blocks are taken.
    ///
    /// # Errors
    /// `Argument` if either is 0.
    pub fn new(shape: KvShape, dtype: KvDtype, block_rows: usize, capacity: usize) -> Result<Arc<Self>> {
        if block_rows == 0 || capacity == 0 {
            return Err(Error::argument("a block pool needs at least 1 block of at least 1 row"));
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
}

impl PagedKvCache {
    pub fn new(pool: Arc<BlockPool>) -> Self {
        let rows = vec![0; pool.shape.num_layers];
        Self { pool, table: Vec::new(), rows }
    }

    pub fn pool(&self) -> &Arc<BlockPool> {
        &self.pool
    }

    /// Makes sure that this sequence alone holds a block.
    fn make_own(&mut self, index: usize) -> Result<()> {
        if Arc::get_mut(&mut self.table[index]).is_none() {
            let mut fresh = Vec::new();
            self.pool.take(1, &mut fresh)?;
            let mut copy = fresh.remove(0);
            if let Some(block) = Arc::get_mut(&mut copy) {
                block.copy_from(&self.table[index]);
            }
            self.table[index] = copy;
        }
        Ok(())
    }

    fn layer(&self, layer: usize) -> PagedLayer<'_> {
        PagedLayer { table: &self.table, pool: &self.pool, layer, rows: self.rows[layer] }
    }
}

impl KvCache for PagedKvCache {
    fn reserve(&mut self, rows: usize) -> Result<()> {
        let block_rows = self.pool.block_rows;
        let held = self.seq_len();
        let blocks = held.saturating_add(rows).div_ceil(block_rows);
        let missing = blocks.saturating_sub(self.table.len());
        self.pool.take(missing, &mut self.table)?;
        if rows > 0
            && !held.is_multiple_of(block_rows)
            && let Err(error) = self.make_own(held / block_rows)
        {
            self.table.truncate(held.div_ceil(block_rows));
            return Err(error);
        }
        Ok(())
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
        let blocks = (start + k.rows).div_ceil(block_rows);
        let missing = blocks.saturating_sub(self.table.len());
        self.pool.take(missing, &mut self.table)?;
        let touched = start / block_rows..blocks;
        touched.clone().try_for_each(|index| self.make_own(index))?;
        let pool = &self.pool;
        let write = |i: usize, block: &mut Arc<Block>| {
            let index = touched.start + i;
            let first = start.max(index * block_rows);
            let end = (start + k.rows).min((index + 1) * block_rows);
            let Some(block) = Arc::get_mut(block) else {
                unreachable!("made own above");
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
        let shape = self.pool.shape;
        let (rows, width) = (self.rows[layer], shape.head_dim);
        let view = self.layer(layer);
        let gather = |side: usize| {
            let mut out = vec![0.0; rows * shape.kv_width()];
            for (position, row) in out.chunks_exact_mut(shape.kv_width()).enumerate() {
                for (head, row) in row.chunks_exact_mut(width).enumerate() {
                    view.read(side, head, position, row);
                }
            }
            Tensor::from_f32(out, [rows, shape.kv_width()])
        };
        Ok((gather(0)?, gather(1)?))
    }

    fn kv_view(&self, layer: usize) -> Option<KvView<'_>> {
        Some(KvView::paged(self.layer(layer)))
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
        let (pool, table, rows) = (self.pool.clone(), self.table.clone(), self.rows.clone());
        Some(Box::new(Self { pool, table, rows }))
    }

    fn name(&self) -> &'static str {
        "paged"
    }
}

/// One layer of a sequence's blocks.
pub struct PagedLayer<'a> {
    table: &'a [Arc<Block>],
    pool: &'a BlockPool,
    layer: usize,
    rows: usize,
}

impl PagedLayer<'_> {
    pub fn dtype(&self) -> KvDtype {
        self.pool.dtype
    }

    pub(super) fn run_f32(&self, head: usize, position: usize) -> KvRun<'_, f32> {
        match &self.table[position / self.pool.block_rows].data {
            BlockData::F32(values) => self.run(head, position, values),
            BlockData::F16(_) => KvRun { k: &[], v: &[], stride: 0, rows: 0 },
        }
    }

    pub(super) fn run_f16(&self, head: usize, position: usize) -> KvRun<'_, f16> {
        match &self.table[position / self.pool.block_rows].data {
            BlockData::F16(values) => self.run(head, position, values),
            BlockData::F32(_) => KvRun { k: &[], v: &[], stride: 0, rows: 0 },
        }
    }

    fn run<'b, T>(&self, head: usize, position: usize, values: &'b [T]) -> KvRun<'b, T> {
        let (block_rows, stride) = (self.pool.block_rows, self.pool.shape.head_dim);
        let inside = position % block_rows;
        let side = |side| {
            let start = self.pool.offset(self.layer, side, head);
            &values[start + inside * stride..start + block_rows * stride]
        };
        let rows = (block_rows - inside).min(self.rows - position);
        KvRun { k: side(0), v: side(1), stride, rows }
    }

    fn read(&self, side: usize, head: usize, position: usize, out: &mut [f32]) {
        let inside = position % self.pool.block_rows * out.len();
        let start = self.pool.offset(self.layer, side, head) + inside;
        match &self.table[position / self.pool.block_rows].data {
            BlockData::F32(values) => out.copy_from_slice(&values[start..start + out.len()]),
            BlockData::F16(values) => values[start..start + out.len()].convert_to_f32_slice(out),
        }
    }
}
