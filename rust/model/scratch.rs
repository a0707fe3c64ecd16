//! What a pass works in. It grows to the largest pass and stays, so that a warm step allocates nothing.

use super::config::Config;
use super::sequence::Sequence;
use super::weights::Weights;
use crate::cache::{KvView, Lent};
use crate::error::{Error, Result};
use crate::kernels::decode_attention::decode_scratch_words;
use crate::kernels::prefill_attention::prefill_scratch_words;
use crate::tensor::Buffer;
use crate::threads::Threads;

/// Storage of a pass of `m` rows.
#[derive(Default)]
pub struct Scratch {
    pub hidden: Buffer<f32>,        // [m, hidden]: the residual stream
    pub qkv: Buffer<f32>,           // [m, q | k | v]
    pub attended: Buffer<f32>,      // [m, q]
    pub operands: Buffer<f32>,      // [m, hidden or q], as a matmul reads them
    pub gate_up: Buffer<f32>,       // both products of each worker's strip
    pub activated: Buffer<f32>,     // [m, intermediate], as a matmul reads them
    pub rotations: Buffer<f32>,     // [m, head_dim]
    pub attention: Buffer<f32>,     // chunks of decode attention, or each worker's block of prefill attention
    pub lent: Lent<'static>,        // what the caches lend of a layer; empty between layers
    pub views: Vec<Option<KvView>>, // [sequences]
    pub steps: Steps,
    pub tokens: Vec<u32>,      // [m]
    pub positions: Vec<usize>, // [m]
    pub wanted: Vec<usize>,    // rows whose logits are wanted
}

/// The sequences that bring one row: decode attention takes them together.
#[derive(Default)]
pub struct Steps {
    pub sequences: Vec<usize>,
    pub rows: Vec<usize>,
    /// Positions that each sees.
    pub contexts: Vec<usize>,
}

impl Steps {
    pub fn clear(&mut self) {
        [&mut self.sequences, &mut self.rows, &mut self.contexts].into_iter().for_each(Vec::clear);
    }

    pub fn push(&mut self, sequence: usize, row: usize, context: usize) {
        self.sequences.push(sequence);
        self.rows.push(row);
        self.contexts.push(context);
    }
}

impl Scratch {
    /// Room for a pass of `m` rows.
    ///
    /// # Errors
    /// `Memory`.
    pub fn grow(
        &mut self,
        config: &Config,
        weights: &Weights,
        threads: &Threads,
        m: usize,
        sequences: &[Sequence<'_>],
    ) -> Result<()> {
        let (heads, head_dim) = (config.num_attention_heads, config.head_dim);
        let steps = sequences.iter().filter(|sequence| sequence.tokens.len() == 1).count();
        // For the longest context: memory that nobody has written to is not resident.
        let decode = steps * decode_scratch_words(heads, head_dim, config.max_position_embeddings);
        let prefill = match steps < sequences.len() {
            true => threads.count() * prefill_scratch_words(head_dim, heads / config.num_key_value_heads),
            false => 0,
        };
        for (buffer, words) in [
            (&mut self.hidden, m * config.hidden_size),
            (&mut self.qkv, m * (config.q_width() + 2 * config.kv_width())),
            (&mut self.attended, m * config.q_width()),
            (&mut self.operands, m * weights.operand_words()),
            (&mut self.gate_up, weights.gated_words(m, threads.count())),
            (&mut self.activated, m * weights.activated_words()),
            (&mut self.rotations, m * head_dim),
            (&mut self.attention, decode.max(prefill)),
        ] {
            if buffer.len() < words {
                // What it held is of no use: it goes before the new memory comes.
                *buffer = Buffer::default();
                *buffer = Buffer::zeroed(words).map_err(|_| Error::Memory(words * 4))?;
            }
        }
        let lists = [
            (&mut self.positions, m),
            (&mut self.wanted, m),
            (&mut self.steps.sequences, steps),
            (&mut self.steps.rows, steps),
            (&mut self.steps.contexts, steps),
        ];
        for (list, len) in lists {
            list.try_reserve(len.saturating_sub(list.len())).map_err(|_| Error::Memory(len * 8))?;
        }
        self.tokens.try_reserve(m.saturating_sub(self.tokens.len())).map_err(|_| Error::Memory(m * 4))?;
        self.views.try_reserve(sequences.len()).map_err(|_| Error::Memory(sequences.len() * 64))
    }
}
