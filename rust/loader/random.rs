//! Random weights of any shape, for measuring without a download.

use super::TensorSource;
use crate::error::{Error, Result};
use crate::linear::RowSource;
use crate::model::Config;
use half::bf16;
use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use safetensors::tensor::Dtype;

/// Gives every tensor that it is asked for: BF16 values of [-0.035, 0.035], a standard deviation of
/// 0.02 as a fresh Qwen3 has; norms are 1. Tensors overlap in one pool of values, so memory is that
/// of the largest.
pub struct RandomWeights {
    pool: Vec<bf16>,
    ones: Vec<bf16>,
}

impl RandomWeights {
    /// # Errors
    /// `Memory` if it cannot be had.
    pub fn new(config: &Config, seed: u64) -> Result<Self> {
        let widest = config.vocab_size.max(config.intermediate_size).max(config.q_width());
        let longest = config.hidden_size.max(config.head_dim);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let value = |bits: u32| bf16::from_f32((f32::from(bits as u16) / 65535.0 - 0.5) * 0.07);
        let mut pool = Vec::new();
        let values = widest * longest + 4;
        pool.try_reserve_exact(values).map_err(|_| Error::Memory(values * 2))?;
        while pool.len() < widest * config.hidden_size {
            let bits = rng.next_u64();
            pool.extend((0..4).map(|i| value((bits >> (16 * i)) as u32)));
        }
        Ok(Self { pool, ones: vec![bf16::ONE; longest] })
    }
}

impl TensorSource for RandomWeights {
    fn tensor(&self, name: &str, rows: Option<usize>, cols: usize) -> Result<RowSource<'_>> {
        let Some(rows) = rows else {
            let bytes = bytemuck::cast_slice(&self.ones[..cols]);
            return Ok(RowSource { bytes, dtype: Dtype::BF16, rows: 1, cols });
        };
        // Another part of the pool for each name.
        let spare = self.pool.len() - rows * cols;
        let hash = name.bytes().fold(0usize, |hash, b| hash.wrapping_mul(31).wrapping_add(b.into()));
        let start = hash % (spare + 1);
        let bytes = bytemuck::cast_slice(&self.pool[start..start + rows * cols]);
        Ok(RowSource { bytes, dtype: Dtype::BF16, rows, cols })
    }

    fn release(&self, _bytes: &[u8]) {}
}
