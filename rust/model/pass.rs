//! The forward pass: `prefill`, `decode` and `decode_batch` are one loop over the layers.

use super::attention::attention;
use super::config::Config;
use super::mlp::mlp;
use super::rope::Rope;
use crate::backend::{Backend, Destination, Op, Phase, partials_words};
use crate::cache::{BasicKvCache, ConcatKvCache, KvCache};
use crate::error::{Error, Result};
use crate::loader::Weights;
use crate::tensor::{KvDtype, Rows, WeightDtype};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

/// Rows of a prompt that pass through the layers together; it bounds the scratch memory. It does not
/// show in the results.
pub const PREFILL_ROWS: usize = 512;

/// Which logits a prefill gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Of the last token: `[vocab_size]`.
    Last,
    /// Of every token: `[tokens, vocab_size]`.
    All,
}

/// A loaded model. Calls from several threads take turns.
pub struct Model {
    config: Config,
    weights: Weights,
    backend: Box<dyn Backend>,
    rope: Rope,
    scratch: Mutex<Scratch>,
}

/// The sequences of a pass, each with as many rows: one with the rows of a prompt, or several with
/// one row each.
pub struct Sequences<'a, 'c> {
    pub caches: &'a mut [&'c mut (dyn KvCache + 'c)],
    /// Rows in each cache before this pass.
    pub past: &'a [usize],
    /// New rows of each sequence.
    pub rows: usize,
}

/// Sequences that one pass decodes together; a larger batch takes several.
pub const BATCH: usize = 64;

/// What a pass of `m` rows works in; it grows to the largest pass and stays.
#[derive(Default)]
pub struct Scratch {
    pub hidden: Vec<f32>,    // [m, hidden]: the residual stream
    pub qkv: Vec<f32>,       // [m, q | k | v]
    pub attended: Vec<f32>,  // [m, q]
    pub operands: Vec<f32>,  // [m, hidden or q], as a matmul reads them
    pub gate_up: Vec<f32>,   // both products of each worker's strip
    pub activated: Vec<f32>, // [m, intermediate], as a matmul reads them
    pub rotations: Vec<f32>, // [m, head_dim]
    pub partials: Vec<f32>,  // attention's chunks, for the longest context
}

impl Scratch {
    fn grow(
        &mut self,
        config: &Config,
        dtype: WeightDtype,
        gate_up: usize,
        m: usize,
        sequences: usize,
    ) -> Result<()> {
        let widest = config.hidden_size.max(config.q_width());
        // Zeroed memory is not resident until it is written: the longest context costs nothing yet.
        let partials =
            partials_words(config.num_attention_heads, config.head_dim, config.max_position_embeddings);
        for (buffer, words) in [
            (&mut self.hidden, m * config.hidden_size),
            (&mut self.qkv, m * (config.q_width() + 2 * config.kv_width())),
            (&mut self.attended, m * config.q_width()),
            (&mut self.operands, m * dtype.activation_words(widest)),
            (&mut self.gate_up, gate_up),
            (&mut self.activated, m * dtype.activation_words(config.intermediate_size)),
            (&mut self.rotations, m * config.head_dim),
            (&mut self.partials, sequences * partials),
        ] {
            if buffer.len() < words {
                *buffer = zeros(words)?;
            }
        }
        Ok(())
    }
}

/// `words` zeros.
///
/// # Errors
/// `Memory` if they cannot be had.
pub fn zeros(words: usize) -> Result<Vec<f32>> {
    // The zeroed allocation cannot be asked for fallibly: room is tried first, given back, and taken.
    let mut room: Vec<f32> = Vec::new();
    room.try_reserve_exact(words).map_err(|_| Error::Memory(words * 4))?;
    drop(room);
    Ok(vec![0.0; words])
}

/// Asked twice a layer: `true` stops the pass.
pub type Interrupt<'a> = &'a (dyn Fn() -> bool + Sync);

fn go_on(interrupt: Interrupt<'_>) -> Result<()> {
    if interrupt() { Err(Error::Interrupted) } else { Ok(()) }
}

impl Model {
    pub fn new(config: Config, weights: Weights, backend: Box<dyn Backend>) -> Self {
        let rope = Rope::new(config.rope_theta, config.head_dim);
        Self { config, weights, backend, rope, scratch: Mutex::default() }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub fn basic_cache(&self, dtype: KvDtype) -> BasicKvCache {
        BasicKvCache::new(self.config.kv_shape(), dtype)
    }

    /// The copying baseline; this model's profiler counts its `concat_dim0` calls.
    pub fn concat_cache(&self, dtype: KvDtype) -> ConcatKvCache {
        ConcatKvCache::new(self.config.kv_shape(), dtype, self.backend.profiler().clone())
    }

    /// Appends `tokens` to a sequence and writes the logits that `wanted` asks for to `logits`.
    ///
    /// # Errors
    /// `Argument` for no tokens, a token outside the vocabulary, more than the context or a `logits`
    /// of the wrong length; `Cache` if the cache has no room; `Interrupted`. The cache holds what it
    /// held before then.
    pub fn prefill(
        &self,
        cache: &mut dyn KvCache,
        tokens: &[u32],
        wanted: Logits,
        interrupt: Interrupt<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        let vocab = self.config.vocab_size;
        let rows = if wanted == Logits::All { tokens.len() } else { 1 };
        self.check(cache, tokens)?;
        if logits.len() != rows * vocab {
            return Err(Error::argument(format!(
                "logits has {} values; {rows} x {vocab} are needed",
                logits.len()
            )));
        }
        let past = cache.seq_len();
        self.backend.profiler().set_phase(Phase::Prefill);
        let mut scratch = self.lock();
        let mut pass = || {
            cache.reserve(tokens.len())?;
            for (i, chunk) in tokens.chunks(PREFILL_ROWS).enumerate() {
                let start = i * PREFILL_ROWS;
                let last = start + chunk.len() == tokens.len();
                let (first, out) = match wanted {
                    Logits::All => (0, &mut logits[start * vocab..][..chunk.len() * vocab]),
                    Logits::Last if last => (chunk.len() - 1, &mut logits[..]),
                    Logits::Last => (chunk.len(), &mut logits[..0]),
                };
                let sequences =
                    Sequences { caches: &mut [&mut *cache], past: &[past + start], rows: chunk.len() };
                self.pass(sequences, chunk, first, interrupt, &mut scratch, out)?;
            }
            Ok(())
        };
        let result = pass();
        result.inspect_err(|_| cache.truncate(past))
    }

    /// One more token of one sequence; writes its logits, `[vocab_size]`.
    ///
    /// # Errors
    /// As [`Model::prefill`].
    pub fn decode(
        &self,
        cache: &mut dyn KvCache,
        token: u32,
        interrupt: Interrupt<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        self.decode_batch(&mut [cache], &[token], interrupt, logits)
    }

    /// One more token of each sequence; writes their logits, `[sequences, vocab_size]`. Each row is
    /// what [`Model::decode`] gives for its sequence alone.
    ///
    /// # Errors
    /// As [`Model::prefill`]; all caches hold what they held before then.
    pub fn decode_batch(
        &self,
        caches: &mut [&mut dyn KvCache],
        tokens: &[u32],
        interrupt: Interrupt<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        if tokens.len() != caches.len() {
            return Err(Error::argument(format!("{} tokens for {} caches", tokens.len(), caches.len())));
        }
        if logits.len() != tokens.len() * self.config.vocab_size {
            return Err(Error::argument(format!(
                "logits has {} values; {} x {} are needed",
                logits.len(),
                tokens.len(),
                self.config.vocab_size
            )));
        }
        for (cache, &token) in caches.iter().zip(tokens) {
            self.check(&**cache, &[token])?;
        }
        caches.iter_mut().try_for_each(|cache| cache.reserve(1))?;
        self.backend.profiler().set_phase(Phase::Decode);
        let mut scratch = self.lock();
        let mut done = 0;
        let result = caches.chunks_mut(BATCH).try_for_each(|caches| {
            let some = done..done + caches.len();
            done = some.end;
            let mut past = [0; BATCH];
            for (past, cache) in past.iter_mut().zip(caches.iter()) {
                *past = cache.seq_len();
            }
            let past = &past[..caches.len()];
            let sequences = Sequences { caches: &mut *caches, past, rows: 1 };
            let vocab = self.config.vocab_size;
            let out = &mut logits[some.start * vocab..some.end * vocab];
            self.pass(sequences, &tokens[some], 0, interrupt, &mut scratch, out).inspect_err(|_| {
                for (cache, &past) in caches.iter_mut().zip(past) {
                    cache.truncate(past);
                }
            })
        });
        if result.is_err() && done > BATCH {
            // Those of the passes that were done before the one that failed.
            for cache in &mut caches[..(done - 1) / BATCH * BATCH] {
                cache.truncate(cache.seq_len() - 1);
            }
        }
        result
    }

    /// All layers for `tokens`, the rows of all sequences in order; then the logits of rows `first..`.
    fn pass(
        &self,
        mut sequences: Sequences<'_, '_>,
        tokens: &[u32],
        first: usize,
        interrupt: Interrupt<'_>,
        scratch: &mut Scratch,
        logits: &mut [f32],
    ) -> Result<()> {
        let (config, backend, weights) = (&self.config, &*self.backend, &self.weights);
        let (m, hidden, eps) = (tokens.len(), config.hidden_size, config.rms_norm_eps);
        let (arena, dtype) = (&weights.arena, weights.dtype);
        scratch.grow(config, dtype, backend.gated_words(), m, sequences.caches.len())?;
        let rows = sequences.rows;
        let positions = sequences.past.iter().flat_map(|&past| past..past + rows);
        for (position, rotation) in positions.zip(scratch.rotations.chunks_mut(config.head_dim)) {
            self.rope.rotation(position, rotation);
        }
        backend.embed(arena, &weights.embed_tokens, tokens, &mut scratch.hidden[..m * hidden]);
        let words = dtype.activation_words(hidden);
        let norm = |scratch: &mut Scratch, rows: Range<usize>, weight: &[f32]| {
            let x = &scratch.hidden[rows.start * hidden..rows.end * hidden];
            let normed = &mut scratch.operands[rows.start * words..rows.end * words];
            backend.rms_norm(dtype, x, weight, eps, normed);
        };
        for (index, layer) in weights.layers.iter().enumerate() {
            go_on(interrupt)?;
            norm(scratch, 0..m, &layer.input_layernorm);
            attention(backend, config, weights, index, m, &mut sequences, scratch)?;
            go_on(interrupt)?;
            norm(scratch, 0..m, &layer.post_attention_layernorm);
            mlp(backend, weights, index, m, scratch);
        }
        if logits.is_empty() {
            return Ok(());
        }
        norm(scratch, first..m, &weights.norm);
        let normed = &scratch.operands[first * words..m * words];
        let lm_head = weights.lm_head.as_ref().unwrap_or(&weights.embed_tokens);
        backend.matmul(Op::LmHead, arena, lm_head, normed, Destination::Overwrite(logits));
        Ok(())
    }

    /// Tells models apart: a hash (FNV-1a, 64 bits) of the config, the weight dtype, the norms and a
    /// cache line of every 16 KiB of the packed weights.
    pub fn fingerprint(&self) -> String {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut add = |bytes: &[u8]| {
            for &byte in bytes {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        };
        add(format!("{:?} {:?}", self.config, self.weights.dtype).as_bytes());
        add(bytemuck::cast_slice(&self.weights.norm));
        for part in self.weights.arena.contents().chunks(16 << 10) {
            add(&part[..part.len().min(64)]);
        }
        format!("{hash:016x}")
    }

    /// A copy of a sequence's keys and values: K and V, `[rows, kv_width]`, of every layer.
    pub fn snapshot(
        &self,
        cache: &dyn KvCache,
    ) -> Result<Vec<(crate::tensor::Tensor, crate::tensor::Tensor)>> {
        (0..cache.num_layers()).map(|layer| cache.materialize(layer)).collect()
    }

    /// Fills an empty cache with a snapshot.
    ///
    /// # Errors
    /// `Argument` if the snapshot's shape is not this model's; `Cache` if the cache holds rows or has
    /// no room. The cache is empty then.
    pub fn restore(
        &self,
        cache: &mut dyn KvCache,
        snapshot: &[(crate::tensor::Tensor, crate::tensor::Tensor)],
    ) -> Result<()> {
        if cache.seq_len() != 0 {
            return Err(Error::cache("a snapshot is restored into an empty cache"));
        }
        let width = self.config.kv_width();
        let rows = snapshot.first().map_or(0, |(k, _)| k.shape()[0]);
        let fits = snapshot.len() == self.config.num_hidden_layers
            && snapshot.iter().all(|(k, v)| k.shape() == [rows, width] && v.shape() == [rows, width]);
        if !fits || rows == 0 || rows > self.config.max_position_embeddings {
            return Err(Error::argument("the snapshot does not belong to a model of this shape"));
        }
        let mut fill = || {
            cache.reserve(rows)?;
            for (layer, (k, v)) in snapshot.iter().enumerate() {
                let (k, v) = (k.to_f32()?, v.to_f32()?);
                let view = |data| Rows { data, rows, cols: width, stride: width };
                cache.set_prefill(layer, view(&k), view(&v), Some(self.backend.threads()))?;
            }
            Ok(())
        };
        fill().inspect_err(|_| cache.truncate(0))
    }

    fn check(&self, cache: &dyn KvCache, tokens: &[u32]) -> Result<()> {
        if cache.shape() != self.config.kv_shape() {
            return Err(Error::argument("the cache was made for a model of another shape"));
        }
        if tokens.is_empty() {
            return Err(Error::argument("there are no tokens"));
        }
        let vocab = self.config.vocab_size;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab) {
            return Err(Error::argument(format!("token id {token} is outside the vocabulary of {vocab}")));
        }
        let (past, context) = (cache.seq_len(), self.config.max_position_embeddings);
        if past + tokens.len() > context {
            return Err(Error::argument(format!(
                "{past} tokens in the cache and {} more do not fit in the context of {context}",
                tokens.len()
            )));
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Scratch> {
        // Scratch holds nothing between passes, so a panic cannot have left it wrong.
        self.scratch.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
