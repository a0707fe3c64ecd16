//! The Q8_0 block format of ggml: 32 values share a scale.

use crate::kernels::Isa;
use crate::kernels::quantize::{QUANT_BLOCK, QuantizeWeights};
use half::f16;

/// 34 bytes, laid out as ggml lays them out: value `i` is `d * qs[i]`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct BlockQ8_0 {
    pub d: f16,
    pub qs: [i8; QUANT_BLOCK],
}

impl BlockQ8_0 {
    /// Quantizes `[blocks * 32]` values, bit for bit as the `gguf` package does.
    pub fn quantize(isa: Isa, x: &[f32]) -> Vec<Self> {
        let blocks = x.len() / QUANT_BLOCK;
        let mut quants = vec![0; blocks * QUANT_BLOCK];
        let mut scales = vec![f16::ZERO; blocks];
        isa.run(QuantizeWeights { x, quants: &mut quants, scales: &mut scales });
        let values = quants.chunks_exact(QUANT_BLOCK);
        values
            .zip(scales)
            .map(|(values, d)| {
                let mut qs = [0; QUANT_BLOCK];
                qs.copy_from_slice(values);
                Self { d, qs }
            })
            .collect()
    }
}
