//! The gated MLP: `down_proj(silu(gate_proj x) * up_proj x)`.

use super::pass::Pass;
use super::scratch::Scratch;
use crate::backend::Op;
use crate::error::Result;
use crate::kernels::matmul::Output;
use crate::tensor::PackedWeight;

/// Adds the MLP of `scratch.operands`, `m` rows `[hidden]`, to `scratch.hidden`.
pub fn mlp(pass: &Pass<'_>, index: usize, scratch: &mut Scratch) -> Result<()> {
    let (arena, dtype, layer) = (&pass.weights.arena, pass.weights.dtype, &pass.weights.layers[index]);
    let (isa, threads, m) = (pass.backend.isa, &pass.backend.threads, pass.m);
    let (hidden, intermediate) = (layer.down_proj.n, layer.down_proj.k);
    // 1. both products, SiLU, and what down_proj reads: [m, hidden] -> [m, intermediate]
    let normed = &scratch.operands[..m * dtype.activation_words(hidden)];
    let activated = &mut scratch.activated[..m * dtype.activation_words(intermediate)];
    pass.time(Op::GateUpProj, || {
        let pair = [&layer.gate_proj, &layer.up_proj];
        PackedWeight::gated(pair, arena, isa, threads, normed, &mut scratch.gate_up, activated);
    });
    // 2. [m, intermediate] -> [m, hidden]
    let hidden = &mut scratch.hidden[..m * hidden];
    pass.time(Op::DownProj, || {
        layer.down_proj.matmul(arena, isa, threads, activated, Output::Add(hidden));
    });
    pass.finite(index, Op::DownProj, hidden)
}
