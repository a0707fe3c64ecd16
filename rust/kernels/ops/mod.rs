//! The kernels themselves: one file an operation, each written once over sixteen lanes.

pub mod attention;
pub mod decode_attention;
pub mod finite;
pub mod gated;
pub mod matmul_float;
pub mod matmul_int8;
pub mod norm;
pub mod peak;
pub(super) mod pieces;
pub mod prefill_attention;
pub mod q8_0;
pub mod quantize;
pub mod rope;
pub mod softmax;
pub mod swiglu;
