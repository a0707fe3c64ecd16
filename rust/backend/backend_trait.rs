//! The operations of a forward pass.
//!
//! A backend is an instruction set and a set of workers; every operation is written once, on top of
//! both. Whatever the two are, the results are the same bits.

use super::profiler::{Op, Profiler};
use crate::cache::{KvHead, KvView};
use crate::kernels::attention::{AttentionChunk, AttentionRow, CHUNK, KvSource, MergeChunks, partial_len};
use crate::kernels::gated::GATED_WORDS;
use crate::kernels::prefill_attention::{PrefillQueries, attention_prefill, has_tile};
use crate::kernels::rope::NormRope;
use crate::kernels::{Destination, Element, Isa};
use crate::tensor::{Arena, KvDtype, PackedWeight, Rows, WeightDtype};
use crate::threads::Threads;
use half::f16;
use std::marker::PhantomData;
use std::sync::Arc;

/// Rows that one task of a row-wise operation takes: a few microseconds of work.
const ROWS_PER_TASK: usize = 4;

/// Queries of some sequences, each with as many rows, and the keys and values they see.
pub struct AttentionInput<'a> {
    /// `[sequences * rows, num_attention_heads * head_dim]`, after norm and rotation.
    pub q: Rows<'a>,
    /// Of each sequence.
    pub views: &'a [Option<KvView<'a>>],
    /// Of each sequence: rows before the first query's own. Query `r` sees positions `0..=past + r`.
    pub past: &'a [usize],
    /// Queries of each sequence.
    pub rows: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
}

impl AttentionInput<'_> {
    fn view(&self, sequence: usize) -> &KvView<'_> {
        let Some(view) = &self.views[sequence] else {
            unreachable!("a cache lends or is copied");
        };
        view
    }
}

pub trait Backend: Send + Sync {
    /// The name on the command line and in the metrics.
    fn name(&self) -> &'static str;
    fn isa(&self) -> Isa;
    fn threads(&self) -> &Threads;
    fn profiler(&self) -> &Arc<Profiler>;

    /// `out[i] = row tokens[i] of the embedding`, `[tokens, hidden_size]`.
    fn embed(&self, arena: &Arena, embed_tokens: &PackedWeight, tokens: &[u32], out: &mut [f32]) {
        self.profiler().time(Op::Embed, || {
            let width = embed_tokens.k;
            self.threads().for_each_row(out, width, ROWS_PER_TASK, |r, out| {
                embed_tokens.row(arena, tokens[r] as usize, out);
            });
        });
    }

    /// The rows of `x / rms(x) * weight`, as a matmul with weights of `dtype` reads them.
    fn rms_norm(&self, dtype: WeightDtype, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        self.profiler().time(Op::RmsNorm, || {
            let (isa, width) = (self.isa(), weight.len());
            self.threads().for_each_row(out, dtype.activation_words(width), ROWS_PER_TASK, |r, out| {
                dtype.write_normed(isa, &x[r * width..(r + 1) * width], weight, eps, out);
            });
        });
    }

    /// The rows of `x`, `width` wide, as a matmul with weights of `dtype` reads them.
    fn activations(&self, dtype: WeightDtype, x: &[f32], width: usize, out: &mut [f32]) {
        self.profiler().time(Op::Activations, || {
            let isa = self.isa();
            self.threads().for_each_row(out, dtype.activation_words(width), ROWS_PER_TASK, |r, out| {
                dtype.write_activations(isa, &x[r * width..(r + 1) * width], out);
            });
        });
    }

    /// The product `x[m, k] W^T`, `x` as the weight reads it; `op` says which of the model's matmuls it is.
    fn matmul(&self, op: Op, arena: &Arena, weight: &PackedWeight, x: &[f32], out: Destination<'_>) {
        self.profiler().time(op, || weight.matmul(arena, self.isa(), self.threads(), x, out));
    }

    /// `silu(gate_proj x) * up_proj x`, from and to rows as a matmul reads them; `scratch` is of
    /// [`Backend::gated_words`].
    fn gate_up(
        &self,
        arena: &Arena,
        weights: [&PackedWeight; 2],
        x: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        self.profiler().time(Op::GateUpProj, || {
            PackedWeight::gated(weights, arena, self.isa(), self.threads(), x, scratch, out);
        });
    }

    /// f32 words of scratch that [`Backend::gate_up`] needs.
    fn gated_words(&self) -> usize {
        self.threads().count() * GATED_WORDS
    }

    /// RMSNorm and rotation of every q and k head in rows of `[q heads | k heads | v heads]`.
    /// `rotations` holds a row `[head_dim]` for each (cosines, then sines).
    fn qk_norm_rope(
        &self,
        qkv: &mut [f32],
        (num_attention_heads, num_key_value_heads): (usize, usize),
        (q_norm, k_norm): (&[f32], &[f32]),
        eps: f32,
        rotations: &[f32],
    ) {
        self.profiler().time(Op::QkNormRope, || {
            let (isa, head_dim) = (self.isa(), q_norm.len());
            let width = (num_attention_heads + 2 * num_key_value_heads) * head_dim;
            self.threads().for_each_row(qkv, width, 2, |r, row| {
                let rotation = &rotations[r * head_dim..(r + 1) * head_dim];
                let heads = row.chunks_exact_mut(head_dim);
                for (h, head) in heads.take(num_attention_heads + num_key_value_heads).enumerate() {
                    let weight = if h < num_attention_heads { q_norm } else { k_norm };
                    isa.run(NormRope { head, weight, rotation, eps });
                }
            });
        });
    }

