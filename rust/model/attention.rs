//! Self-attention of one layer: project, norm and rotate, push to the caches, attend, project back.

use super::context::{Context, ROWS_PER_TASK};
use super::scratch::{Scratch, Steps};
use super::sequence::Sequence;
use crate::backend::Op;
use crate::cache::{KvView, Lent};
use crate::error::Result;
use crate::kernels::Destination;
use crate::kernels::decode_attention::{DecodeQueries, attention_decode};
use crate::kernels::prefill_attention::{PrefillQueries, attention_prefill};
use crate::kernels::rope::NormRope;
use crate::tensor::Rows;
use crate::threads::Threads;
use std::sync::{Mutex, PoisonError};

/// Adds the attention of `scratch.operands`, `m` rows `[hidden]`, to `scratch.hidden`; each sequence's
/// rows go to its own cache.
pub fn attention(
    context: &Context<'_>,
    index: usize,
    sequences: &mut [Sequence<'_>],
    scratch: &mut Scratch,
) -> Result<()> {
    let (arena, layer) = (&context.weights.arena, &context.weights.layers[index]);
    let (config, isa, threads, m) =
        (context.config, context.backend.isa, &context.backend.threads, context.m);
    let (q_width, kv_width) = (config.q_width(), config.kv_width());
    let width = q_width + 2 * kv_width;
    // 1. stacked q/k/v in one matmul: [m, hidden] -> [m, q | k | v]
    let normed = &scratch.operands[..m * layer.qkv_proj.activation_words()];
    let qkv = &mut scratch.qkv[..m * width];
    context.time(Op::QkvProj, || {
        layer.qkv_proj.matmul(arena, isa, threads, normed, Destination::Overwrite(qkv))
    });
    // 2. per-head RMSNorm of q and k, then rotation, in place
    context.time(Op::QkNormRope, || {
        let rotations = &scratch.rotations;
        threads.for_each_row(qkv, width, 2, |r, row| {
            let rotation = &rotations[r * config.head_dim..][..config.head_dim];
            for (i, head) in row[..q_width + kv_width].chunks_exact_mut(config.head_dim).enumerate() {
                let weight = if i < config.num_attention_heads { &layer.q_norm } else { &layer.k_norm };
                isa.run(NormRope { head, weight, rotation, eps: config.rms_norm_eps });
            }
        });
    });
    context.finite(index, Op::QkvProj, qkv)?;
    // 3. push first, so that attention sees the current rows
    let qkv = Rows { data: &*qkv, rows: m, cols: width, stride: width };
    context.time(Op::KvPush, || push(index, sequences, qkv.columns(q_width, 2 * kv_width), threads))?;
    context.finite_cache(index, sequences)?;
    // 4. then borrow what each cache lends, or take a copy: [m, q]
    let attended = &mut scratch.attended[..m * q_width];
    let mut copies = Vec::new(); // of caches that cannot lend
    let mut lent = std::mem::take(&mut scratch.lent).recycle();
    let views = &mut scratch.views;
    views.clear();
    for sequence in &*sequences {
        let view = sequence.cache.kv_view(index, &mut lent)?;
        if view.is_none() {
            copies.push(context.time(Op::Materialize, || sequence.cache.materialize(index))?);
        }
        views.push(view);
    }
    let missing = views.iter_mut().filter(|view| view.is_none());
    for (view, (k, v)) in missing.zip(&copies) {
        *view = Some(lent.lend_materialized(k, v, config.num_key_value_heads)?);
    }
    let q = qkv.columns(0, q_width);
    context.time(Op::Attention, || {
        attend(context, sequences, q, (&lent, views), &scratch.steps, &mut scratch.attention, attended);
    });
    scratch.lent = lent.recycle();
    context.finite(index, Op::Attention, attended)?;
    // 5. [m, q] -> [m, hidden]
    let words = layer.o_proj.activation_words();
    let operands = &mut scratch.operands[..m * words];
    context.time(Op::Activations, || {
        threads.for_each_row(operands, words, ROWS_PER_TASK, |r, out| {
            layer.o_proj.activations().write(isa, &attended[r * q_width..(r + 1) * q_width], out);
        });
    });
    let hidden = &mut scratch.hidden[..m * config.hidden_size];
    context.time(Op::OProj, || {
        layer.o_proj.matmul(arena, isa, threads, operands, Destination::Accumulate(hidden))
    });
    context.finite(index, Op::OProj, hidden)
}

/// Pushes the rows of every sequence, `[m, k | v]`, to its own cache: single rows on all workers at once,
/// a prompt's rows each on all workers.
fn push(index: usize, sequences: &mut [Sequence<'_>], kv: Rows<'_>, threads: &Threads) -> Result<()> {
    let width = kv.cols / 2;
    let push_one = |sequence: &mut Sequence<'_>, threads: Option<&Threads>| {
        let rows = kv.slice(sequence.first_row, sequence.tokens.len());
        let (k, v) = (rows.columns(0, width), rows.columns(width, width));
        match (sequence.past, rows.rows) {
            (0, _) => sequence.cache.set_prefill(index, k, v, threads),
            (_, 1) => sequence.cache.push_row(index, k.row(0), v.row(0)),
            _ => sequence.cache.push_rows(index, k, v, threads),
        }
    };
    let failed = Mutex::new(Ok(()));
    threads.for_each_mut(sequences, |_, sequence| {
        if sequence.tokens.len() == 1
            && let Err(error) = push_one(sequence, None)
        {
            *failed.lock().unwrap_or_else(PoisonError::into_inner) = Err(error);
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)?;
    let prompts = sequences.iter_mut().filter(|sequence| sequence.tokens.len() > 1);
    prompts.into_iter().try_for_each(|sequence| push_one(sequence, Some(threads)))
}

/// `out[m, q]` = causal softmax(q k^T / sqrt(head_dim)) v, each KV head serving its group of query heads.
fn attend(
    context: &Context<'_>,
    sequences: &[Sequence<'_>],
    q: Rows<'_>,
    (lent, views): (&Lent<'_>, &[Option<KvView>]),
    steps: &Steps,
    scratch: &mut [f32],
    out: &mut [f32],
) {
    let (isa, threads, config) = (context.backend.isa, &context.backend.threads, context.config);
    let head = |sequence: usize, kv_head: usize| match &views[sequence] {
        Some(view) => lent.head(view, kv_head),
        None => unreachable!("every cache lends or was copied"),
    };
    let (num_attention_heads, num_key_value_heads) = (config.num_attention_heads, config.num_key_value_heads);
    let (head_dim, scale) = (config.head_dim, 1.0 / (config.head_dim as f32).sqrt());
    if !steps.rows.is_empty() {
        let queries = DecodeQueries {
            q: q.data,
            stride: q.stride,
            rows: &steps.rows,
            contexts: &steps.contexts,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            scale,
        };
        let lent = |step: usize, kv_head| head(steps.sequences[step], kv_head);
        attention_decode(isa, threads, queries, &lent, scratch, out);
    }
    for (i, sequence) in sequences.iter().enumerate().filter(|(_, sequence)| sequence.tokens.len() > 1) {
        let rows = q.slice(sequence.first_row, sequence.tokens.len());
        let queries = PrefillQueries {
            q: rows.data,
            stride: rows.stride,
            rows: rows.rows,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            past: sequence.past,
            scale,
        };
        let out = &mut out[sequence.first_row * q.cols..][..rows.rows * q.cols];
        attention_prefill(isa, threads, queries, &|kv_head| head(i, kv_head), scratch, out);
    }
}
