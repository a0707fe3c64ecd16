//! One layer: norm, attention, norm, MLP, each half added to the residual stream.

use super::attention::attention;
use super::context::Context;
use super::mlp::mlp;
use super::scratch::Scratch;
use super::sequence::Sequence;
use crate::error::Result;

/// Runs layer `index` on all rows of a pass; `scratch.hidden` is the residual stream.
pub fn layer(
    context: &Context<'_>,
    index: usize,
    sequences: &mut [Sequence<'_>],
    scratch: &mut Scratch,
) -> Result<()> {
    let layer = &context.weights.layers[index];
    context.go_on()?;
    context.norm(&layer.input_layernorm, &layer.qkv_proj, &scratch.hidden, &mut scratch.operands);
    attention(context, index, sequences, scratch)?;
    context.go_on()?;
    context.norm(&layer.post_attention_layernorm, &layer.gate_proj, &scratch.hidden, &mut scratch.operands);
    mlp(context, index, scratch)
}
