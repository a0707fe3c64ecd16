//! What the caches of a pass lend to attention of one layer: runs of keys and values as plain data.
//!
//! A cache is asked once a layer. It lists, for each KV head, the runs in which the head's positions lie:
//! one if they are contiguous, one a block if they are paged. Attention reads the list and no longer sees
//! which kind of cache it is.

use crate::error::{Error, Result};
use crate::kernels::attention::{KvHead, KvRun, LentHead};
use crate::tensor::{KvDtype, Tensor, TensorData};
use half::f16;

/// The runs that the sequences of a pass lend of one layer. Its storage is kept from layer to layer
/// ([`Lent::recycle`]), so that a warm step allocates nothing.
#[derive(Default)]
pub struct Lent<'a> {
    f32: Vec<KvRun<'a, f32>>,
    f16: Vec<KvRun<'a, f16>>,
}

/// One sequence's part of what is [`Lent`]: runs `[kv_heads][runs_per_head]` from `first` on.
#[derive(Clone, Copy)]
pub struct KvView {
    dtype: KvDtype,
    first: usize,
    runs_per_head: usize,
    run_rows: usize,
    stride: usize,
    rows: usize,
}

/// How the runs of a view are cut: as in [`KvHead`].
#[derive(Clone, Copy)]
pub struct RunShape {
    /// Positions of every run but the last of each head.
    pub run_rows: usize,
    /// Values between the rows of a run.
    pub stride: usize,
    /// Positions in all.
    pub rows: usize,
}

impl<'a> Lent<'a> {
    /// The same storage, empty, for what other borrows lend.
    pub fn recycle<'b>(mut self) -> Lent<'b> {
        self.f32.clear();
        self.f16.clear();
        // An empty vector collected in place keeps its allocation and nothing of its lifetime.
        Lent {
            f32: self.f32.into_iter().map(|_| unreachable!("it is empty")).collect(),
            f16: self.f16.into_iter().map(|_| unreachable!("it is empty")).collect(),
        }
    }

    /// Lists the F32 runs of a sequence, `[kv_heads][runs]`.
    ///
    /// # Errors
    /// `Memory` if the list cannot grow.
    pub fn lend_f32(
        &mut self,
        shape: RunShape,
        heads: usize,
        runs: impl ExactSizeIterator<Item = KvRun<'a, f32>>,
    ) -> Result<KvView> {
        lend(&mut self.f32, KvDtype::F32, shape, heads, runs)
    }

    /// Lists the F16 runs of a sequence, `[kv_heads][runs]`.
    ///
    /// # Errors
    /// `Memory` if the list cannot grow.
    pub fn lend_f16(
        &mut self,
        shape: RunShape,
        heads: usize,
        runs: impl ExactSizeIterator<Item = KvRun<'a, f16>>,
    ) -> Result<KvView> {
        lend(&mut self.f16, KvDtype::F16, shape, heads, runs)
    }

    /// Lists a copy of a layer's rows of all heads, `[rows, kv_width]` F32: for a cache that cannot lend.
    ///
    /// # Errors
    /// `Argument` if the tensors are not F32.
    pub fn lend_materialized(&mut self, k: &'a Tensor, v: &'a Tensor, heads: usize) -> Result<KvView> {
        let (TensorData::F32(k_values), TensorData::F32(v_values)) = (k.data(), v.data()) else {
            return Err(Error::argument("materialized K and V must be F32"));
        };
        let [rows, stride] = k.shape();
        let head = |h: usize| {
            let start = h * (stride / heads);
            KvRun { k: &k_values[start..], v: &v_values[start..] }
        };
        self.lend_f32(RunShape { run_rows: rows, stride, rows }, heads, (0..heads).map(head))
    }

    /// One KV head of a view.
    pub fn head(&self, view: &KvView, kv_head: usize) -> LentHead<'_> {
        let first = view.first + kv_head * view.runs_per_head;
        let runs = first..first + view.runs_per_head;
        let KvView { run_rows, stride, rows, .. } = *view;
        match view.dtype {
            KvDtype::F32 => LentHead::F32(KvHead { runs: &self.f32[runs], run_rows, stride, rows }),
            KvDtype::F16 => LentHead::F16(KvHead { runs: &self.f16[runs], run_rows, stride, rows }),
        }
    }
}

fn lend<'a, T>(
    list: &mut Vec<KvRun<'a, T>>,
    dtype: KvDtype,
    shape: RunShape,
    heads: usize,
    runs: impl ExactSizeIterator<Item = KvRun<'a, T>>,
) -> Result<KvView> {
    let (first, count) = (list.len(), runs.len());
    list.try_reserve(count).map_err(|_| Error::Memory(count * size_of::<KvRun<'a, T>>()))?;
    list.extend(runs);
    let RunShape { run_rows, stride, rows } = shape;
    Ok(KvView { dtype, first, runs_per_head: count / heads, run_rows, stride, rows })
}
