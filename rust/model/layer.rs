//! One layer: norm, attention, norm, MLP, each half added to the residual stream.

use super::attention::attention;
use super::mlp::mlp;
use super::pass::{Pass, Sequence};
use super::scratch::Scratch;
use crate::error::Result;

/// Runs layer `index` on all rows of a pass; `scratch.hidden` is the residual stream.
pub fn layer(
    pass: &Pass<'_>,
    index: usize,
    sequences: &mut [Sequence<'_>],
    scratch: &mut Scratch,
) -> Result<()> {
    let layer = &pass.weights.layers[index];
    pass.go_on()?;
    pass.norm(&layer.input_layernorm, &layer.qkv_proj, &scratch.hidden, &mut scratch.operands);
    attention(pass, index, sequences, scratch)?;
    pass.go_on()?;
    pass.norm(&layer.post_attention_layernorm, &layer.gate_proj, &scratch.hidden, &mut scratch.operands);
    mlp(pass, index, scratch)
}
