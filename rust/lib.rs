//! Qwen3 language models on ordinary CPUs.
//!
//! The crate in the order that data flows:
//!
//! - [`loader`]: lends the named tensors of a checkpoint, safetensors or random
//! - [`tensor`]: growable rows, Q8_0 blocks
//! - [`linear`]: weights packed as the kernels read them, one file a format
//! - [`kernels`]: one source per kernel, run on the instruction set found at run time
//! - [`threads`]: how rows and heads are split over workers
//! - [`backend`]: what a pass runs on: instruction set, workers, counters
//! - [`cache`]: the zero-copy KV cache, the paged one, and the copying baseline
//! - [`model`]: config, weights, and the forward pass over any mixture of prompts and decode steps
//! - [`sampler`]: logits to a token
//! - [`engine`]: many sequences at once: who runs, what each brings to a pass, and the step
//!
//! Two promises hold everywhere: the KV cache grows in place and is read by borrowing, and every
//! float result has one written order of operations, so that logits are the same bits on every
//! instruction set, thread count, batch and cache.

pub mod backend;
pub mod cache;
pub mod engine;
pub mod error;
pub mod kernels;
pub mod linear;
pub mod loader;
pub mod model;
pub mod sampler;
pub mod tensor;
pub mod threads;

#[cfg(feature = "python")]
mod python;
