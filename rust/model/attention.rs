//! Self-attention of one layer: project, norm and rotate, push to the cache, attend, project back.

use super::config::Config;
use super::pass::{BATCH, Scratch, Sequences};
use crate::backend::{AttentionInput, Backend, Destination, Op};
use crate::cache::{KvCache, KvView};
use crate::error::Result;
use crate::loader::Weights;
use crate::tensor::Rows;
use crate::threads::Threads;
use std::sync::{Mutex, PoisonError};

/// Adds the attention of `scratch.operands`, `m` rows `[hidden]`, to `scratch.hidden`; each sequence's
/// rows go to its own cache.
pub fn attention(
    backend: &dyn Backend,
    config: &Config,
    weights: &Weights,
    index: usize,
    m: usize,
    sequences: &mut Sequences<'_, '_>,
    scratch: &mut Scratch,
) -> Result<()> {
    let (arena, dtype, layer) = (&weights.arena, weights.dtype, &weights.layers[index]);
    let (q_width, kv_width) = (config.q_width(), config.kv_width());
    let width = q_width + 2 * kv_width;
    // 1. q, k and v in one matmul: [m, hidden] -> [m, q | k | v]
    let normed = &scratch.operands[..m * dtype.activation_words(config.hidden_size)];
    let qkv = &mut scratch.qkv[..m * width];
    backend.matmul(Op::QkvProj, arena, &layer.qkv_proj, normed, Destination::Overwrite(qkv));
    // 2. per-head RMSNorm of q and k, then rotation, in place
    backend.qk_norm_rope(
        qkv,
        (config.num_attention_heads, config.num_key_value_heads),
        (&layer.q_norm, &layer.k_norm),
        config.rms_norm_eps,
        &scratch.rotations,
    );
    let rows = sequences.rows;
    let all = Rows { data: &qkv[..], rows: m, cols: width, stride: width };
    // 3. push first, so that attention sees the current rows
    let threads = backend.threads();
    let push = |i: usize, cache: &mut dyn KvCache, threads: Option<&Threads>| {
        let own = all.slice(i * rows, rows);
        let (k, v) = (own.columns(q_width, kv_width), own.columns(q_width + kv_width, kv_width));
        match sequences.past[i] {
            0 => cache.set_prefill(index, k, v, threads),
            _ => cache.push_rows(index, k, v, threads),
        }
    };
    backend.profiler().time(Op::KvPush, || match &mut *sequences.caches {
        [cache] => push(0, &mut **cache, (rows > 1).then_some(threads)),
        caches => {
            let failed = Mutex::new(Ok(()));
            threads.for_each_mut(caches, |i, cache| {
                if let Err(error) = push(i, &mut **cache, None) {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Err(error);
                }
            });
            failed.into_inner().unwrap_or_else(PoisonError::into_inner)
        }
    })?;
    // 4. then borrow what each cache lends, or take a copy: [rows, q] over [past + rows] positions
    let mut copies = Vec::new(); // of caches that cannot lend
    for cache in sequences.caches.iter().filter(|cache| cache.kv_view(index).is_none()) {
        copies.push(backend.profiler().time(Op::Materialize, || cache.materialize(index))?);
    }
    let mut copies = copies.iter();
    let mut views = [const { None }; BATCH];
    for (view, cache) in views.iter_mut().zip(sequences.caches.iter()) {
        *view = cache.kv_view(index);
        if view.is_none() {
            let copy = copies.next().map(|(k, v)| KvView::materialized(k, v, config.head_dim));
            *view = copy.transpose()?;
        }
    }
    let input = AttentionInput {
        q: all.columns(0, q_width),
        views: &views[..sequences.caches.len()],
        past: sequences.past,
        rows,
        num_key_value_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
    };
    backend.attention(&input, &mut scratch.partials, &mut scratch.attended[..m * q_width]);
    // 5. [m, q] -> [m, hidden]
    let attended = &mut scratch.operands[..m * dtype.activation_words(q_width)];
    backend.activations(dtype, &scratch.attended[..m * q_width], q_width, attended);
    let hidden = &mut scratch.hidden[..m * config.hidden_size];
    backend.matmul(Op::OProj, arena, &layer.o_proj, attended, Destination::Accumulate(hidden));
    Ok(())
}
