//! Tensors: growable rows for caches and activations and Q8_0 blocks.

mod buffer;
mod q8_0;
#[allow(clippy::module_inception)] // the design names this file
mod tensor;

pub use buffer::Buffer;
pub use q8_0::BlockQ8_0;
pub use tensor::{KvDtype, Rows, Tensor, TensorData};
