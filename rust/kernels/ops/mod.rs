//! The kernels themselves: one file an operation, each written once over sixteen lanes.

pub mod attention;
pub mod decode_attention;
pub mod float;
pub mod gated;
pub mod matmul;
pub mod peak;
pub mod prefill_attention;
pub mod q8_0;
