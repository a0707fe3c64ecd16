//! The gated MLP: `down_proj(silu(gate_proj x) * up_proj x)`.

use super::pass::Scratch;
use crate::backend::{Backend, Destination, Op};
use crate::loader::Weights;

/// Adds the MLP of `scratch.operands`, `m` rows `[hidden]`, to `scratch.hidden`.
pub fn mlp(backend: &dyn Backend, weights: &Weights, index: usize, m: usize, scratch: &mut Scratch) {
    let (arena, dtype, layer) = (&weights.arena, weights.dtype, &weights.layers[index]);
    let (hidden, intermediate) = (layer.down_proj.n, layer.down_proj.k);
    let normed = &scratch.operands[..m * dtype.activation_words(hidden)];
    let activated = &mut scratch.activated[..m * dtype.activation_words(intermediate)];
    backend.gate_up(arena, [&layer.gate_proj, &layer.up_proj], normed, &mut scratch.gate_up, activated);
    let hidden = &mut scratch.hidden[..m * hidden];
    backend.matmul(Op::DownProj, arena, &layer.down_proj, activated, Destination::Accumulate(hidden));
}
