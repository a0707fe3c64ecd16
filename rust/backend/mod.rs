//! Backends: the operations of a forward pass, on the portable kernels and one thread (`scalar`) or
//! on the best kernels and all threads (`simd`).

mod backend_trait;
mod profiler;
mod scalar;
mod simd;

pub use crate::kernels::Destination;
pub use backend_trait::{AttentionInput, Backend, partials_words};
pub use profiler::{Op, OpStats, Phase, Profiler};
pub use scalar::ScalarBackend;
pub use simd::SimdBackend;
