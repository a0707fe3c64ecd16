//! The extension module `qwen_rs._core`. It only translates: arguments in, results out, errors to
//! exceptions, the GIL released around every heavy call.

use crate::backend::{Backend, Phase, ScalarBackend, SimdBackend};
use crate::cache::{BlockPool, KvCache};
use crate::error::Error;
use crate::kernels::{Isa, peak};
use crate::loader::{Checkpoint, RandomWeights, load_weights};
use crate::model::{self, Config, Logits, zeros};
use crate::tensor::{BlockQ8_0, KvDtype, Tensor, TensorData, WeightDtype};
use crate::threads::Threads;
use numpy::{
    IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyKeyboardInterrupt, PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

mod sequence;
use sequence::{Cache, Pool, Sampler};

pyo3::create_exception!(
    qwen_rs,
    ModelError,
    pyo3::exceptions::PyException,
    "A checkpoint is wrong: the message names the file and the field or tensor."
);
pyo3::create_exception!(
    qwen_rs,
    CacheError,
    pyo3::exceptions::PyException,
    "A KV cache has no room, or is in another state than the call needs."
);

impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        let message = error.to_string();
        match error {
            Error::Argument(_) => PyValueError::new_err(message),
            Error::File { path, source } => match source.raw_os_error() {
                // With an errno Python picks the subclass (FileNotFoundError, ...) and the text.
                Some(errno) => PyOSError::new_err((errno, os_message(&source), path)),
                None => PyOSError::new_err(message),
            },
            Error::Model(_) => ModelError::new_err(message),
            Error::Cache(_) => CacheError::new_err(message),
            Error::Memory(_) => PyMemoryError::new_err(message),
            Error::Interrupted => PyKeyboardInterrupt::new_err(()),
        }
    }
}

