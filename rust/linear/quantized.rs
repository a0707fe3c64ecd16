//! Weights in quant blocks of 32 values along `k`, quantized as the `gguf` package does.
//!
//! Two planes: quants `[ceil(n / 16)][blocks][bytes]` u8 and scales `[ceil(n / 16)][blocks][16]` f16. A block
//! whose scale is below F16's smallest (in Q8_0: all its values below some 3.8e-6) is one of zeros, as in ggml;
//! one whose scale is above F16's largest (in Q8_0: a value beyond some 8.3e6) is refused.

use super::activations::Activations;
use super::format::{Format, Packed, Scratch};
use crate::error::Result;
use crate::kernels::Destination;
use crate::kernels::gated::gated_int8;
use crate::kernels::matmul_int8::{QuantFormat, dequantize_packed_row, interleave_scales, matmul_int8};
use crate::kernels::quantize::QUANT_BLOCK;
use crate::kernels::{Isa, LANES};
use crate::tensor::try_resize;
use crate::threads::Threads;
use bytemuck::{cast_slice, cast_slice_mut};
use half::f16;
use std::marker::PhantomData;

pub struct Quantized<Q>(pub PhantomData<Q>);

/// The planes of a weight, typed.
fn typed<'a>(w: Packed<'a>) -> (&'a [u8], &'a [f16]) {
    (w.planes[0], cast_slice(w.planes[1]))
}

impl<Q: QuantFormat> Format for Quantized<Q> {
    fn name(&self) -> &'static str {
        Q::NAME
    }

    fn activations(&self) -> Activations {
        Activations::Int8
    }

    fn group_bytes(&self, k: usize) -> [usize; 2] {
        let blocks = k.div_ceil(QUANT_BLOCK);
        [blocks * Q::PANEL_BLOCK_BYTES, blocks * LANES * size_of::<f16>()]
    }

    fn padded(&self, k: usize) -> usize {
        k.next_multiple_of(QUANT_BLOCK)
    }

    fn pack_group(
        &self,
        isa: Isa,
        scratch: &mut Scratch,
        [out, out_scales]: [&mut [u8]; 2],
    ) -> Result<Option<usize>> {
        let Scratch { wide, quants, scales, .. } = scratch;
        try_resize(quants, wide.len())?;
        try_resize(scales, wide.len() / QUANT_BLOCK)?;
        Q::quantize(isa, wide, quants, scales);
        Q::interleave(isa, quants, out);
        let out_scales = cast_slice_mut(out_scales);
        interleave_scales(scales, out_scales);
        Ok(out_scales.iter().position(|d| !d.is_finite()).map(|i| i % LANES))
    }

    fn matmul(&self, w: Packed<'_>, isa: Isa, threads: &Threads, x: &[f32], out: Destination<'_>) {
        matmul_int8::<Q>(isa, threads, x, typed(w), (w.k.div_ceil(QUANT_BLOCK), w.n), out);
    }

    fn gated(
        &self,
        pair: [Packed<'_>; 2],
        isa: Isa,
        threads: &Threads,
        x: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let size = (pair[0].k.div_ceil(QUANT_BLOCK), pair[0].n);
        gated_int8::<Q>(isa, threads, x, pair.map(typed), size, scratch, out);
    }

    fn row(&self, w: Packed<'_>, lane: usize, out: &mut [f32]) {
        let (quants, scales) = typed(w);
        dequantize_packed_row::<Q>(quants, scales, lane, out);
    }
}
