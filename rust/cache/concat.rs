//! `ConcatKvCache`: the old cache, kept as the baseline that the zero-copy one is measured against.
//!
//! Every push makes a new tensor one row taller, copies the whole cache into it and drops the old
//! one; every read (`materialize`) clones both tensors again. It lends nothing.

use super::kv_cache::{KvCache, KvShape};
use crate::backend::{Op, Profiler};
use crate::error::{Error, Result};
use crate::tensor::{KvDtype, Rows, Tensor};
use crate::threads::Threads;
use std::sync::Arc;

pub struct ConcatKvCache {
    layers: Vec<(Tensor, Tensor)>, // K and V, [rows, kv_width] each
    shape: KvShape,
    dtype: KvDtype,
    profiler: Arc<Profiler>,
}

impl ConcatKvCache {
    /// `profiler` counts the `concat_dim0` calls.
    pub fn new(shape: KvShape, dtype: KvDtype, profiler: Arc<Profiler>) -> Self {
        let empty = || Tensor::empty_rows_of(dtype, shape.kv_width());
        let layers = (0..shape.num_layers).map(|_| (empty(), empty())).collect();
        Self { layers, shape, dtype, profiler }
    }

    /// Rows as a tensor of this cache's dtype.
    fn tensor(&self, rows: Rows<'_>) -> Result<Tensor> {
        let mut tensor = Tensor::empty_rows_of(self.dtype, rows.cols);
        tensor.reserve_rows(rows.rows)?;
        tensor.append(rows)?;
        Ok(tensor)
    }
}

impl KvCache for ConcatKvCache {
    fn reserve(&mut self, _rows: usize) -> Result<()> {
        Ok(()) // it grows by copying, whatever is coming
    }

    fn set_prefill(
        &mut self,
        layer: usize,
        k: Rows<'_>,
        v: Rows<'_>,
        _threads: Option<&Threads>,
    ) -> Result<()> {
        if self.layers[layer].0.shape()[0] != 0 {
            return Err(Error::cache(format!("layer {layer} has been prefilled already")));
        }
        self.layers[layer] = (self.tensor(k)?, self.tensor(v)?);
        Ok(())
    }

    fn push_rows(
        &mut self,
        layer: usize,
        k: Rows<'_>,
        v: Rows<'_>,
        _threads: Option<&Threads>,
    ) -> Result<()> {
        let (k, v) = (self.tensor(k)?, self.tensor(v)?);
        let (old_k, old_v) = &self.layers[layer];
        let joined = (
            self.profiler.time(Op::ConcatDim0, || Tensor::concat_dim0(old_k, &k))?,
            self.profiler.time(Op::ConcatDim0, || Tensor::concat_dim0(old_v, &v))?,
        );
        self.layers[layer] = joined;
        Ok(())
    }

    fn materialize(&self, layer: usize) -> Result<(Tensor, Tensor)> {
        let widen = |t: &Tensor| Tensor::from_f32(t.to_f32()?, t.shape());
        let (k, v) = &self.layers[layer];
        Ok((widen(k)?, widen(v)?))
    }

    fn seq_len(&self) -> usize {
        self.layers.last().map_or(0, |(_, v)| v.shape()[0])
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
        for (k, v) in &mut self.layers {
            k.truncate_rows(rows);
            v.truncate_rows(rows);
        }
    }

    fn kv_bytes(&self) -> usize {
        let both = |(k, v): &(Tensor, Tensor)| k.capacity_bytes() + v.capacity_bytes();
        self.layers.iter().map(both).sum()
    }

    fn name(&self) -> &'static str {
        "concat"
    }
}
