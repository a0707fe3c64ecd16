//! Copies of a sequence's keys and values, and what tells models apart that they could come from.

use super::model::Model;
use crate::cache::KvCache;
use crate::error::{Error, Result};
use crate::tensor::{KvDtype, Rows, Tensor};
use half::f16;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Bytes that one task hashes.
const PART: usize = 1 << 20;

impl Model {
    /// Tells models apart: a hash of the config's fields, the weight dtype and all weights.
    pub fn fingerprint(&self) -> &str {
        self.fingerprint.get_or_init(|| {
            let mut hash = Xxh3::new();
            hash.update(self.config.identity().as_bytes());
            hash.update(self.weights.dtype().name().as_bytes());
            for vector in self.weights.vectors() {
                hash.update(bytemuck::cast_slice(vector));
            }
            let parts: Vec<_> = self.weights.arena.contents().chunks(PART).collect();
            let mut hashes = vec![0; parts.len()];
            self.backend.threads.for_each_mut(&mut hashes, |i, hash| *hash = xxh3_128(parts[i]));
            hash.update(bytemuck::cast_slice(&hashes));
            format!("{:032x}", hash.digest128())
        })
    }

    /// A copy of a sequence's keys and values: K and V, `[rows, kv_width]` F32, of every layer.
    ///
    /// # Errors
    /// `Memory`.
    pub fn snapshot(&self, cache: &dyn KvCache) -> Result<Vec<(Tensor, Tensor)>> {
        (0..cache.num_layers()).map(|layer| cache.materialize(layer)).collect()
    }

    /// Fills an empty cache with a snapshot.
    ///
    /// # Errors
    /// `Argument` if the snapshot's or the cache's shape is not this model's, or an F16 cache would round
    /// the snapshot's values; `Cache` if the cache holds rows or has no room. The cache is empty then.
    pub fn restore(&self, cache: &mut dyn KvCache, snapshot: &[(Tensor, Tensor)]) -> Result<()> {
        let shape = self.config.kv_shape();
        if cache.shape() != shape {
            return Err(Error::argument("the cache was made for a model of another shape"));
        }
        if cache.seq_len() != 0 {
            return Err(Error::cache("a snapshot is restored into an empty cache"));
        }
        let width = shape.kv_width();
        let rows = snapshot.first().map_or(0, |(k, _)| k.shape()[0]);
        let fits = snapshot.len() == shape.num_layers
            && snapshot.iter().all(|(k, v)| k.shape() == [rows, width] && v.shape() == [rows, width]);
        if !fits || rows == 0 || rows > self.config.max_position_embeddings {
            return Err(Error::argument("the snapshot does not belong to a model of this shape"));
        }
        let mut fill = || {
            cache.reserve(rows)?;
            for (layer, (k, v)) in snapshot.iter().enumerate() {
                let (k, v) = (k.to_f32()?, v.to_f32()?);
                let exact = |x: &f32| f16::from_f32(*x).to_f32() == *x;
                if cache.dtype() == KvDtype::F16 && !k.iter().chain(&v).all(exact) {
                    return Err(Error::argument(
                        "the snapshot is of an f32 cache: an f16 one would round it",
                    ));
                }
                let view = |data| Rows { data, rows, cols: width, stride: width };
                cache.set_prefill(layer, view(&k), view(&v), Some(&self.backend.threads))?;
            }
            Ok(())
        };
        let filled = fill();
        match filled {
            Ok(()) => cache.commit(),
            Err(_) => cache.roll_back(0),
        }
        filled
    }
}
