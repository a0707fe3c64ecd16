//! The gated MLP: `down_proj(silu(gate_proj x) * up_proj x)`.

use super::pass::Scratch;
use super::weights::Weights;
use crate::backend::{Backend, Op, Output};

/// Adds the MLP of `scratch.operands`, `m` rows `[hidden]`, to `scratch.hidden`.
pub fn mlp(backend: &dyn Backend, weights: &Weights, index: usize, m: usize, scratch: &mut Scratch) {
    let (arena, layer) = (&weights.arena, &weights.layers[index]);
    let normed = &scratch.operands[..m * layer.gate_proj.activation_words()];
    let activated = &mut scratch.activated[..m * layer.down_proj.activation_words()];
    backend.gate_up(arena, layer.gated(), normed, &mut scratch.gate_up, activated);
    let hidden = &mut scratch.hidden[..m * layer.down_proj.n];
    backend.matmul(Op::DownProj, arena, &layer.down_proj, activated, Output::Add(hidden));
}