    /// `out[rows, num_attention_heads * head_dim]` = causal softmax(q k^T / sqrt(head_dim)) v, each
    /// KV head serving its group of query heads. `partials` is scratch of [`partials_words`] f32 for
    /// each sequence.
    fn attention(&self, input: &AttentionInput<'_>, partials: &mut [f32], out: &mut [f32]) {
        self.profiler().time(Op::Attention, || {
            let (isa, threads) = (self.isa(), self.threads());
            if input.rows > 1 {
                for sequence in 0..input.views.len() {
                    prefill_attention(isa, threads, input, sequence, out);
                }
            } else {
                decode_attention(isa, threads, input, partials, out);
            }
        });
    }
}

/// f32 words of scratch that attention over `context` positions needs.
pub fn partials_words(num_attention_heads: usize, head_dim: usize, context: usize) -> usize {
    context.div_ceil(CHUNK) * num_attention_heads * partial_len(head_dim)
}

/// Many queries of one sequence.
fn prefill_attention(
    isa: Isa,
    threads: &Threads,
    input: &AttentionInput<'_>,
    sequence: usize,
    out: &mut [f32],
) {
    let first = sequence * input.rows;
    let q = input.q.slice(first, input.rows);
    let out = &mut out[first * q.cols..(first + input.rows) * q.cols];
    let (view, past) = (input.view(sequence), input.past[sequence]);
    match view.dtype() {
        KvDtype::F32 => prefill_of::<f32>(isa, threads, input, q, (view, past), out),
        KvDtype::F16 => prefill_of::<f16>(isa, threads, input, q, (view, past), out),
    }
}

fn prefill_of<T: Element>(
    isa: Isa,
    threads: &Threads,
    input: &AttentionInput<'_>,
    q: Rows<'_>,
    (view, past): (&KvView<'_>, usize),
    out: &mut [f32],
) where
    for<'h> KvHead<'h>: KvSource<T>,
{
    let (kv_heads, head_dim) = (input.num_key_value_heads, input.head_dim);
    let group_width = q.cols / kv_heads; // query heads of one KV head, side by side
    let scale = score_scale(head_dim);
    if has_tile(head_dim, group_width / head_dim) {
        let queries = PrefillQueries {
            q: q.data,
            stride: q.stride,
            rows: q.rows,
            num_attention_heads: q.cols / head_dim,
            num_key_value_heads: kv_heads,
            head_dim,
            past,
            scale,
        };
        attention_prefill::<T, _>(isa, threads, queries, &|kv_head| view.head(kv_head), out);
        return;
    }
    threads.for_each_row(out, group_width, 1, |i, out| {
        let (r, kv_head) = (i / kv_heads, i % kv_heads);
        isa.run(AttentionRow::<T, _> {
            q: &q.row(r)[kv_head * group_width..][..group_width],
            head_dim,
            source: &view.head(kv_head),
            context: past + r + 1,
            scale,
            out,
            element: PhantomData,
        });
    });
}

/// One query of each sequence: sequences, chunks and KV heads side by side, then the merge.
fn decode_attention(
    isa: Isa,
    threads: &Threads,
    input: &AttentionInput<'_>,
    partials: &mut [f32],
    out: &mut [f32],
) {
    let (kv_heads, head_dim, q) = (input.num_key_value_heads, input.head_dim, input.q);
    let group_width = q.cols / kv_heads;
    let heads = q.cols / head_dim;
    let sequences = input.views.len();
    let context = |sequence: usize| input.past[sequence] + 1;
    let most = (0..sequences).map(context).max().unwrap_or(0).div_ceil(CHUNK);
    let width = group_width / head_dim * partial_len(head_dim);
    // [sequences][chunks of the longest][kv_heads][group][head_dim + 2]
    let partials = &mut partials[..sequences * most * kv_heads * width];
    threads.for_each_row(partials, width, 1, |i, partials| {
        let (sequence, chunk, kv_head) = (i / kv_heads / most, i / kv_heads % most, i % kv_heads);
        let positions = chunk * CHUNK..context(sequence).min((chunk + 1) * CHUNK);
        if positions.is_empty() {
            return;
        }
        let view = input.view(sequence);
        let q = &q.row(sequence)[kv_head * group_width..][..group_width];
        let head = view.head(kv_head);
        let scale = score_scale(head_dim);
        match view.dtype() {
            KvDtype::F32 => isa.run(AttentionChunk {
                q,
                head_dim,
                source: &head,
                positions,
                scale,
                partials,
                element: PhantomData::<f32>,
            }),
            KvDtype::F16 => isa.run(AttentionChunk {
                q,
                head_dim,
                source: &head,
                positions,
                scale,
                partials,
                element: PhantomData::<f16>,
            }),
        }
    });
    threads.for_each_row(out, head_dim, heads, |i, out| {
        let (sequence, head) = (i / heads, i % heads);
        isa.run(MergeChunks {
            partials: &partials[sequence * most * kv_heads * width + head * partial_len(head_dim)..],
            stride: kv_heads * width,
            chunks: context(sequence).div_ceil(CHUNK),
            out,
        });
    });
}

fn score_scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}
