//! Random weights of any shape, for measuring without a download.

use super::TensorSource;
use crate::error::{Error, Result};
use crate::tensor::{StoredBytes, StoredDtype, StoredTensor};
use half::bf16;
use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use std::ops::Range;

/// Gives every tensor that it is asked for: BF16 values of [-0.035, 0.035], a standard deviation of
/// 0.02 as a fresh model has; vectors are 1, as fresh norms are. Matrices overlap in one pool of values,
/// so memory is that of the largest.
pub struct RandomWeights {
    pool: Values,
    ones: Values,
}

struct Values(Vec<bf16>);

impl RandomWeights {
    /// `matrix` is the number of values of the largest matrix to come, `vector` that of the longest vector.
    ///
    /// # Errors
    /// `Memory` if it cannot be had.
    pub fn new(matrix: usize, vector: usize, seed: u64) -> Result<Self> {
        let reserved = |values: usize| {
            let mut pool = Vec::new();
            pool.try_reserve_exact(values).map_err(|_| Error::Memory(values.saturating_mul(2)))?;
            Ok(pool)
        };
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let value = |bits: u32| bf16::from_f32((f32::from(bits as u16) / 65535.0 - 0.5) * 0.07);
        let mut pool = reserved(matrix.saturating_add(4))?;
        while pool.len() < matrix {
            let bits = rng.next_u64();
            pool.extend((0..4).map(|i| value((bits >> (16 * i)) as u32)));
        }
        let mut ones = reserved(vector)?;
        ones.resize(vector, bf16::ONE);
        Ok(Self { pool: Values(pool), ones: Values(ones) })
    }
}

impl TensorSource for RandomWeights {
    fn tensor<'a>(&'a self, name: &'a str, shape: &[usize]) -> Result<StoredTensor<'a>> {
        let (values, rows) = match shape {
            [rows, _] => (&self.pool, *rows),
            _ => (&self.ones, 1),
        };
        let cols = shape[shape.len() - 1];
        let spare = rows.checked_mul(cols).and_then(|asked| values.0.len().checked_sub(asked));
        let spare = spare.ok_or_else(|| Error::model(format!("{name} is larger than random weights go")))?;
        // Another part of the pool for each name.
        let hash = name.bytes().fold(0usize, |hash, b| hash.wrapping_mul(31).wrapping_add(b.into()));
        let start = (hash % (spare + 1) * 2) as u64;
        Ok(StoredTensor { name, dtype: StoredDtype::Bf16, rows, cols, bytes: values, start })
    }
}

impl StoredBytes for Values {
    fn read<'b>(&'b self, range: Range<u64>, _: &'b mut Vec<u8>) -> Result<&'b [u8]> {
        Ok(&bytemuck::cast_slice(&self.0)[range.start as usize..range.end as usize])
    }

    fn origin(&self) -> String {
        "random weights".into()
    }
}
