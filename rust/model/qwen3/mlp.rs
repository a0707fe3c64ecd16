//! The gated MLP: `down_proj(silu(gate_proj x) * up_proj x)`.

use super::forward::Scratch;
use crate::backend::{Backend, Op};
use crate::loader::LayerWeights;
use crate::tensor::Arena;

/// `scratch.normed [m, hidden]` to `scratch.residual [m, hidden]`.
pub fn mlp(backend: &dyn Backend, arena: &Arena, layer: &LayerWeights, m: usize, scratch: &mut Scratch) {
    let intermediate = layer.down_proj.k;
    let hidden = layer.down_proj.n;
    let gate_up = &mut scratch.gate_up[..m * 2 * intermediate]; // [m, gate | up]
    let normed = &scratch.normed[..m * hidden];
    backend.matmul(Op::GateUpProj, arena, &layer.gate_up_proj, normed, &mut scratch.operands, gate_up);
    let activated = &mut scratch.activated[..m * intermediate]; // [m, intermediate]
    backend.swiglu(gate_up, intermediate, activated);
    let out = &mut scratch.residual[..m * hidden];
    backend.matmul(Op::DownProj, arena, &layer.down_proj, activated, &mut scratch.operands, out);
}
