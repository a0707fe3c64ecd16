//! What all parts of a pass read, and what they all do: norms, timing, asking whether to go on, and looking
//! for the first value that is not finite.

use super::config::Config;
use super::sequence::Sequence;
use super::turns::Interrupt;
use super::weights::Weights;
use crate::backend::{Backend, Op};
use crate::error::{Error, Result};
use crate::kernels::finite::AllFinite;
use crate::linear::Linear;
use crate::tensor::KvDtype;
use std::sync::atomic::{AtomicBool, Ordering};

/// Rows that one task of a row-wise operation takes: a few microseconds of work.
pub const ROWS_PER_TASK: usize = 4;
/// Logits that one task looks through.
const LOGITS_PER_TASK: usize = 16 << 10;

/// What all parts of a pass read.
pub struct Context<'p> {
    pub config: &'p Config,
    pub weights: &'p Weights,
    pub backend: &'p Backend,
    /// Rows of all sequences.
    pub m: usize,
    pub interrupt: Interrupt<'p>,
    /// Whether every operation's result is looked through, to find the first that is not finite.
    pub diagnose: bool,
}

impl Context<'_> {
    /// The rows of `x / rms(x) * weight`, as the matmul with `reader` reads them.
    pub fn norm(&self, weight: &[f32], reader: &Linear, x: &[f32], out: &mut [f32]) {
        self.norm_rows(weight, reader, x, |i| i, &mut out[..self.m * reader.activation_words()]);
    }

    /// [`Context::norm`] of rows `row(i)`.
    pub fn norm_rows(
        &self,
        weight: &[f32],
        reader: &Linear,
        x: &[f32],
        row: impl Fn(usize) -> usize + Sync,
        out: &mut [f32],
    ) {
        let (isa, words, width) = (self.backend.isa, reader.activation_words(), weight.len());
        self.time(Op::RmsNorm, || {
            self.backend.threads.for_each_row(out, words, ROWS_PER_TASK, |i, out| {
                let x = &x[row(i) * width..][..width];
                reader.activations().write_normed(isa, x, weight, self.config.rms_norm_eps, out);
            });
        });
    }

    pub fn time<T>(&self, op: Op, f: impl FnOnce() -> T) -> T {
        self.backend.profiler.time(op, f)
    }

    /// Asked twice a layer.
    ///
    /// # Errors
    /// `Interrupted`.
    pub fn go_on(&self) -> Result<()> {
        if (self.interrupt)() { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// When diagnosing: that what `op` of a layer left is finite.
    ///
    /// # Errors
    /// `Model`, naming both.
    pub fn finite(&self, layer: usize, op: Op, values: &[f32]) -> Result<()> {
        match self.diagnose && !self.all_finite(values) {
            true => Err(not_finite(&format!("{} of layer {layer}", op.name()))),
            false => Ok(()),
        }
    }

    /// When diagnosing: that what the caches hold of a layer is finite.
    ///
    /// # Errors
    /// `Cache`, naming the layer and what to do.
    pub fn finite_cache(&self, layer: usize, sequences: &[Sequence<'_>]) -> Result<()> {
        for sequence in sequences.iter().filter(|_| self.diagnose) {
            let (k, v) = sequence.cache.materialize(layer)?;
            if self.all_finite(&k.to_f32()?) && self.all_finite(&v.to_f32()?) {
                continue;
            }
            return Err(Error::cache(match sequence.cache.dtype() {
                KvDtype::F16 => format!(
                    "layer {layer}: a key or value beyond 65504 does not fit in the f16 cache: use an f32 one"
                ),
                KvDtype::F32 => format!("layer {layer}: the cache holds NaN or infinity"),
            }));
        }
        Ok(())
    }

    pub fn all_finite(&self, values: &[f32]) -> bool {
        let (finite, isa) = (AtomicBool::new(true), self.backend.isa);
        self.backend.threads.run(values.len().div_ceil(LOGITS_PER_TASK), &|task| {
            let part = task * LOGITS_PER_TASK..values.len().min((task + 1) * LOGITS_PER_TASK);
            if !isa.run(AllFinite { x: &values[part] }) {
                finite.store(false, Ordering::Relaxed);
            }
        });
        finite.into_inner()
    }
}

pub fn not_finite(what: &str) -> Error {
    Error::model(format!("{what} gives NaN or infinity: these weights cannot be run in this dtype"))
}
