//! One forward pass over a ragged batch: each sequence brings its own number of rows, a chunk of its prompt
//! or one decode step. `prefill`, `decode` and `decode_batch` are calls of it.

use super::config::Config;
use super::layer::layer;
use super::scratch::Scratch;
use super::turns::Interrupt;
use super::weights::Weights;
use crate::backend::{Backend, Op};
use crate::cache::KvCache;
use crate::error::{Error, Result};
use crate::kernels::float::AllFinite;
use crate::kernels::matmul::Output;
use crate::linear::Linear;
use crate::tensor::KvDtype;
use std::sync::atomic::{AtomicBool, Ordering};

/// Rows that one task of a row-wise operation takes: a few microseconds of work.
pub const ROWS_PER_TASK: usize = 4;
/// Logits that one task looks through.
const LOGITS_PER_TASK: usize = 16 << 10;

/// Which logits a sequence wants of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of its prompt is to come.
    None,
    /// Of its last token: `[vocab_size]`.
    Last,
    /// Of every token: `[tokens, vocab_size]`.
    All,
}

/// A sequence's part of a pass: the tokens that it brings, and the cache that they go to.
pub struct Sequence<'a> {
    pub(super) cache: &'a mut (dyn KvCache + 'a),
    pub(super) tokens: &'a [u32],
    pub(super) logits: Logits,
    /// Rows in the cache before this pass.
    pub(super) past: usize,
    /// Its first row among the rows of the pass.
    pub(super) first_row: usize,
    /// Rows to roll back to, while room is claimed and nothing is committed.
    pub(super) claimed: Option<usize>,
}

impl<'a> Sequence<'a> {
    pub fn new(cache: &'a mut (dyn KvCache + 'a), tokens: &'a [u32], logits: Logits) -> Self {
        Self { cache, tokens, logits, past: 0, first_row: 0, claimed: None }
    }

    /// Rows of logits that it wants.
    pub fn logits_rows(&self) -> usize {
        match self.logits {
            Logits::None => 0,
            Logits::Last => 1,
            Logits::All => self.tokens.len(),
        }
    }
}

/// Room for the tokens of all sequences. Unless it is committed, every cache holds in the end, after an
/// error or a panic too, the rows and the blocks that it held before.
pub struct Claim<'s, 'a>(pub &'s mut [Sequence<'a>]);

impl<'s, 'a> Claim<'s, 'a> {
    /// # Errors
    /// As [`KvCache::reserve`]; nothing has changed then.
    pub fn new(sequences: &'s mut [Sequence<'a>]) -> Result<Self> {
        let claim = Self(sequences);
        for sequence in &mut *claim.0 {
            sequence.claimed = Some(sequence.cache.seq_len());
            sequence.cache.reserve(sequence.tokens.len())?;
        }
        Ok(claim)
    }

    pub fn commit(self) {
        for sequence in &mut *self.0 {
            sequence.cache.commit();
            sequence.claimed = None;
        }
    }
}

impl Drop for Claim<'_, '_> {
    fn drop(&mut self) {
        for sequence in &mut *self.0 {
            if let Some(rows) = sequence.claimed.take() {
                sequence.cache.roll_back(rows);
            }
        }
    }
}

/// What all parts of a pass read.
pub struct Pass<'p> {
    pub config: &'p Config,
    pub weights: &'p Weights,
    pub backend: &'p Backend,
    /// Rows of all sequences.
    pub m: usize,
    pub interrupt: Interrupt<'p>,
    /// Whether every operation's result is looked through, to find the first that is not finite.
    pub diagnose: bool,
}

/// What a pass ended with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Finite,
    /// Some logit is NaN or infinite.
    NotFinite,
}

impl Pass<'_> {
    /// All layers for the tokens of all sequences; then the logits that they want, one after another.
    ///
    /// # Errors
    /// `Interrupted`, `Memory`, what a cache returns; when diagnosing, what [`Pass::finite`] finds.
    pub fn run(
        &self,
        rope: &super::Rope,
        sequences: &mut [Sequence<'_>],
        scratch: &mut Scratch,
        logits: &mut [f32],
    ) -> Result<Outcome> {
        let (backend, weights, hidden) = (self.backend, self.weights, self.config.hidden_size);
        scratch.grow(self.config, weights, &backend.threads, self.m, sequences)?;
        self.place(sequences, scratch);
        let Scratch { rotations, positions, hidden: x, tokens, .. } = &mut *scratch;
        let head_dim = self.config.head_dim;
        backend.threads.for_each_row(&mut rotations[..self.m * head_dim], head_dim, 16, |r, out| {
            rope.rotation(positions[r], out);
        });
        self.time(Op::Embed, || {
            backend.threads.for_each_row(&mut x[..self.m * hidden], hidden, ROWS_PER_TASK, |r, out| {
                weights.embed_tokens.row(&weights.arena, tokens[r] as usize, out);
            });
        });
        for index in 0..weights.layers.len() {
            layer(self, index, sequences, scratch)?;
        }
        if logits.is_empty() {
            return Ok(Outcome::Finite);
        }
        let Scratch { wanted, hidden: x, operands, .. } = scratch;
        let lm_head = weights.lm_head();
        let operands = &mut operands[..wanted.len() * lm_head.activation_words()];
        self.norm_rows(&weights.norm, lm_head, x, |i| wanted[i], operands);
        self.time(Op::LmHead, || {
            let (isa, threads) = (backend.isa, &backend.threads);
            lm_head.matmul(&weights.arena, isa, threads, operands, Output::Set(logits));
        });
        match self.all_finite(logits) {
            true => Ok(Outcome::Finite),
            false if self.diagnose => Err(not_finite("lm_head")),
            false => Ok(Outcome::NotFinite),
        }
    }

    /// Gives every sequence its rows, and lists what is asked of each row.
    fn place(&self, sequences: &mut [Sequence<'_>], scratch: &mut Scratch) {
        let Scratch { positions, tokens, steps, wanted, .. } = scratch;
        steps.clear();
        [&mut *positions, &mut *wanted].into_iter().for_each(Vec::clear);
        tokens.clear();
        for (i, sequence) in sequences.iter_mut().enumerate() {
            let (first, count) = (tokens.len(), sequence.tokens.len());
            (sequence.first_row, sequence.past) = (first, sequence.cache.seq_len());
            tokens.extend_from_slice(sequence.tokens);
            positions.extend(sequence.past..sequence.past + count);
            if count == 1 {
                steps.push(i, first, sequence.past + 1);
            }
            wanted.extend(first + count - sequence.logits_rows()..first + count);
        }
    }

    /// The rows of `x / rms(x) * weight`, as the matmul with `reader` reads them.
    pub fn norm(&self, weight: &[f32], reader: &Linear, x: &[f32], out: &mut [f32]) {
        self.norm_rows(weight, reader, x, |i| i, &mut out[..self.m * reader.activation_words()]);
    }

    /// [`Pass::norm`] of rows `row(i)`.
    fn norm_rows(
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

    fn all_finite(&self, values: &[f32]) -> bool {
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

fn not_finite(what: &str) -> Error {
    Error::model(format!("{what} gives NaN or infinity: these weights cannot be run in this dtype"))
}
