//! How a call crosses the boundary: the GIL is released, Ctrl-C is looked for, errors become exceptions.

use crate::error::Error;
use pyo3::exceptions::{PyKeyboardInterrupt, PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

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
                Some(errno) => PyOSError::new_err((errno, os_message(&source), path.into_os_string())),
                None => PyOSError::new_err(message),
            },
            Error::Model(_) => ModelError::new_err(message),
            Error::Cache(_) => CacheError::new_err(message),
            Error::System { .. } => PyOSError::new_err(message),
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
pub(super) const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Looks for Python signals (Ctrl-C) from inside a heavy call.
pub(super) struct Signals(Mutex<(Instant, Option<PyErr>)>);

impl Signals {
    fn new() -> Self {
        Self(Mutex::new((Instant::now(), None)))
    }

    /// `true` stops the call.
    pub(super) fn pending(&self) -> bool {
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

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs `f` without the GIL. A panic becomes a RuntimeError.
pub(super) fn heavy<T: Send>(
    py: Python<'_>,
    f: impl FnOnce(&Signals) -> Result<T, Error> + Send,
) -> PyResult<T> {
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

pub(super) fn token_ids(tokens: Vec<i64>) -> PyResult<Vec<u32>> {
    let convert = |token: i64| {
        u32::try_from(token)
            .map_err(|_| PyValueError::new_err(format!("token id {token} is negative or too large")))
    };
    tokens.into_iter().map(convert).collect()
}
