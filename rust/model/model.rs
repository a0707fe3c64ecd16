//! `Model`: what callers hold, and the calls of a pass.

use super::config::Config;
use super::context::Context;
use super::pass::{self, Outcome};
use super::rope::Rope;
use super::scratch::Scratch;
use super::sequence::{Claim, Logits, Sequence};
use super::turns::{Interrupt, Turns};
use super::weights::Weights;
use crate::backend::{Backend, Phase};
use crate::cache::{BasicKvCache, ConcatKvCache, KvCache};
use crate::error::{Error, Result};
use crate::tensor::KvDtype;
use std::sync::OnceLock;

/// Tokens that a sequence brings to a pass at most: it bounds the scratch memory, and how long others wait
/// for their turn. It does not show in the results.
pub const PREFILL_ROWS: usize = 512;

/// A loaded model. Callers from several threads take turns, pass by pass.
pub struct Model {
    pub(super) config: Config,
    pub(super) weights: Weights,
    pub(super) backend: Backend,
    rope: Rope,
    turns: Turns<Scratch>,
    pub(super) fingerprint: OnceLock<String>,
}

impl Model {
    pub fn new(config: Config, weights: Weights, backend: Backend) -> Self {
        let rope = Rope::new(config.rope_theta, config.head_dim);
        Self { config, weights, backend, rope, turns: Turns::new(), fingerprint: OnceLock::new() }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    pub fn basic_cache(&self, dtype: KvDtype) -> BasicKvCache {
        BasicKvCache::new(self.config.kv_shape(), dtype)
    }

    /// The copying baseline; this model's profiler counts its `concat_dim0` calls.
    pub fn concat_cache(&self, dtype: KvDtype) -> ConcatKvCache {
        ConcatKvCache::new(self.config.kv_shape(), dtype, self.backend.profiler.clone())
    }

    /// Appends a prompt (or a part of one) to a sequence, in passes of [`PREFILL_ROWS`] tokens, and writes
    /// the logits that `wanted` asks for to `logits`.
    ///
    /// # Errors
    /// `Argument` for no tokens, a token outside the vocabulary, more than the context or a `logits` of the
    /// wrong length; `Cache` if the cache has no room or cannot hold a value; `Model` if a logit is not
    /// finite; `Memory`; `Interrupted`. The cache holds what it held before then.
    pub fn prefill<'a>(
        &self,
        cache: &'a mut (dyn KvCache + 'a),
        tokens: &'a [u32],
        wanted: Logits,
        interrupt: Interrupt<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        let vocab = self.config.vocab_size;
        let mut sequence = [Sequence::new(cache, tokens, wanted)];
        self.check(&sequence, logits)?;
        let claim = Claim::new(&mut sequence)?; // for all of it: its K and V are copied once
        let mut done = 0;
        for chunk in tokens.chunks(PREFILL_ROWS) {
            let last = done + chunk.len() == tokens.len();
            let out = match wanted {
                Logits::All => &mut logits[done * vocab..][..chunk.len() * vocab],
                Logits::Last if last => &mut *logits,
                _ => &mut [],
            };
            claim.0[0].tokens = chunk;
            claim.0[0].logits = if out.is_empty() { Logits::None } else { wanted };
            self.pass(Phase::Prefill, claim.0, interrupt, out)?;
            done += chunk.len();
        }
        claim.commit();
        Ok(())
    }

    /// One more token of one sequence; writes its logits, `[vocab_size]`.
    ///
    /// # Errors
    /// As [`Model::prefill`].
    pub fn decode<'a>(
        &self,
        cache: &'a mut (dyn KvCache + 'a),
        token: u32,
        interrupt: Interrupt<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        self.decode_batch(&mut [Sequence::new(cache, &[token], Logits::Last)], interrupt, logits)
    }

    /// One more token of each sequence; writes their logits, `[sequences, vocab_size]`. Each row is
    /// what [`Model::decode`] gives for its sequence alone.
    ///
    /// # Errors
    /// As [`Model::prefill`], and `Argument` if a sequence does not bring one token; all caches hold what
    /// they held before then.
    pub fn decode_batch(
        &self,
        sequences: &mut [Sequence<'_>],
        interrupt: Interrupt<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        if let Some(other) = sequences.iter().find(|sequence| sequence.tokens.len() != 1) {
            return Err(Error::argument(format!("a decode step has 1 token, not {}", other.tokens.len())));
        }
        self.forward(sequences, interrupt, logits)
    }

    /// One pass over sequences that each bring tokens of their own number, at most [`PREFILL_ROWS`]: chunks
    /// of prompts beside decode steps, which read the weights once. Writes the logits that each wants, one
    /// sequence after another. They are what each sequence gets alone.
    ///
    /// # Errors
    /// As [`Model::prefill`]; all caches hold what they held before then.
    pub fn forward(
        &self,
        sequences: &mut [Sequence<'_>],
        interrupt: Interrupt<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        self.check(sequences, logits)?;
        if let Some(long) = sequences.iter().find(|sequence| sequence.tokens.len() > PREFILL_ROWS) {
            let rows = long.tokens.len();
            return Err(Error::argument(format!(
                "a pass takes {PREFILL_ROWS} tokens of a sequence, not {rows}"
            )));
        }
        let steps = sequences.iter().all(|sequence| sequence.tokens.len() == 1);
        let phase = if steps { Phase::Decode } else { Phase::Prefill };
        let claim = Claim::new(sequences)?;
        self.pass(phase, claim.0, interrupt, logits)?;
        claim.commit();
        Ok(())
    }

    /// A pass, when it is its turn. One whose logits are not finite runs again to find where that began.
    fn pass(
        &self,
        phase: Phase,
        sequences: &mut [Sequence<'_>],
        interrupt: Interrupt<'_>,
        logits: &mut [f32],
    ) -> Result<()> {
        let mut scratch = self.turns.take(interrupt)?;
        let before = self.backend.profiler.set_phase(phase);
        let (config, weights, backend) = (&self.config, &self.weights, &self.backend);
        let m = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let mut context = Context { config, weights, backend, m, interrupt, diagnose: false };
        let mut result = pass::run(&context, &self.rope, sequences, &mut scratch, logits);
        if matches!(result, Ok(Outcome::NotFinite)) {
            context.diagnose = true;
            for sequence in &mut *sequences {
                sequence.cache.truncate(sequence.past);
            }
            result = pass::run(&context, &self.rope, sequences, &mut scratch, logits);
        }
        self.backend.profiler.set_phase(before);
        result.map(|_| ())
    }

    fn check(&self, sequences: &[Sequence<'_>], logits: &[f32]) -> Result<()> {
        let (vocab, context) = (self.config.vocab_size, self.config.max_position_embeddings);
        let rows = sequences.iter().map(Sequence::logits_rows).sum::<usize>();
        if Some(logits.len()) != rows.checked_mul(vocab) {
            return Err(Error::argument(format!(
                "logits has {} values; {rows} x {vocab} are needed",
                logits.len()
            )));
        }
        if sequences.is_empty() {
            return Err(Error::argument("there are no sequences"));
        }
        for Sequence { cache, tokens, .. } in sequences {
            if cache.shape() != self.config.kv_shape() {
                return Err(Error::argument("the cache was made for a model of another shape"));
            }
            if tokens.is_empty() {
                return Err(Error::argument("there are no tokens"));
            }
            if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab) {
                return Err(Error::argument(format!(
                    "token id {token} is outside the vocabulary of {vocab}"
                )));
            }
            let past = cache.seq_len();
            if past + tokens.len() > context {
                return Err(Error::argument(format!(
                    "{past} tokens in the cache and {} more do not fit in the context of {context}",
                    tokens.len()
                )));
            }
        }
        Ok(())
    }
}
