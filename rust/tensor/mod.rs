//! Tensors: growable rows for caches and activations, Q8_0 blocks, and weights as kernels read them.

mod buffer;
mod packed;
mod q8_0;
#[allow(clippy::module_inception)] // the design names this file
mod tensor;

pub use buffer::Buffer;
pub use packed::{Arena, PackedWeight, RowSource, WeightDtype};
pub use q8_0::BlockQ8_0;
pub use tensor::{KvDtype, Rows, Tensor, TensorData, zeros};
