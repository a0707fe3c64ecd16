//! What a KV cache does.

use super::view::{KvView, Lent};
use crate::error::Result;
use crate::tensor::{KvDtype, Rows, Tensor};
use crate::threads::Threads;

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
/// Decode pushes first and then borrows the view, so attention always sees the current token. A pass
/// reserves, pushes to every layer, and then commits; one that fails rolls back instead.
pub trait KvCache: Send {
    /// Claims room so that `rows` more rows can be pushed to every layer.
    ///
    /// # Errors
    /// `Cache` if the room cannot be had; nothing has changed then.
    fn reserve(&mut self, rows: usize) -> Result<()>;

    /// The rows that were pushed since [`KvCache::reserve`] stay.
    fn commit(&mut self) {}

    /// Forgets all rows from `rows` on, which were pushed since [`KvCache::reserve`], and gives back the
    /// blocks that it took.
    fn roll_back(&mut self, rows: usize) {
        self.truncate(rows);
    }

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
    ///
    /// # Errors
    /// `Cache` if the room cannot be had.
    fn push_rows(&mut self, layer: usize, k: Rows<'_>, v: Rows<'_>, threads: Option<&Threads>) -> Result<()>;

    /// One row after those that a layer holds, `[kv_width]` each: a decode step.
    ///
    /// # Errors
    /// As [`KvCache::push_rows`].
    fn push_row(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let row = |data| Rows { data, rows: 1, cols: k.len(), stride: k.len() };
        self.push_rows(layer, row(k), row(v), None)
    }

    /// Copies of a layer's K and V, `[rows, kv_width]` F32 each.
    ///
    /// # Errors
    /// `Memory`.
    fn materialize(&self, layer: usize) -> Result<(Tensor, Tensor)>;

    /// A layer's K and V by borrowing: lists their runs in `lent`. `None`: "I can't lend, materialize
    /// instead".
    ///
    /// # Errors
    /// `Memory` if the list cannot grow.
    fn kv_view<'a>(&'a self, layer: usize, lent: &mut Lent<'a>) -> Result<Option<KvView>> {
        let _ = (layer, lent);
        Ok(None)
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
