//! The gated MLP: `down_proj(silu(gate_proj x) * up_proj x)`.

use super::pass::Pass;
use super::scratch::Scratch;
use crate::backend::Op;
use crate::error::Result;
use crate::kernels::matmul::Output;

/// Adds the MLP of `scratch.operands`, `m` rows `[hidden]`, to `scratch.hidden`.
pub fn mlp(pass: &Pass<'_>, index: usize, scratch: &mut Scratch) -> Result<()> {
    let (arena, layer) = (&pass.weights.arena, &pass.weights.layers[index]);
    let (isa, threads, m) = (pass.backend.isa, &pass.backend.threads, pass.m);
    // 1. both products, SiLU, and what down_proj reads: [m, hidden] -> [m, intermediate]
    let normed = &scratch.operands[..m * layer.gate_proj.activation_words()];
    let activated = &mut scratch.activated[..m * layer.down_proj.activation_words()];
    pass.time(Op::GateUpProj, || {
        layer.gated().run(arena, isa, threads, normed, &mut scratch.gate_up, activated);
    });
    // 2. [m, intermediate] -> [m, hidden]
    let hidden = &mut scratch.hidden[..m * layer.down_proj.n];
    pass.time(Op::DownProj, || {
        layer.down_proj.matmul(arena, isa, threads, activated, Output::Add(hidden));
    });
    pass.finite(index, Op::DownProj, hidden)
}
