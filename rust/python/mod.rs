//! The extension module `qwen_rs._core`. It only translates: arguments in, results out, errors to
//! exceptions, the GIL released around every heavy call.

use crate::kernels::Isa;
use crate::linear::WeightDtype;
use crate::tensor::{BlockQ8_0, Tensor, TensorData};
use crate::threads::Threads;
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

mod calls;
mod engine;
mod model;
mod sequence;

use calls::{CacheError, ModelError};
use engine::{Engine, Event};
use model::Model;
use sequence::{Cache, Pool, Sampler};

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
/// takes. ``portable`` is the last of them on every machine.
#[pyfunction]
fn available_isas() -> Vec<&'static str> {
    Isa::available().iter().map(Isa::name).collect()
}

/// How weights can be kept, the default first.
#[pyfunction]
fn weight_dtypes() -> Vec<&'static str> {
    WeightDtype::ALL.iter().map(|dtype| dtype.name()).collect()
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
        Cache, CacheError, Engine, Event, Model, ModelError, Pool, Sampler, available_isas, default_threads,
        quantize_q8_0, weight_dtypes,
    };
}
