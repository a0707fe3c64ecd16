//! Lends the named tensors of a checkpoint: bytes with a dtype and a shape. Knows no architecture.

mod random;
mod safetensors;

pub use random::RandomWeights;
pub use safetensors::Checkpoint;

use crate::error::{Error, Result};
use crate::tensor::StoredTensor;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Where named tensors come from.
pub trait TensorSource: Sync {
    /// The tensor `name` of exactly this shape, `[rows, cols]` or `[len]`.
    ///
    /// # Errors
    /// `Model` if it is missing or has another shape or a dtype that is not supported: the message names
    /// file and tensor.
    fn tensor<'a>(&'a self, name: &'a str, shape: &[usize]) -> Result<StoredTensor<'a>>;
}

/// A config or index of this size is not one; what parsing takes is some fourteen times as much.
const LARGEST_JSON: u64 = 16 << 20;

/// The text of a small file.
///
/// # Errors
/// `File` if it cannot be read, `Model` if it is too large or not UTF-8; both name it.
pub fn read_json(path: &Path) -> Result<String> {
    let failed = |e| Error::file(path, e);
    let size = regular_file(path)?;
    if size > LARGEST_JSON {
        return Err(Error::model(format!("{}: too large ({size} bytes)", path.display())));
    }
    let mut bytes = Vec::new();
    let room = size as usize + 1; // one more, so that the end is seen without growing
    bytes.try_reserve_exact(room).map_err(|_| Error::Memory(room))?;
    File::open(path).map_err(failed)?.take(size).read_to_end(&mut bytes).map_err(failed)?;
    String::from_utf8(bytes).map_err(|_| Error::model(format!("{}: not valid UTF-8", path.display())))
}

/// The size of a file that is one: a pipe would be waited for, a device never ends.
fn regular_file(path: &Path) -> Result<u64> {
    let metadata = std::fs::metadata(path).map_err(|e| Error::file(path, e))?;
    if !metadata.is_file() {
        return Err(Error::model(format!("{}: not a file", path.display())));
    }
    Ok(metadata.len())
}
