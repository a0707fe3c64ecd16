//! The class `Engine`: submissions in, events out.

use super::calls::{heavy, token_ids};
use super::model::Model;
use crate::cache::{BlockPool, KvCache};
use crate::engine::{self, Limits, Logprob, Outcome, Request, Store, SystemClock};
use crate::sampler::SamplerConfig;
use crate::tensor::KvDtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;

/// Many sequences at once: requests join and leave a running batch, and each gets, bit for bit, the tokens
/// that it gets alone.
///
/// Shared by threads, of which one at a time calls ``step``; nobody waits for a pass to submit or cancel.
#[pyclass(frozen, module = "qwen_rs._core")]
pub struct Engine(engine::Engine);

/// What happened to a sequence in a step: a token, the log probabilities of its prompt, or an error.
#[pyclass(frozen, get_all, module = "qwen_rs._core")]
pub struct Event {
    id: u64,
    token: Option<u32>,
    /// ``[(token, natural log probability)]`` of it and of the likeliest.
    logprobs: Vec<Logprob>,
    /// The passes since the token before.
    milliseconds: f64,
    /// Tokens of the prompt that were computed before.
    cached_tokens: usize,
    kv_bytes: usize,
    last: bool,
    prompt_logprobs: Option<Vec<Vec<Logprob>>>,
    error: Option<Py<PyAny>>,
}

impl Event {
    fn of(py: Python<'_>, event: engine::Event) -> Self {
        let mut told = Self {
            id: event.id,
            token: None,
            logprobs: Vec::new(),
            milliseconds: 0.0,
            cached_tokens: 0,
            kv_bytes: 0,
            last: false,
            prompt_logprobs: None,
            error: None,
        };
        match event.outcome {
            Outcome::PromptLogprobs(logprobs) => told.prompt_logprobs = Some(logprobs),
            Outcome::Failed(error) => {
                (told.last, told.error) = (true, Some(PyErr::from(error).into_value(py).into_any()));
            }
            Outcome::Token { token, logprobs, took, cached, kv_bytes, last } => {
                told.token = Some(token);
                told.milliseconds = took.as_secs_f64() * 1e3;
                (told.logprobs, told.cached_tokens) = (logprobs, cached);
                (told.kv_bytes, told.last) = (kv_bytes, last);
            }
        }
        told
    }
}

