//! The class `Model`.

use super::calls::{SIGNAL_INTERVAL, heavy, lock, token_ids};
use super::sequence::{Cache, Pool};
use crate::backend::{Backend, Phase};
use crate::cache::BlockPool;
use crate::error::Error;
use crate::kernels::{Isa, peak};
use crate::linear::WeightDtype;
use crate::loader::Checkpoint;
use crate::model::{self, Config, Logits, Sequence, Weights, random_weights};
use crate::tensor::{KvDtype, Tensor, zeros};
use crate::threads::Threads;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

fn new_backend(name: &str, threads: Option<usize>) -> PyResult<Backend> {
    match name {
        "simd" => {
            let threads = threads.unwrap_or_else(Threads::default_count);
            Ok(Backend::simd(Isa::from_environment()?, threads)?)
        }
        "scalar" => Ok(Backend::scalar()?),
        other => Err(PyValueError::new_err(format!("backend must be simd or scalar, not {other:?}"))),
    }
}

/// A loaded Qwen3 model: weights, kernels and threads.
///
/// Shared by threads, calls take turns. It cannot be pickled.
#[pyclass(frozen, module = "qwen_rs._core")]
pub struct Model(pub(super) Arc<model::Model>);

#[pymethods]
impl Model {
    /// Loads a checkpoint directory: ``config.json`` and safetensors (BF16, F16 or F32).
    ///
    /// ``progress`` is called with the share that is loaded, 0 to 1. Raises OSError for files that cannot
    /// be read, ModelError for a checkpoint that is wrong, ValueError for arguments, MemoryError.
    #[staticmethod]
    #[pyo3(signature = (directory, *, dtype = "q8_0", backend = "simd", threads = None, progress = None))]
    fn load(
        py: Python<'_>,
        directory: PathBuf,
        dtype: &str,
        backend: &str,
        threads: Option<usize>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let dtype = WeightDtype::parse(dtype)?;
        let backend = new_backend(backend, threads)?;
        let raised = Mutex::new(None);
        let loaded = heavy(py, |signals| {
            let config = Config::open(&directory)?;
            let checkpoint = Checkpoint::open(&directory)?;
            let told = Mutex::new(Instant::now());
            let going_on = |share: f64| {
                let mut told = lock(&told);
                if let Some(progress) = &progress
                    && (told.elapsed() >= SIGNAL_INTERVAL || share >= 1.0)
                {
                    *told = Instant::now();
                    if let Err(error) = Python::attach(|py| progress.call1(py, (share,))) {
                        *lock(&raised) = Some(error);
                        return false;
                    }
                }
                !signals.pending()
            };
            let (isa, threads) = (backend.isa, &backend.threads);
            let weights = Weights::load(&config, &checkpoint, &|_| dtype, isa, threads, &going_on)?;
            Ok(Self(Arc::new(model::Model::new(config, weights, backend))))
        });
        loaded.map_err(|error| lock(&raised).take().unwrap_or(error))
    }

    /// Random weights of the shape that the text of a ``config.json`` gives: for measuring.
    #[staticmethod]
    #[pyo3(signature = (config, *, dtype = "q8_0", backend = "simd", threads = None, seed = 0))]
    fn random(
        py: Python<'_>,
        config: &str,
        dtype: &str,
        backend: &str,
        threads: Option<usize>,
        seed: u64,
    ) -> PyResult<Self> {
        let dtype = WeightDtype::parse(dtype)?;
        let backend = new_backend(backend, threads)?;
        let config = Config::from_json(config)?;
        heavy(py, |signals| {
            let source = random_weights(&config, seed)?;
            let (isa, threads) = (backend.isa, &backend.threads);
            let going_on = |_| !signals.pending();
            let weights = Weights::load(&config, &source, &|_| dtype, isa, threads, &going_on)?;
            Ok(Self(Arc::new(model::Model::new(config, weights, backend))))
        })
    }

