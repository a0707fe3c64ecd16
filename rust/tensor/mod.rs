//! Tensors: growable rows for caches and activations, Q8_0 blocks, and tensors as a checkpoint stores them.

mod buffer;
mod q8_0;
mod stored;
#[allow(clippy::module_inception)] // the design names this file
mod tensor;

pub use buffer::{Buffer, try_resize};
pub use q8_0::BlockQ8_0;
pub use stored::{StoredBytes, StoredDtype, StoredTensor};
pub use tensor::{KvDtype, Rows, Tensor, TensorData, zeros};