#[pymethods]
impl Engine {
    /// ``kv`` is ``basic``, ``concat`` (a cache for each sequence) or ``paged``: ``num_blocks`` blocks of
    /// ``block_rows`` tokens for all, in which prompts that begin alike are found again.
    ///
    /// ``step_goal_ms`` is what a step should take at most while sequences wait for their next token: prompts
    /// are cut into chunks for it; None: chunks are as long as a pass takes them.
    #[new]
    #[pyo3(signature = (
        model, *, kv = "basic", kv_dtype = "f32", num_blocks = 1, block_rows = 64, max_num_seqs = 16,
        step_goal_ms = None
    ))]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    fn new(
        model: &Model,
        kv: &str,
        kv_dtype: &str,
        num_blocks: usize,
        block_rows: usize,
        max_num_seqs: usize,
        step_goal_ms: Option<f64>,
    ) -> PyResult<Self> {
        let dtype = KvDtype::parse(kv_dtype)?;
        let own = model.0.clone();
        let store = match kv {
            "basic" => Store::Own(Box::new(move || -> Box<dyn KvCache> { Box::new(own.basic_cache(dtype)) })),
            "concat" => {
                Store::Own(Box::new(move || -> Box<dyn KvCache> { Box::new(own.concat_cache(dtype)) }))
            }
            "paged" => {
                let shape = own.config().kv_shape();
                Store::shared(BlockPool::new(shape, dtype, block_rows, num_blocks)?)
            }
            other => {
                return Err(PyValueError::new_err(format!(
                    "kv must be basic, paged or concat, not {other:?}"
                )));
            }
        };
        let goal = match step_goal_ms {
            None => None,
            Some(ms) if ms > 0.0 && ms < 1e9 => Some(Duration::from_secs_f64(ms / 1e3)),
            Some(ms) => {
                return Err(PyValueError::new_err(format!("step_goal_ms must be above 0, not {ms}")));
            }
        };
        let limits = Limits { max_num_seqs, step_goal: goal };
        Ok(Self(engine::Engine::new(model.0.clone(), store, limits, Box::new(SystemClock::start()))?))
    }

    /// Puts a request into the queue; returns the ``id`` that its events carry.
    ///
    /// ``end_ids`` are the tokens that end it; ``salt`` keeps its blocks apart from those of other salts; the
    /// lower ``priority`` goes first; a ``constrained`` one waits before each token for ``allow``. Raises
    /// ValueError for what cannot be run, CacheError for what could never fit.
    #[pyo3(signature = (
        prompt, *, max_tokens, temperature = 1.0, top_k = 0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0,
        presence_penalty = 0.0, frequency_penalty = 0.0, seed = 0, logit_bias = Vec::new(), end_ids = Vec::new(),
        logprobs = None, prompt_logprobs = None, salt = String::new(), priority = 0, constrained = false
    ))]
    #[allow(clippy::too_many_arguments)] // keyword arguments, all of them
    fn submit(
        &self,
        prompt: Vec<i64>,
        max_tokens: usize,
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        repetition_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        seed: u64,
        logit_bias: Vec<(i64, f32)>,
        end_ids: Vec<i64>,
        logprobs: Option<usize>,
        prompt_logprobs: Option<usize>,
        salt: String,
        priority: i32,
        constrained: bool,
    ) -> PyResult<u64> {
        let (biased, biases): (Vec<i64>, Vec<f32>) = logit_bias.into_iter().unzip();
        let request = Request {
            prompt: token_ids(prompt)?,
            max_tokens,
            sampling: SamplerConfig {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                seed,
            },
            logit_bias: token_ids(biased)?.into_iter().zip(biases).collect(),
            ends: token_ids(end_ids)?,
            logprobs,
            prompt_logprobs,
            salt,
            priority,
            constrained,
        };
        Ok(self.0.submit(request)?)
    }

    /// Ends a sequence: no event of it comes after the next step. One that has ended may be named too.
    fn cancel(&self, id: u64) {
        self.0.cancel(id);
    }

    /// The tokens of which the next one of a constrained sequence is chosen: bit ``t % 8`` of byte ``t // 8``.
    fn allow(&self, id: u64, tokens: &[u8]) {
        let words = tokens.chunks(4).map(|bytes| {
            let mut word = [0; 4];
            word[..bytes.len()].copy_from_slice(bytes);
            u32::from_le_bytes(word)
        });
        self.0.allow(id, words.collect());
    }

    /// Makes a ``step`` that waits for work return.
    fn wake(&self) {
        self.0.wake();
    }

    /// Waits up to ``wait`` seconds for work, then runs one pass; returns what happened.
    ///
    /// Raises what a signal handler raises (Ctrl-C); all sequences are as before then.
    #[pyo3(signature = (wait = 0.0))]
    fn step(&self, py: Python<'_>, wait: f64) -> PyResult<Vec<Event>> {
        let wait = Duration::try_from_secs_f64(wait)
            .map_err(|_| PyValueError::new_err(format!("wait must be 0 or more seconds, not {wait}")))?;
        let events = heavy(py, |signals| self.0.step(wait, &|| signals.pending()))?;
        Ok(events.into_iter().map(|event| Event::of(py, event)).collect())
    }

    /// What it has done since it began, and what it held after the last step.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (dict, c) = (PyDict::new(py), self.0.counters());
        for (name, value) in [
            ("steps", c.steps),
            ("prompt_tokens", c.prompt_tokens),
            ("cached_tokens", c.cached_tokens),
            ("generated_tokens", c.generated_tokens),
            ("preemptions", c.preemptions),
            ("running", c.running as u64),
            ("waiting", c.waiting as u64),
            ("blocks", c.blocks as u64),
            ("free_blocks", c.free_blocks as u64),
            ("cached_blocks", c.cached_blocks as u64),
        ] {
            dict.set_item(name, value)?;
        }
        dict.set_item("busy_seconds", c.busy.as_secs_f64())?;
        Ok(dict)
    }
}
