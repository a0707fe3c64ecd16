//! Attention for one query of each of several sequences: sequences, chunks of positions and KV heads side
//! by side on all workers, then each sequence's chunks merged in order.

use super::attention::{AttentionChunk, CHUNK, LentHead, MergeChunks, partial_len};
use crate::kernels::Isa;
use crate::threads::Threads;

/// One query of each of several sequences.
#[derive(Clone, Copy)]
pub struct DecodeQueries<'a> {
    pub q: &'a [f32], // row r at r * stride: [num_attention_heads * head_dim]
    pub stride: usize,
    /// Which row is the query of each sequence; they ascend.
    pub rows: &'a [usize],
    /// Positions that each sees, its own among them.
    pub contexts: &'a [usize],
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
}

/// f32 words of scratch that one sequence of `context` positions needs.
pub fn decode_scratch_words(num_attention_heads: usize, head_dim: usize, context: usize) -> usize {
    context.div_ceil(CHUNK) * num_attention_heads * partial_len(head_dim)
}

/// Rows `queries.rows` of `out[_, num_attention_heads * head_dim]`; `lent(i, kv_head)` gives the keys and
/// values of sequence `i`. `scratch` holds [`decode_scratch_words`] of the longest context for each.
pub fn attention_decode<'a>(
    isa: Isa,
    threads: &Threads,
    queries: DecodeQueries<'_>,
    lent: &(impl Fn(usize, usize) -> LentHead<'a> + Sync),
    scratch: &mut [f32],
    out: &mut [f32],
) {
    let n = queries;
    let (kv_heads, head_dim, scale) = (n.num_key_value_heads, n.head_dim, n.scale);
    let width = n.num_attention_heads * head_dim;
    let group_width = width / kv_heads;
    assert_eq!(n.rows.len(), n.contexts.len());
    let longest = n.contexts.iter().max().map_or(0, |context| context.div_ceil(CHUNK));
    let partial = group_width / head_dim * partial_len(head_dim);
    // [sequences][chunks of the longest][kv_heads][group][head_dim + 2]
    let partials = &mut scratch[..n.rows.len() * longest * kv_heads * partial];
    threads.for_each_row(partials, partial, 1, |i, partials| {
        let (sequence, chunk, kv_head) = (i / kv_heads / longest, i / kv_heads % longest, i % kv_heads);
        let positions = chunk * CHUNK..n.contexts[sequence].min((chunk + 1) * CHUNK);
        if positions.is_empty() {
            return;
        }
        let q = &n.q[n.rows[sequence] * n.stride + kv_head * group_width..][..group_width];
        match lent(sequence, kv_head) {
            LentHead::F32(kv) => isa.run(AttentionChunk { q, head_dim, kv, positions, scale, partials }),
            LentHead::F16(kv) => isa.run(AttentionChunk { q, head_dim, kv, positions, scale, partials }),
        }
    });
    let partials = &*partials;
    threads.for_each_chosen_row(out, width, n.rows, |i, out| {
        let all = &partials[i * longest * kv_heads * partial..];
        for (head, out) in out.chunks_exact_mut(head_dim).enumerate() {
            isa.run(MergeChunks {
                partials: &all[head * partial_len(head_dim)..],
                stride: kv_heads * partial,
                chunks: n.contexts[i].div_ceil(CHUNK),
                out,
            });
        }
    });
}
