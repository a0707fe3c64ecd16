//! Self-attention of one layer: project, norm and rotate, push to the cache, attend, project back.

use super::config::Qwen3Config;
use super::forward::{Scratch, Sequences};
use crate::backend::{AttentionInput, Backend, Op};
use crate::cache::KvView;
use crate::error::Result;
use crate::loader::LayerWeights;
use crate::tensor::{Arena, Rows};

/// `scratch.normed [m, hidden]` to `scratch.residual [m, hidden]`; each sequence's rows go to its own
/// cache.
pub fn attention(
    backend: &dyn Backend,
    config: &Qwen3Config,
    arena: &Arena,
    (index, layer): (usize, &LayerWeights),
    m: usize,
    sequences: &mut Sequences<'_, '_>,
    scratch: &mut Scratch,
) -> Result<()> {
    let (q_width, kv_width) = (config.q_width(), config.kv_width());
    let width = q_width + 2 * kv_width;
    // 1. q, k and v in one matmul: [m, hidden] -> [m, q | k | v]
    let normed = &scratch.normed[..m * config.hidden_size];
    let qkv = &mut scratch.qkv[..m * width];
    backend.matmul(Op::QkvProj, arena, &layer.qkv_proj, normed, &mut scratch.quantized, qkv);
    // 2. per-head RMSNorm of q and k, then rotation, in place
    backend.qk_norm_rope(
        qkv,
        (config.num_attention_heads, config.num_key_value_heads),
        (&layer.q_norm, &layer.k_norm),
        config.rms_norm_eps,
        &scratch.rotations,
    );
    let rows = sequences.rows;
    for (i, (cache, &past)) in sequences.caches.iter_mut().zip(sequences.past).enumerate() {
        let first = i * rows;
        let all = Rows { data: &qkv[first * width..], rows, cols: width, stride: width };
        let k = all.columns(q_width, kv_width);
        let v = all.columns(q_width + kv_width, kv_width);
        // 3. push first, so that attention sees the current rows
        backend.profiler().time(Op::KvPush, || match past {
            0 => cache.set_prefill(index, k, v),
            _ => cache.push_rows(index, k, v),
        })?;
        // 4. then borrow: [rows, q] over [past + rows] positions -> [rows, q]
        let attended = &mut scratch.attended[first * q_width..(first + rows) * q_width];
        let copies;
        let view = match cache.kv_view(index) {
            Some(view) => view,
            None => {
                copies = backend.profiler().time(Op::Materialize, || cache.materialize(index))?;
                KvView::materialized(&copies.0, &copies.1, config.head_dim)?
            }
        };
        let input = AttentionInput {
            q: all.columns(0, q_width),
            view: &view,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            past,
        };
        backend.attention(&input, &mut scratch.partials, attended);
    }
    // 5. [m, q] -> [m, hidden]
    let attended = &scratch.attended[..m * q_width];
    let out = &mut scratch.residual[..m * config.hidden_size];
    backend.matmul(Op::OProj, arena, &layer.o_proj, attended, &mut scratch.quantized, out);
    Ok(())
}
