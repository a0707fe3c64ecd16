//! `BasicKvCache`: storage that grows in place and is read by borrowing.

use super::kv_cache::{KvCache, KvShape};
use super::view::{KvView, Lent, RunShape};
use crate::error::{Error, Result};
use crate::kernels::attention::KvRun;
use crate::tensor::{KvDtype, Rows, Tensor, TensorData};
use crate::threads::Threads;

/// Rows that are claimed beyond the prompt, so that so many tokens can be generated before storage
/// must grow.
pub const KV_HEADROOM_ROWS: usize = 512;

/// Keys and values of one layer: one growable tensor `[rows, head_dim]` per KV head, K and V, so
/// that each head's positions are contiguous.
pub struct LayerKvState {
    k: Vec<Tensor>, // [num_key_value_heads] of [rows, head_dim]
    v: Vec<Tensor>, // [num_key_value_heads] of [rows, head_dim]
    dtype: KvDtype,
}

impl LayerKvState {
    pub fn new(shape: KvShape, dtype: KvDtype) -> Self {
        let heads =
            || (0..shape.num_key_value_heads).map(|_| Tensor::empty_rows_of(dtype, shape.head_dim)).collect();
        Self { k: heads(), v: heads(), dtype }
    }

    pub fn rows(&self) -> usize {
        // V is appended last: a row counts when all of it is there.
        self.v.last().map_or(0, |v| v.shape()[0])
    }

    /// Appends rows of all heads, `[rows, kv_width]`, the heads side by side if there are threads.
    pub fn append(&mut self, k: Rows<'_>, v: Rows<'_>, threads: Option<&Threads>) -> Result<()> {
        let heads = self.k.len();
        let width = k.cols / heads;
        let part = |i: usize| if i < heads { k } else { v }.columns(i % heads * width, width);
        let Some(threads) = threads else {
            return self.tensors().enumerate().try_for_each(|(i, tensor)| tensor.append(part(i)));
        };
        let mut tasks: Vec<_> = self.tensors().map(|tensor| (tensor, Ok(()))).collect();
        threads.for_each_mut(&mut tasks, |i, (tensor, result)| *result = tensor.append(part(i)));
        tasks.into_iter().try_for_each(|(_, result)| result)
    }

    pub fn truncate(&mut self, rows: usize) {
        self.tensors().for_each(|t| t.truncate_rows(rows));
    }

    pub fn capacity_bytes(&self) -> usize {
        self.k.iter().chain(&self.v).map(Tensor::capacity_bytes).sum()
    }

    /// Copies K and V to rows of all heads, `[rows, kv_width]` F32.
    ///
    /// # Errors
    /// `Memory`.
    pub fn materialize(&self) -> Result<(Tensor, Tensor)> {
        let gather = |heads: &[Tensor]| {
            Tensor::gather_heads(self.rows(), heads.len(), heads[0].shape()[1], |head, r, out| {
                heads[head].read_row(r, out)
            })
        };
        Ok((gather(&self.k)?, gather(&self.v)?))
    }

    /// Lends each head's rows in one run.
    fn lend<'a>(&'a self, lent: &mut Lent<'a>) -> Result<KvView> {
        let ([rows, stride], heads) = (self.v[0].shape(), self.k.len());
        let shape = RunShape { run_rows: rows, stride, rows };
        let both = self.k.iter().zip(&self.v);
        match self.dtype {
            KvDtype::F32 => {
                let values = |t: &'a Tensor| match t.data() {
                    TensorData::F32(values) => &values[..],
                    _ => unreachable!("all tensors of a layer are of its dtype"),
                };
                lent.lend_f32(shape, heads, both.map(|(k, v)| KvRun { k: values(k), v: values(v) }))
            }
            KvDtype::F16 => {
                let values = |t: &'a Tensor| match t.data() {
                    TensorData::F16(values) => &values[..],
                    _ => unreachable!("all tensors of a layer are of its dtype"),
                };
                lent.lend_f16(shape, heads, both.map(|(k, v)| KvRun { k: values(k), v: values(v) }))
            }
        }
    }

    fn tensors(&mut self) -> impl Iterator<Item = &mut Tensor> {
        self.k.iter_mut().chain(&mut self.v)
    }
}

/// The zero-copy cache: a prompt is copied in once, a decoded row is appended in place, attention
/// reads by borrowing.
pub struct BasicKvCache {
    layers: Vec<LayerKvState>,
    shape: KvShape,
    dtype: KvDtype,
}

impl BasicKvCache {
    pub fn new(shape: KvShape, dtype: KvDtype) -> Self {
        let layers = (0..shape.num_layers).map(|_| LayerKvState::new(shape, dtype)).collect();
        Self { layers, shape, dtype }
    }
}

impl KvCache for BasicKvCache {
    fn reserve(&mut self, rows: usize) -> Result<()> {
        let held = self.seq_len();
        let wanted = match held {
            0 => rows.saturating_add(KV_HEADROOM_ROWS),
            // Room for a later chunk grows as `append` grows: by doubling, so that a prompt in
            // chunks of one is not copied for every chunk.
            _ => rows.max(held),
        };
        for layer in &mut self.layers {
            for tensor in layer.tensors() {
                if tensor.capacity_rows() < held + rows {
                    tensor.reserve_rows(wanted)?;
                }
            }
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
        let state = &mut self.layers[layer];
        if state.rows() != 0 {
            return Err(Error::cache(format!("layer {layer} has been prefilled already")));
        }
        for tensor in state.tensors() {
            if tensor.capacity_rows() < k.rows + KV_HEADROOM_ROWS {
                tensor.reserve_rows(k.rows + KV_HEADROOM_ROWS)?;
            }
        }
        state.append(k, v, threads)
    }

    fn push_rows(&mut self, layer: usize, k: Rows<'_>, v: Rows<'_>, threads: Option<&Threads>) -> Result<()> {
        self.layers[layer].append(k, v, threads)
    }

    fn materialize(&self, layer: usize) -> Result<(Tensor, Tensor)> {
        self.layers[layer].materialize()
    }

    fn kv_view<'a>(&'a self, layer: usize, lent: &mut Lent<'a>) -> Result<Option<KvView>> {
        self.layers[layer].lend(lent).map(Some)
    }

    fn seq_len(&self) -> usize {
        self.layers.last().map_or(0, LayerKvState::rows)
    }

    fn num_layers(&self) -> usize {
        self.layers.len()
    }

    fn shape(&self) -> KvShape {
        self.shape
    }

    fn dtype(&self) -> KvDtype {
        self.dtype
    }

    fn truncate(&mut self, rows: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(rows));
    }

    fn kv_bytes(&self) -> usize {
        self.layers.iter().map(LayerKvState::capacity_bytes).sum()
    }

    fn name(&self) -> &'static str {
        "basic"
    }
}
