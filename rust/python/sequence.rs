//! What a sequence has of its own: its KV cache, of its own or on a shared pool, and its sampler.

use super::calls::{heavy, lock, token_ids};
use crate::cache::{BlockPool, KvCache, PagedKvCache};
use crate::error::Error;
use crate::kernels::Isa;
use crate::sampler;
use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard};

/// The KV cache of one sequence: keys and values of all layers, growing in place.
///
/// One call at a time uses it: another one meanwhile is a CacheError.
#[pyclass(frozen, module = "qwen_rs._core")]
pub struct Cache(Mutex<Box<dyn KvCache>>);

impl Cache {
    pub(super) fn new(cache: Box<dyn KvCache>) -> Self {
        Self(Mutex::new(cache))
    }

    /// One call at a time uses a cache.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Box<dyn KvCache>>, Error> {
        match self.0.try_lock() {
            Ok(cache) => Ok(cache),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => {
                Err(Error::cache("the cache is in use by another call, or was given twice"))
            }
        }
    }
}

#[pymethods]
impl Cache {
    /// Tokens that the cache holds.
    #[getter]
    fn seq_len(&self) -> PyResult<usize> {
        Ok(self.lock()?.seq_len())
    }

    /// Bytes claimed for keys and values, used or not; shared blocks count in each cache.
    #[getter]
    fn kv_bytes(&self) -> PyResult<usize> {
        Ok(self.lock()?.kv_bytes())
    }

    /// ``basic``, ``paged`` or ``concat``.
    #[getter]
    fn kind(&self) -> PyResult<&'static str> {
        Ok(self.lock()?.name())
    }

    /// What it stores: ``f32`` or ``f16``.
    #[getter]
    fn kv_dtype(&self) -> PyResult<&'static str> {
        Ok(self.lock()?.dtype().name())
    }

    /// Forgets all but the first ``rows`` tokens.
    fn truncate(&self, rows: usize) -> PyResult<()> {
        self.lock()?.truncate(rows);
        Ok(())
    }

    /// Another sequence with the same tokens; a paged one shares blocks until one of the two writes.
    ///
    /// Raises ValueError for caches that cannot share.
    fn fork(&self) -> PyResult<Self> {
        let cache = self.lock()?;
        let fork = cache.fork();
        let name = cache.name();
        fork.map(Self::new).ok_or_else(|| {
            PyValueError::new_err(format!("a {name} cache cannot share its rows; a paged one can"))
        })
    }
}

/// Cache blocks that several sequences share (PagedAttention, Kwon et al. 2023).
#[pyclass(frozen, module = "qwen_rs._core")]
pub struct Pool(pub(super) Arc<BlockPool>);

#[pymethods]
impl Pool {
    /// An empty cache on this pool. Where no block is free, prefill and decode raise CacheError.
    fn new_cache(&self) -> Cache {
        Cache::new(Box::new(PagedKvCache::new(self.0.clone())))
    }

    /// Blocks in all.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.capacity()
    }

    /// Blocks that no cache holds.
    #[getter]
    fn free_blocks(&self) -> usize {
        self.0.free_blocks()
    }

    /// Tokens of a block.
    #[getter]
    fn block_rows(&self) -> usize {
        self.0.block_rows()
    }

    /// Bytes of a block, all layers.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }
}

/// Chooses the tokens of one sequence: penalties, temperature, top-k, top-p, min-p, in that order.
///
/// It remembers what it chose, for the penalties. The same seed gives the same tokens. Raises
/// ValueError for a setting out of its range.
#[pyclass(frozen, module = "qwen_rs._core")]
pub struct Sampler(Mutex<sampler::Sampler>);

#[pymethods]
impl Sampler {
    #[new]
    #[pyo3(signature = (
        *, temperature = 1.0, top_k = 0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0,
        presence_penalty = 0.0, frequency_penalty = 0.0, seed = 0, prompt = Vec::new()
    ))]
    #[allow(clippy::too_many_arguments)] // keyword arguments, all of them
    fn new(
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        repetition_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        seed: u64,
        prompt: Vec<i64>,
    ) -> PyResult<Self> {
        let config = sampler::SamplerConfig {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            seed,
        };
        let isa = Isa::from_environment()?;
        let sampler = sampler::Sampler::new(config, &token_ids(prompt)?, isa)?;
        Ok(Self(Mutex::new(sampler)))
    }

    /// The next token, from logits ``[vocab_size]``; temperature 0 takes the likeliest, of equals the lowest.
    fn sample(&self, py: Python<'_>, logits: PyReadonlyArray1<'_, f32>) -> PyResult<u32> {
        let logits = logits.as_slice()?;
        heavy(py, |_| lock(&self.0).sample(logits))
    }
}
