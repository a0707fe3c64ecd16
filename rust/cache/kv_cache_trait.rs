//! What a KV cache does, and what it lends to attention.

use super::basic::LayerKvState;
use super::paged::PagedLayer;
use crate::error::{Error, Result};
use crate::kernels::attention::{KvRun, KvSource};
use crate::tensor::{KvDtype, Rows, Tensor, TensorData};
use crate::threads::Threads;
use half::f16;

/// The shape of a model's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub num_layers: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
}

impl KvShape {
    /// Columns of a row of all heads.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Bytes that one token takes in all layers, K and V.
    pub fn token_bytes(&self, dtype: KvDtype) -> usize {
        2 * self.num_layers * self.kv_width() * dtype.bytes()
    }
}

/// A cache of keys and values, per layer. Rows of all heads are `[rows, kv_width]` F32.
///
/// Decode pushes first and then borrows the view, so attention always sees the current token.
pub trait KvCache: Send {
    /// Claims room so that `rows` more rows can be pushed to every layer.
    ///
    /// # Errors
    /// `Cache` if the room cannot be had; nothing has changed then.
    fn reserve(&mut self, rows: usize) -> Result<()>;

    /// The first rows of a layer: the prompt's K and V, copied exactly once, by all `threads` if any are
    /// lent.
    ///
    /// # Errors
    /// `Cache` if the layer has rows already or the room cannot be had.
    fn set_prefill(
        &mut self,
        layer: usize,
        k: Rows<'_>,
        v: Rows<'_>,
        threads: Option<&Threads>,
    ) -> Result<()>;

    /// Rows after those that a layer holds: a later chunk of a prompt.
    fn push_rows(&mut self, layer: usize, k: Rows<'_>, v: Rows<'_>, threads: Option<&Threads>) -> Result<()>;

    /// One row, `[kv_width]` each.
    fn push_row(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let row = |data| Rows { data, rows: 1, cols: k.len(), stride: k.len() };
        self.push_rows(layer, row(k), row(v), None)
    }

    /// Copies of a layer's K and V, `[rows, kv_width]` F32 each.
    fn materialize(&self, layer: usize) -> Result<(Tensor, Tensor)>;

    /// A layer's K and V by borrowing. `None`: "I can't lend, materialize instead".
    fn kv_view(&self, layer: usize) -> Option<KvView<'_>> {
        let _ = layer;
        None
    }

    /// Rows that every layer holds.
    fn seq_len(&self) -> usize;

    fn num_layers(&self) -> usize;

    fn shape(&self) -> KvShape;

    fn dtype(&self) -> KvDtype;

    /// Forgets all rows from `rows` on, in every layer.
    fn truncate(&mut self, rows: usize);

    /// Bytes that are claimed for keys and values, used or not. Blocks that several caches share
    /// count in each.
    fn kv_bytes(&self) -> usize;

    /// Another sequence that begins with the same rows and shares their storage, for a cache whose
    /// storage can be shared.
    fn fork(&self) -> Option<Box<dyn KvCache>> {
        None
    }

    /// The name on the command line.
    fn name(&self) -> &'static str;
}

/// Keys and values of one layer, lent: a list of contiguous runs per head.
pub struct KvView<'a>(Lent<'a>);

enum Lent<'a> {
    /// One run per head.
    Contiguous(&'a LayerKvState),
    /// One run per head and block.
    Paged(PagedLayer<'a>),
    /// Rows of all heads, from `materialize`.
    Materialized { k: &'a [f32], v: &'a [f32], kv_width: usize, head_dim: usize },
}

impl<'a> KvView<'a> {
    pub fn contiguous(layer: &'a LayerKvState) -> Self {
        Self(Lent::Contiguous(layer))
    }

    pub fn paged(layer: PagedLayer<'a>) -> Self {
        Self(Lent::Paged(layer))
    }

    /// The fall-back: reads heads out of rows of all heads, `[rows, kv_width]`.
    ///
    /// # Errors
    /// `Argument` if the tensors are not F32.
    pub fn materialized(k: &'a Tensor, v: &'a Tensor, head_dim: usize) -> Result<Self> {
        match (k.data(), v.data()) {
            (TensorData::F32(k_values), TensorData::F32(v_values)) => {
                Ok(Self(Lent::Materialized { k: k_values, v: v_values, kv_width: k.shape()[1], head_dim }))
            }
            _ => Err(Error::argument("materialized K and V must be F32")),
        }
    }

    /// What the runs hold.
    pub fn dtype(&self) -> KvDtype {
        match &self.0 {
            Lent::Contiguous(layer) => layer.dtype(),
            Lent::Paged(layer) => layer.dtype(),
            Lent::Materialized { .. } => KvDtype::F32,
        }
    }

    /// One KV head, for the attention kernels.
    pub fn head(&self, kv_head: usize) -> KvHead<'_> {
        KvHead { view: self, kv_head }
    }
}

/// One KV head of a view.
pub struct KvHead<'a> {
    view: &'a KvView<'a>,
    kv_head: usize,
}

impl KvSource<f32> for KvHead<'_> {
    fn run_from(&self, position: usize) -> KvRun<'_, f32> {
        match &self.view.0 {
            Lent::Contiguous(layer) => layer.run_f32(self.kv_head, position),
            Lent::Paged(layer) => layer.run_f32(self.kv_head, position),
            Lent::Materialized { k, v, kv_width, head_dim } => {
                let start = position * kv_width + self.kv_head * head_dim;
                let rows = k.len() / kv_width - position;
                KvRun { k: &k[start..], v: &v[start..], stride: *kv_width, rows }
            }
        }
    }
}

impl KvSource<f16> for KvHead<'_> {
    fn run_from(&self, position: usize) -> KvRun<'_, f16> {
        match &self.view.0 {
            Lent::Contiguous(layer) => layer.run_f16(self.kv_head, position),
            Lent::Paged(layer) => layer.run_f16(self.kv_head, position),
            Lent::Materialized { .. } => KvRun { k: &[], v: &[], stride: 0, rows: 0 },
        }
    }
}