/// The operating system's text, without Rust's "(os error 2)".
fn os_message(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// How often a heavy call looks for Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Looks for Python signals (Ctrl-C) from inside a heavy call.
struct Signals(Mutex<(Instant, Option<PyErr>)>);

impl Signals {
    fn new() -> Self {
        Self(Mutex::new((Instant::now(), None)))
    }

    /// `true` stops the call.
    fn pending(&self) -> bool {
        let mut state = lock(&self.0);
        if state.1.is_none() && state.0.elapsed() >= SIGNAL_INTERVAL {
            state.1 = Python::attach(|py| py.check_signals()).err();
            state.0 = Instant::now();
        }
        state.1.is_some()
    }

    /// What the signal's handler raised, instead of the error of the stopped call.
    fn explain(self, error: Error) -> PyErr {
        let raised = self.0.into_inner().ok().and_then(|state| state.1);
        match (error, raised) {
            (Error::Interrupted, Some(raised)) => raised,
            (error, _) => error.into(),
        }
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs `f` without the GIL. A panic becomes a RuntimeError.
fn heavy<T: Send>(py: Python<'_>, f: impl FnOnce(&Signals) -> Result<T, Error> + Send) -> PyResult<T> {
    let signals = Signals::new();
    let result = py.detach(|| catch_unwind(AssertUnwindSafe(|| f(&signals))));
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(signals.explain(error)),
        Err(_) => Err(PyRuntimeError::new_err(
            "internal error in the Rust core (the panic message is on stderr); please report it",
        )),
    }
}

fn token_ids(tokens: Vec<i64>) -> PyResult<Vec<u32>> {
    let convert = |token: i64| {
        u32::try_from(token)
            .map_err(|_| PyValueError::new_err(format!("token id {token} is negative or too large")))
    };
    tokens.into_iter().map(convert).collect()
}

fn new_backend(name: &str, threads: Option<usize>) -> PyResult<Box<dyn Backend>> {
    match name {
        "simd" => {
            let threads = threads.unwrap_or_else(Threads::default_count);
            Ok(Box::new(SimdBackend::new(Isa::from_environment()?, threads)?))
        }
        "scalar" => Ok(Box::new(ScalarBackend::new()?)),
        other => Err(PyValueError::new_err(format!("backend must be simd or scalar, not {other:?}"))),
    }
}

/// A loaded Qwen3 model: weights, kernels and threads.
///
/// Shared by threads, calls take turns. It cannot be pickled.
#[pyclass(frozen, module = "qwen_rs._core")]
struct Model(model::Model);

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
            let config = checkpoint.config().clone();
            let (isa, threads) = (backend.isa(), backend.threads());
            let weights = load_weights(&config, &checkpoint, dtype, isa, threads, &going_on)?;
            Ok(Self(model::Model::new(config, weights, backend)))
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
            let source = RandomWeights::new(&config, seed)?;
            let (isa, threads) = (backend.isa(), backend.threads());
            let going_on = |_| !signals.pending();
            let weights = load_weights(&config, &source, dtype, isa, threads, &going_on)?;
            Ok(Self(model::Model::new(config, weights, backend)))
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

    /// The instruction set of the kernels, by the name that ``QWEN_RS_ISA`` forces it by: ``avx512``,
    /// ``avx2-vnni``, ``avx2`` or ``portable``.
    #[getter]
    fn isa(&self) -> &'static str {
        self.0.backend().isa().name()
    }

    /// Worker threads, the caller included.
    #[getter]
    fn threads(&self) -> usize {
        self.0.backend().threads().count()
    }

    /// How weights are kept: ``q8_0``, ``bf16`` or ``f32``.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.weights().dtype.name()
    }

    /// Bytes of the packed weights: what a decode step reads.
    #[getter]
    fn weight_bytes(&self) -> usize {
        self.0.weights().bytes()
    }

    /// Tells models apart: a hash of the shape, the weight dtype and samples of the weights.
    #[getter]
    fn fingerprint(&self) -> String {
        self.0.fingerprint()
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
            let mut caches: Vec<&mut dyn KvCache> =
                locked.iter_mut().map(|cache| -> &mut dyn KvCache { &mut ***cache }).collect();
            let mut logits = zeros(rows * vocab)?;
            self.0.decode_batch(&mut caches, &tokens, &|| signals.pending(), &mut logits)?;
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
            let values = array.as_array().iter().copied().collect();
            Ok(Tensor::from_f32(values, shape)?)
        };
        let layers =
            layers.iter().map(|(k, v)| Ok((tensor(k)?, tensor(v)?))).collect::<PyResult<Vec<_>>>()?;
        heavy(py, |_| self.0.restore(&mut **cache.lock()?, &layers))
    }

    /// Starts counting operations, from nothing, or stops.
    fn trace_ops(&self, enabled: bool) {
        let profiler = self.0.backend().profiler();
        profiler.reset();
        profiler.enable(enabled);
    }

    /// What this machine can do, measured now on all threads.
    ///
    /// ``(bytes/s of reading the weights, int8 multiply-adds/s, F32 multiply-adds/s)``.
    fn ceilings(&self, py: Python<'_>) -> PyResult<(f64, f64, f64)> {
        heavy(py, |_| {
            let (isa, threads) = (self.0.backend().isa(), self.0.backend().threads());
            Ok((
                peak::read_bandwidth(isa, threads, self.0.weights().arena.contents()),
                peak::int8_rate(isa, threads),
                peak::f32_rate(isa, threads),
            ))
        })
    }

    /// ``(phase, operation, calls, milliseconds)`` of every operation since ``trace_ops``.
    fn op_stats(&self) -> Vec<(&'static str, &'static str, u64, f64)> {
        let profiler = self.0.backend().profiler();
        [("prefill", Phase::Prefill), ("decode", Phase::Decode)]
            .into_iter()
            .flat_map(|(name, phase)| {
                let stats = profiler.stats(phase).into_iter();
                stats.map(move |s| (name, s.op, s.calls, s.nanoseconds as f64 / 1e6))
            })
            .collect()
    }
}

/// Q8_0 blocks (34 bytes each) of values whose count is a multiple of 32.
#[pyfunction]
fn quantize_q8_0<'py>(
    py: Python<'py>,
    values: PyReadonlyArray1<'py, f32>,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let values = values.as_slice()?.to_vec();
    if values.len() % 32 != 0 {
        return Err(PyValueError::new_err("the number of values must be a multiple of 32"));
    }
    let shape = [1, values.len()];
    let tensor = Tensor::from_f32(values, shape)?.quantize_q8_0(Isa::from_environment()?)?;
    let bytes = match tensor.data() {
        TensorData::Q8_0(blocks) => bytemuck::cast_slice::<BlockQ8_0, u8>(blocks).to_vec(),
        _ => unreachable!("quantize_q8_0 gives Q8_0"),
    };
    Ok(bytes.into_pyarray(py))
}

/// The instruction sets that this machine runs, the best one first, by the names that ``QWEN_RS_ISA``
/// takes: ``avx512`` (with VNNI), ``avx2-vnni`` (AVX2, FMA, F16C and AVX-VNNI), ``avx2`` (AVX2, FMA and
/// F16C) and ``portable``.
#[pyfunction]
fn available_isas() -> Vec<&'static str> {
    Isa::available().iter().map(Isa::name).collect()
}

/// As many threads as this process may use: affinity and control groups count.
#[pyfunction]
fn default_threads() -> usize {
    Threads::default_count()
}

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::{
        Cache, CacheError, Model, ModelError, Pool, Sampler, available_isas, default_threads, quantize_q8_0,
    };
}
