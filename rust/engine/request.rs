//! What is asked of the engine, and what it tells.

use crate::error::{Error, Result};
use crate::sampler::SamplerConfig;
use std::time::Duration;

/// A sequence to generate.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// Tokens to generate at most, at least 1.
    pub max_tokens: usize,
    pub sampling: SamplerConfig,
    /// `(token, what is added to its logit)`, before everything else.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that end it.
    pub ends: Vec<u32>,
    /// With each token its log probability and those of so many of the likeliest.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt, all but the first. Their rows are computed then, whatever is
    /// in the cache.
    pub prompt_logprobs: Option<usize>,
    /// Requests of two salts share no blocks.
    pub salt: String,
    /// The lower goes first.
    pub priority: i32,
    /// Each token waits for the tokens that are allowed ([`super::Engine::allow`]).
    pub constrained: bool,
}

/// A token's log probability (natural).
pub type Logprob = (u32, f64);

/// What happened to a sequence in a step.
#[derive(Debug)]
pub struct Event {
    pub id: u64,
    pub outcome: Outcome,
}

#[derive(Debug)]
pub enum Outcome {
    /// `[prompt - 1]`: of each token of the prompt after the first.
    PromptLogprobs(Vec<Vec<Logprob>>),
    Token {
        token: u32,
        /// Of it and of the likeliest, likeliest first; empty if none are asked for.
        logprobs: Vec<Logprob>,
        /// The passes since the token before, or since the prompt's first.
        took: Duration,
        /// Tokens of the prompt whose keys and values were there already.
        cached: usize,
        /// Bytes that its cache claims.
        kv_bytes: usize,
        /// The last one: it is of [`Request::ends`], or the last of [`Request::max_tokens`].
        last: bool,
    },
    /// It failed, and only it.
    Failed(Error),
}

impl Request {
    pub(super) fn check(&self, vocab_size: usize, context: usize) -> Result<()> {
        let inside = |token: &u32| (*token as usize) < vocab_size;
        let biased = self.logit_bias.iter().map(|(token, _)| token);
        if let Some(token) = self.prompt.iter().chain(&self.ends).chain(biased).find(|token| !inside(token)) {
            return Err(Error::argument(format!(
                "token id {token} is outside the vocabulary of {vocab_size}"
            )));
        }
        if self.prompt.is_empty() || self.max_tokens == 0 {
            return Err(Error::argument("a request needs a prompt, and max_tokens of at least 1"));
        }
        if let Some((token, bias)) = self.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
            return Err(Error::argument(format!("logit_bias of token {token} must be finite, not {bias}")));
        }
        // The last token that is generated is never run.
        let rows = self.prompt.len().saturating_add(self.max_tokens - 1);
        if rows > context {
            return Err(Error::argument(format!(
                "{} tokens and {} more do not fit in the context of {context}",
                self.prompt.len(),
                self.max_tokens
            )));
        }
        Ok(())
    }
}
