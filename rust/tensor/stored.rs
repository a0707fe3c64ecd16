//! A checkpoint's tensor as it is stored: what a loader lends and packing reads.

use super::buffer::try_resize;
use crate::error::{Error, Result};
use half::{bf16, f16};
use std::ops::Range;

/// The dtype of stored values, little-endian. All widen to f32 exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredDtype {
    F32,
    F16,
    Bf16,
}

impl StoredDtype {
    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// `out.len()` stored values, widened.
    pub fn widen(self, bytes: &[u8], out: &mut [f32]) {
        debug_assert_eq!(bytes.len(), out.len() * self.bytes());
        match self {
            Self::F32 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*b);
                }
            }
            Self::F16 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = f16::from_le_bytes(*b).to_f32();
                }
            }
            Self::Bf16 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = bf16::from_le_bytes(*b).to_f32();
                }
            }
        }
    }
}

/// Where stored bytes are: in memory, or in a file.
pub trait StoredBytes: Sync {
    /// Bytes `range`: lent, or read into `buffer`.
    ///
    /// # Errors
    /// `File` if they cannot be read, `Memory`.
    fn read<'b>(&'b self, range: Range<u64>, buffer: &'b mut Vec<u8>) -> Result<&'b [u8]>;

    /// What an error names: the file's path.
    fn origin(&self) -> String;
}

/// A named tensor, `[rows, cols]`, row after row; a vector is one row.
#[derive(Clone, Copy)]
pub struct StoredTensor<'a> {
    pub name: &'a str,
    pub dtype: StoredDtype,
    pub rows: usize,
    pub cols: usize,
    pub bytes: &'a dyn StoredBytes,
    /// Where the tensor starts in `bytes`.
    pub start: u64,
}

impl StoredTensor<'_> {
    /// Rows `rows` as they are stored: lent, or read into `buffer`.
    ///
    /// # Errors
    /// As [`StoredBytes::read`].
    pub fn read_rows<'b>(&'b self, rows: Range<usize>, buffer: &'b mut Vec<u8>) -> Result<&'b [u8]> {
        assert!(rows.end <= self.rows);
        let at = |row: usize| self.start + (row * self.cols * self.dtype.bytes()) as u64;
        self.bytes.read(at(rows.start)..at(rows.end), buffer)
    }

    /// All values, widened.
    ///
    /// # Errors
    /// As [`StoredBytes::read`].
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut buffer = Vec::new();
        let bytes = self.read_rows(0..self.rows, &mut buffer)?;
        let mut values = Vec::new();
        try_resize(&mut values, self.rows * self.cols)?;
        self.dtype.widen(bytes, &mut values);
        Ok(values)
    }

    /// What is wrong with this tensor.
    pub fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::model(format!("{}: {} {what}", self.bytes.origin(), self.name))
    }
}
