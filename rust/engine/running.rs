//! A sequence of the engine, from its submission to its end.

use super::request::{Logprob, Request};
use super::store::{Held, Store};
use crate::error::Result;
use crate::kernels::Isa;
use crate::model::Logits;
use crate::sampler::Sampler;
use std::time::Duration;

/// Rows of a chunk of which all logits are wanted: each is `[vocab_size]` of F32.
const ALL_LOGITS_ROWS: usize = 64;

pub struct Running {
    pub id: u64,
    pub request: Request,
    /// `request.prompt`, and what was generated.
    pub tokens: Vec<u32>,
    /// None while it waits.
    pub held: Option<Held>,
    pub sampler: Sampler,
    /// The tokens of which the next is one: a bit each.
    pub allowed: Option<Vec<u32>>,
    pub submitted: Duration,
    /// Rows of the prompt that others had computed.
    pub cached: usize,
    /// Passes since its last token.
    pub took: Duration,
    pub prompt_logprobs: Vec<Vec<Logprob>>,
    /// How often it was preempted, and how often others were admitted before it.
    pub preempted: u32,
    pub passed: u32,
}

impl Running {
    pub fn new(id: u64, mut request: Request, isa: Isa, submitted: Duration) -> Result<Self> {
        let seen = if request.sampling.repetition_penalty == 1.0 { &[][..] } else { &request.prompt };
        let bias = std::mem::take(&mut request.logit_bias);
        let sampler = Sampler::new(request.sampling, seen, isa)?.with_bias(bias);
        Ok(Self {
            id,
            tokens: request.prompt.clone(),
            request,
            held: None,
            sampler,
            allowed: None,
            submitted,
            cached: 0,
            took: Duration::ZERO,
            prompt_logprobs: Vec::new(),
            preempted: 0,
            passed: 0,
        })
    }

    /// Who goes first: the lower.
    pub fn rank(&self) -> (i32, u64) {
        (self.request.priority, self.id)
    }

    /// Rows that are computed.
    pub fn rows(&self) -> usize {
        self.held.as_ref().map_or(0, Held::rows)
    }

    /// Rows that are to be computed before the next token.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.rows()
    }

    /// Rows that it may bring to a pass now: its last one waits for what is allowed.
    pub fn ready(&self) -> usize {
        let waits = self.request.constrained && self.allowed.is_none();
        let rows = self.remaining() - usize::from(waits);
        if self.wants_prompt_logprobs() { rows.min(ALL_LOGITS_ROWS) } else { rows }
    }

    /// Its next row is a decode step: nothing of a prompt is left.
    pub fn decodes(&self) -> bool {
        self.remaining() == 1 && self.tokens.len() > self.request.prompt.len()
    }

    pub fn wants_prompt_logprobs(&self) -> bool {
        self.request.prompt_logprobs.is_some() && self.prompt_logprobs.len() + 1 < self.request.prompt.len()
    }

    /// Others' rows serve it too.
    pub fn may_share(&self) -> bool {
        self.request.prompt_logprobs.is_none()
    }

    /// The logits that it wants of its next `rows` rows.
    pub fn wanted(&self, rows: usize) -> Logits {
        if self.wants_prompt_logprobs() {
            Logits::All
        } else if rows == self.remaining() {
            Logits::Last
        } else {
            Logits::None
        }
    }

    /// Keeps the blocks that its last `rows` rows filled for others.
    pub fn keep_full(&mut self, rows: usize, store: &mut Store) {
        let (Some(block_rows), Some(held)) = (store.block_rows(), &mut self.held) else {
            return;
        };
        let now = held.rows();
        if now / block_rows > (now - rows) / block_rows {
            store.keep(&self.request.salt, &self.tokens, held, false);
        }
    }

    /// Blocks that it needs for all its tokens and the next.
    pub fn blocks_to_come(&mut self) -> usize {
        let rows = self.remaining() + 1;
        self.held.as_mut().map_or(0, |held| held.blocks_needed(rows))
    }
}
