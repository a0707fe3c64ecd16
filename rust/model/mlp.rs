//! The gated MLP: `down_proj(silu(gate_proj x) * up_proj x)`.

use super::context::Context;
use super::scratch::Scratch;
use crate::backend::Op;
use crate::error::Result;
use crate::kernels::Destination;

/// Adds the MLP of `scratch.operands`, `m` rows `[hidden]`, to `scratch.hidden`.
pub fn mlp(context: &Context<'_>, index: usize, scratch: &mut Scratch) -> Result<()> {
    let (arena, layer) = (&context.weights.arena, &context.weights.layers[index]);
    let (isa, threads, m) = (context.backend.isa, &context.backend.threads, context.m);
    // 1. both products, SiLU, and what down_proj reads: [m, hidden] -> [m, intermediate]
    let normed = &scratch.operands[..m * layer.gate_proj.activation_words()];
    let activated = &mut scratch.activated[..m * layer.down_proj.activation_words()];
    context.time(Op::GateUpProj, || {
        layer.gated().run(arena, isa, threads, normed, &mut scratch.gate_up, activated);
    });
    // 2. [m, intermediate] -> [m, hidden]
    let hidden = &mut scratch.hidden[..m * layer.down_proj.n];
    context.time(Op::DownProj, || {
        layer.down_proj.matmul(arena, isa, threads, activated, Destination::Accumulate(hidden));
    });
    context.finite(index, Op::DownProj, hidden)
}
