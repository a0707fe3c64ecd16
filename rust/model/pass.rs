//! One forward pass over a ragged batch: each sequence brings its own number of rows, a chunk of its prompt
//! or one decode step. `prefill`, `decode` and `decode_batch` are calls of it.

use super::context::{Context, ROWS_PER_TASK, not_finite};
use super::layer::layer;
use super::rope::Rope;
use super::scratch::Scratch;
use super::sequence::Sequence;
use crate::backend::Op;
use crate::error::Result;
use crate::kernels::Destination;

/// What a pass ended with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Finite,
    /// Some logit is NaN or infinite.
    NotFinite,
}

/// All layers for the tokens of all sequences; then the logits that they want, one after another.
///
/// # Errors
/// `Interrupted`, `Memory`, what a cache returns; when diagnosing, what [`Context::finite`] finds.
pub fn run(
    context: &Context<'_>,
    rope: &Rope,
    sequences: &mut [Sequence<'_>],
    scratch: &mut Scratch,
    logits: &mut [f32],
) -> Result<Outcome> {
    let (backend, weights, hidden) = (context.backend, context.weights, context.config.hidden_size);
    scratch.grow(context.config, weights, &backend.threads, context.m, sequences)?;
    place(sequences, scratch);
    let Scratch { rotations, positions, hidden: x, tokens, .. } = &mut *scratch;
    let head_dim = context.config.head_dim;
    backend.threads.for_each_row(&mut rotations[..context.m * head_dim], head_dim, 16, |r, out| {
        rope.rotation(positions[r], out);
    });
    context.time(Op::Embed, || {
        backend.threads.for_each_row(&mut x[..context.m * hidden], hidden, ROWS_PER_TASK, |r, out| {
            weights.embed_tokens.row(&weights.arena, tokens[r] as usize, out);
        });
    });
    for index in 0..weights.layers.len() {
        layer(context, index, sequences, scratch)?;
    }
    if logits.is_empty() {
        return Ok(Outcome::Finite);
    }
    let Scratch { wanted, hidden: x, operands, .. } = scratch;
    let lm_head = weights.lm_head();
    let operands = &mut operands[..wanted.len() * lm_head.activation_words()];
    context.norm_rows(&weights.norm, lm_head, x, |i| wanted[i], operands);
    context.time(Op::LmHead, || {
        let (isa, threads) = (backend.isa, &backend.threads);
        lm_head.matmul(&weights.arena, isa, threads, operands, Destination::Overwrite(logits));
    });
    match context.all_finite(logits) {
        true => Ok(Outcome::Finite),
        false if context.diagnose => Err(not_finite("lm_head")),
        false => Ok(Outcome::NotFinite),
    }
}

/// Gives every sequence its rows, and lists what is asked of each row.
fn place(sequences: &mut [Sequence<'_>], scratch: &mut Scratch) {
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
