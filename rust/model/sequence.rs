//! A sequence's part of a pass, and the claim that leaves its cache as it was if the pass fails.

use crate::cache::KvCache;
use crate::error::Result;

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
