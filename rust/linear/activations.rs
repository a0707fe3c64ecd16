//! Rows of activations as a matmul reads them.

use crate::kernels::Isa;
use crate::kernels::matmul_float::ROW_PADDING;
use crate::kernels::norm::RmsNorm;
use crate::kernels::quantize::{QUANT_BLOCK, QuantizeActivations, QuantizeNormed, quantized_words};

/// The format in which a weight's matmul reads its activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// f32 values, and padding against cache-set conflicts: [`ROW_PADDING`].
    F32,
    /// int8 in blocks of 32 with an f32 scale each: [`quantized_words`].
    Int8,
}

impl Activations {
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Int8 => "int8",
        }
    }

    /// f32 words of a row of `k` activations.
    pub fn words(self, k: usize) -> usize {
        match self {
            Self::F32 => k + ROW_PADDING,
            Self::Int8 => quantized_words(k.div_ceil(QUANT_BLOCK)),
        }
    }

    /// One row `x` `[k]`, to `out` of [`Activations::words`].
    pub fn write(self, isa: Isa, x: &[f32], out: &mut [f32]) {
        match self {
            Self::F32 => out[..x.len()].copy_from_slice(x),
            Self::Int8 => isa.run(QuantizeActivations { x, out }),
        }
    }

    /// [`Activations::write`] of a row's RMSNorm, `x / rms(x) * weight`.
    pub fn write_normed(self, isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        match self {
            Self::F32 => isa.run(RmsNorm { x, weight, out: &mut out[..x.len()], eps }),
            Self::Int8 => isa.run(QuantizeNormed { x, weight, out, eps }),
        }
    }
}
