//! Weights of linear layers as the kernels read them: 16 output rows interleaved, all in one arena.
//!
//! A format is a line where `weight.rs` lists them: floats are in `float.rs`, quant blocks of 32 in `quantized.rs`,
//! each block format a file of the kernels. Formats may differ from weight to weight, so what a matmul reads is asked of the weight: [`Linear::activations`].

mod activations;
mod arena;
mod float;
mod format;
mod gated;
mod pack;
mod quantized;
mod weight;

pub use activations::Activations;
pub use arena::Arena;
pub use gated::GatedPair;
pub use pack::Packer;
pub use weight::{Linear, WeightDtype};