    /// The shape, in the checkpoint's own names.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (dict, c) = (PyDict::new(py), self.0.config());
        for (name, value) in [
            ("vocab_size", c.vocab_size),
            ("hidden_size", c.hidden_size),
            ("intermediate_size", c.intermediate_size),
            ("num_hidden_layers", c.num_hidden_layers),
            ("num_attention_heads", c.num_attention_heads),
            ("num_key_value_heads", c.num_key_value_heads),
            ("head_dim", c.head_dim),
            ("max_position_embeddings", c.max_position_embeddings),
        ] {
            dict.set_item(name, value)?;
        }
        dict.set_item("rms_norm_eps", c.rms_norm_eps)?;
        dict.set_item("rope_theta", c.rope_theta)?;
        dict.set_item("tie_word_embeddings", c.tie_word_embeddings)?;
        Ok(dict)
    }

    /// ``simd`` or ``scalar``.
    #[getter]
    fn backend(&self) -> &'static str {
        self.0.backend().name()
    }

    /// The instruction set of the kernels, one of ``available_isas()``.
    #[getter]
    fn isa(&self) -> &'static str {
        self.0.backend().isa.name()
    }

    /// Worker threads, the caller included.
    #[getter]
    fn threads(&self) -> usize {
        self.0.backend().threads.count()
    }

    /// How weights are kept, one of ``weight_dtypes()``.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.weights().dtype().name()
    }

    /// What their matmuls multiply them with: ``int8`` or ``f32``.
    #[getter]
    fn activations(&self) -> &'static str {
        self.0.weights().dtype().activations().name()
    }

    /// Bytes of the packed weights: what a decode step reads.
    #[getter]
    fn weight_bytes(&self) -> usize {
        self.0.weights().bytes()
    }

    /// Tells models apart: a hash of the shape, the weight dtype and all weights.
    #[getter]
    fn fingerprint(&self, py: Python<'_>) -> PyResult<String> {
        heavy(py, |_| Ok(self.0.fingerprint().to_owned()))
    }

    /// An empty cache: ``basic`` (zero-copy) or ``concat`` (the copying baseline), F32 or F16.
    ///
    /// Memory follows the tokens: the prompt and 512 rows more, then doubling.
    #[pyo3(signature = (kind = "basic", *, kv_dtype = "f32"))]
    fn new_cache(&self, kind: &str, kv_dtype: &str) -> PyResult<Cache> {
        let dtype = KvDtype::parse(kv_dtype)?;
        match kind {
            "basic" => Ok(Cache::new(Box::new(self.0.basic_cache(dtype)))),
            "concat" => Ok(Cache::new(Box::new(self.0.concat_cache(dtype)))),
            "paged" => {
                Err(PyValueError::new_err("a paged cache comes from a pool: new_pool(...).new_cache()"))
            }
            other => Err(PyValueError::new_err(format!("kv must be basic, paged or concat, not {other:?}"))),
        }
    }

    /// Blocks for paged caches; they take memory when they are used.
    #[pyo3(signature = (num_blocks, *, block_rows = 64, kv_dtype = "f32"))]
    fn new_pool(&self, num_blocks: usize, block_rows: usize, kv_dtype: &str) -> PyResult<Pool> {
        let dtype = KvDtype::parse(kv_dtype)?;
        Ok(Pool(BlockPool::new(self.0.config().kv_shape(), dtype, block_rows, num_blocks)?))
    }

    /// Appends ``tokens`` to the cache.
    ///
    /// Returns the logits of the last, ``[1, vocab_size]``, or with ``all_logits`` of all,
    /// ``[len(tokens), vocab_size]``. Raises ValueError for tokens that do not fit, CacheError if there is
    /// no room; the cache is as before then, and after Ctrl-C.
    #[pyo3(signature = (cache, tokens, *, all_logits = false))]
    fn prefill<'py>(
        &self,
        py: Python<'py>,
        cache: &Cache,
        tokens: Vec<i64>,
        all_logits: bool,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let tokens = token_ids(tokens)?;
        let vocab = self.0.config().vocab_size;
        let wanted = if all_logits { Logits::All } else { Logits::Last };
        let rows = if all_logits { tokens.len() } else { 1 };
        let logits = heavy(py, |signals| {
            let mut cache = cache.lock()?;
            // A prompt that does not fit is refused before memory for its logits is claimed.
            let context = self.0.config().max_position_embeddings;
            let mut logits = zeros(if tokens.len() > context { 0 } else { rows * vocab })?;
            let interrupt = || signals.pending();
            self.0.prefill(&mut **cache, &tokens, wanted, &interrupt, &mut logits)?;
            Ok(logits)
        })?;
        logits.into_pyarray(py).reshape([rows, vocab])
    }

    /// One more token; returns its logits, ``[vocab_size]``. Raises as ``prefill``.
    fn decode<'py>(&self, py: Python<'py>, cache: &Cache, token: i64) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let token = token_ids(vec![token])?[0];
        let logits = heavy(py, |signals| {
            let mut cache = cache.lock()?;
            let mut logits = zeros(self.0.config().vocab_size)?;
            self.0.decode(&mut **cache, token, &|| signals.pending(), &mut logits)?;
            Ok(logits)
        })?;
        Ok(logits.into_pyarray(py))
    }

    /// One more token of each sequence; returns their logits, ``[len(caches), vocab_size]``.
    ///
    /// Each row is bit for bit what ``decode`` gives for that sequence alone. Raises as ``prefill``.
    fn decode_batch<'py>(
        &self,
        py: Python<'py>,
        caches: Vec<PyRef<'py, Cache>>,
        tokens: Vec<i64>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let tokens = token_ids(tokens)?;
        let vocab = self.0.config().vocab_size;
        let rows = tokens.len();
        let caches: Vec<&Cache> = caches.iter().map(|cache| &**cache).collect();
        let logits = heavy(py, |signals| {
            // A cache that is given twice is "in use" the second time.
            let mut locked = caches.iter().map(|cache| cache.lock()).collect::<Result<Vec<_>, _>>()?;
            if tokens.len() != locked.len() {
                let (tokens, caches) = (tokens.len(), locked.len());
                return Err(Error::argument(format!("{tokens} tokens for {caches} caches")));
            }
            let mut sequences = Vec::with_capacity(locked.len());
            for (cache, token) in locked.iter_mut().zip(tokens.chunks(1)) {
                sequences.push(Sequence::new(&mut ***cache, token, Logits::Last));
            }
            let mut logits = zeros(rows * vocab)?;
            self.0.decode_batch(&mut sequences, &|| signals.pending(), &mut logits)?;
            Ok(logits)
        })?;
        logits.into_pyarray(py).reshape([rows, vocab])
    }

    /// Copies of a cache's rows: for each layer K and V, ``[rows, kv_width]`` F32.
    #[allow(clippy::type_complexity)] // the Python type is in the stub: list[tuple[ndarray, ndarray]]
    fn snapshot<'py>(
        &self,
        py: Python<'py>,
        cache: &Cache,
    ) -> PyResult<Vec<(Bound<'py, PyArray2<f32>>, Bound<'py, PyArray2<f32>>)>> {
        let layers = heavy(py, |_| self.0.snapshot(&**cache.lock()?))?;
        let array = |tensor: Tensor| {
            let shape = tensor.shape();
            tensor.to_f32()?.into_pyarray(py).reshape(shape)
        };
        layers.into_iter().map(|(k, v)| Ok((array(k)?, array(v)?))).collect()
    }

    /// Fills an empty cache with a snapshot. Raises ValueError for one of another shape.
    #[allow(clippy::type_complexity)] // as above
    fn restore(
        &self,
        py: Python<'_>,
        cache: &Cache,
        layers: Vec<(PyReadonlyArray2<'_, f32>, PyReadonlyArray2<'_, f32>)>,
    ) -> PyResult<()> {
        let tensor = |array: &PyReadonlyArray2<'_, f32>| -> PyResult<Tensor> {
            let shape = [array.shape()[0], array.shape()[1]];
            let mut values = zeros(shape[0].saturating_mul(shape[1]))?;
            values.iter_mut().zip(array.as_array()).for_each(|(to, from)| *to = *from);
            Ok(Tensor::from_f32(values, shape)?)
        };
        let layers =
            layers.iter().map(|(k, v)| Ok((tensor(k)?, tensor(v)?))).collect::<PyResult<Vec<_>>>()?;
        heavy(py, |_| self.0.restore(&mut **cache.lock()?, &layers))
    }

    /// Starts counting operations, from nothing, or stops; what was counted stays to be read.
    fn trace_ops(&self, enabled: bool) {
        let profiler = &self.0.backend().profiler;
        if enabled {
            profiler.reset();
        }
        profiler.enable(enabled);
    }

    /// What this machine can do, measured now on all threads.
    ///
    /// ``(bytes/s of reading the weights, int8 multiply-adds/s, F32 multiply-adds/s)``.
    fn ceilings(&self, py: Python<'_>) -> PyResult<(f64, f64, f64)> {
        heavy(py, |_| {
            let (isa, threads) = (self.0.backend().isa, &self.0.backend().threads);
            Ok((
                peak::read_bandwidth(isa, threads, self.0.weights().arena.contents()),
                peak::int8_rate(isa, threads),
                peak::f32_rate(isa, threads),
            ))
        })
    }

    /// ``(phase, operation, calls, milliseconds)`` of every operation since ``trace_ops``.
    fn op_stats(&self) -> Vec<(&'static str, &'static str, u64, f64)> {
        let profiler = &self.0.backend().profiler;
        [("prefill", Phase::Prefill), ("decode", Phase::Decode)]
            .into_iter()
            .flat_map(|(name, phase)| {
                let stats = profiler.stats(phase).into_iter();
                stats.map(move |s| (name, s.op, s.calls, s.nanoseconds as f64 / 1e6))
            })
            .collect()
    }
}
