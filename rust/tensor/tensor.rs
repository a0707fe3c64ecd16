//! `Tensor`: rows of a fixed width that grow in place.

use super::buffer::Buffer;
use super::q8_0::BlockQ8_0;
use crate::error::{Error, Result};
use crate::kernels::Isa;
use crate::kernels::quantize::QUANT_BLOCK;
use half::f16;
use half::slice::HalfFloatSliceExt;

/// A matrix of `shape[0]` rows and `shape[1]` columns, row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    data: TensorData,
    shape: [usize; 2],
}

#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
    /// `[rows][ceil(cols / 32)]` blocks.
    Q8_0(Vec<BlockQ8_0>),
}

/// What a KV cache stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    F32,
    F16,
}

impl KvDtype {
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            _ => Err(Error::argument(format!("kv_dtype must be f32 or f16, not {name:?}"))),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
}

/// Borrowed f32 rows: row `r` is `data[r * stride..][..cols]`.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub data: &'a [f32],
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'a> Rows<'a> {
    pub fn row(&self, r: usize) -> &'a [f32] {
        &self.data[r * self.stride..][..self.cols]
    }

    /// Rows `start..start + rows`.
    pub fn slice(&self, start: usize, rows: usize) -> Self {
        assert!(start + rows <= self.rows);
        Self { data: &self.data[start * self.stride..], rows, ..*self }
    }

    /// Columns `start..start + cols` of the same rows.
    pub fn columns(&self, start: usize, cols: usize) -> Self {
        assert!(start + cols <= self.cols);
        Self { data: &self.data[start.min(self.data.len())..], cols, ..*self }
    }
}

impl Tensor {
    /// F32 values, `[rows, cols]`.
    ///
    /// # Errors
    /// `Argument` if there are not `rows * cols` of them.
    pub fn from_f32(values: Vec<f32>, shape: [usize; 2]) -> Result<Self> {
        if Some(values.len()) != shape[0].checked_mul(shape[1]) {
            return Err(Error::argument(format!("{} values do not fill the shape {shape:?}", values.len())));
        }
        Ok(Self { data: TensorData::F32(values.into()), shape })
    }

    /// Zero rows of `cols` F32 columns: storage that grows by [`Tensor::append_rows`].
    pub fn empty_rows(cols: usize) -> Self {
        Self::empty_rows_of(KvDtype::F32, cols)
    }

    /// [`Tensor::empty_rows`] of a chosen dtype.
    pub fn empty_rows_of(dtype: KvDtype, cols: usize) -> Self {
        let data = match dtype {
            KvDtype::F32 => TensorData::F32(Buffer::default()),
            KvDtype::F16 => TensorData::F16(Buffer::default()),
        };
        Self { data, shape: [0, cols] }
    }

    /// Claims capacity for `rows` more rows, exactly; what is claimed already is not claimed again.
    ///
    /// # Errors
    /// `Cache` if the memory cannot be had, `Argument` for a quantized tensor.
    pub fn reserve_rows(&mut self, rows: usize) -> Result<()> {
        let values = rows.saturating_mul(self.shape[1]);
        let failed = match &mut self.data {
            TensorData::F32(v) => v.reserve_exact(values).is_err(),
            TensorData::F16(v) => v.reserve_exact(values).is_err(),
            TensorData::Q8_0(_) => return Err(Self::quantized()),
        };
        if failed {
            return Err(Error::cache(format!(
                "no memory for {rows} more rows of {} columns (rows held: {})",
                self.shape[1], self.shape[0]
            )));
        }
        Ok(())
    }

    /// Copies the rows of `src` onto the end: `shape[0]` is the write offset. Within the claimed
    /// capacity nothing is allocated and no row that is there is copied; beyond it the capacity
    /// doubles, so that copying stays constant per row on average.
    ///
    /// # Errors
    /// `Argument` for a quantized tensor on either side or another column width; `Cache` if the
    /// memory cannot be had. The tensor is unchanged then.
    pub fn append_rows(&mut self, src: &Tensor) -> Result<()> {
        match &src.data {
            TensorData::F32(values) => self.append(Rows {
                data: values,
                rows: src.shape[0],
                cols: src.shape[1],
                stride: src.shape[1],
            }),
            TensorData::F16(_) => {
                let wide = src.to_f32()?; // exact, and narrowed back exactly
                self.append(Rows {
                    data: &wide,
                    rows: src.shape[0],
                    cols: src.shape[1],
                    stride: src.shape[1],
                })
            }
            TensorData::Q8_0(_) => Err(Self::quantized()),
        }
    }

    /// [`Tensor::append_rows`] for rows that are borrowed from elsewhere. An F16 tensor rounds them
    /// to nearest, ties to even.
    pub fn append(&mut self, src: Rows<'_>) -> Result<()> {
        if src.cols != self.shape[1] {
            return Err(Error::argument(format!(
                "rows of {} columns cannot be appended to rows of {}",
                src.cols, self.shape[1]
            )));
        }
        if self.capacity_rows() < self.shape[0] + src.rows {
            self.reserve_rows(src.rows.max(self.shape[0]))?;
        }
        let (values, width) = (src.rows * src.cols, src.cols.max(1));
        match &mut self.data {
            TensorData::F32(to) => {
                for (r, to) in to.grow(values).chunks_exact_mut(width).enumerate() {
                    to.copy_from_slice(src.row(r));
                }
            }
            TensorData::F16(to) => {
                for (r, to) in to.grow(values).chunks_exact_mut(width).enumerate() {
                    to.convert_from_f32_slice(src.row(r));
                }
            }
            TensorData::Q8_0(_) => return Err(Self::quantized()),
        }
        self.shape[0] += src.rows;
        Ok(())
    }

    /// Forgets all rows from `rows` on; the capacity stays.
    pub fn truncate_rows(&mut self, rows: usize) {
        let rows = rows.min(self.shape[0]);
        match &mut self.data {
            TensorData::F32(v) => v.truncate(rows * self.shape[1]),
            TensorData::F16(v) => v.truncate(rows * self.shape[1]),
            TensorData::Q8_0(v) => v.truncate(rows * self.shape[1].div_ceil(QUANT_BLOCK)),
        }
        self.shape[0] = rows;
    }

    /// A new tensor: the rows of `a`, then those of `b`. Copies both; this is how the old cache grew.
    ///
    /// # Errors
    /// `Argument` for quantized tensors, another dtype or another column width; `Memory`.
    pub fn concat_dim0(a: &Tensor, b: &Tensor) -> Result<Tensor> {
        if a.shape[1] != b.shape[1] {
            return Err(Error::argument(format!(
                "rows of {} and of {} columns cannot be concatenated",
                a.shape[1], b.shape[1]
            )));
        }
        let data = match (&a.data, &b.data) {
            (TensorData::F32(x), TensorData::F32(y)) => TensorData::F32(joined(x, y)?.into()),
            (TensorData::F16(x), TensorData::F16(y)) => TensorData::F16(joined(x, y)?.into()),
            (TensorData::Q8_0(_), _) | (_, TensorData::Q8_0(_)) => return Err(Self::quantized()),
            _ => return Err(Error::argument("F32 and F16 rows cannot be concatenated")),
        };
        Ok(Tensor { data, shape: [a.shape[0] + b.shape[0], a.shape[1]] })
    }

    /// The same matrix in Q8_0; every row is padded with zeros to whole blocks of 32.
    ///
    /// # Errors
    /// `Argument` for a quantized tensor.
    pub fn quantize_q8_0(&self, isa: Isa) -> Result<Tensor> {
        let [rows, cols] = self.shape;
        let mut padded = Vec::with_capacity(rows * cols.next_multiple_of(QUANT_BLOCK));
        let values = self.to_f32()?;
        for r in 0..rows {
            padded.extend_from_slice(&values[r * cols..(r + 1) * cols]);
            padded.resize((r + 1) * cols.next_multiple_of(QUANT_BLOCK), 0.0);
        }
        let blocks = BlockQ8_0::quantize(isa, &padded);
        Ok(Tensor { data: TensorData::Q8_0(blocks), shape: self.shape })
    }

    /// All values, widened to f32 exactly.
    ///
    /// # Errors
    /// `Argument` for a quantized tensor, `Memory`.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut out = zeros(self.shape[0] * self.shape[1])?;
        for (r, row) in out.chunks_exact_mut(self.shape[1].max(1)).enumerate() {
            self.read_row(r, row)?;
        }
        Ok(out)
    }

    /// Row `r`, `[cols]`, widened to f32 exactly.
    ///
    /// # Errors
    /// `Argument` for a quantized tensor.
    pub fn read_row(&self, r: usize, out: &mut [f32]) -> Result<()> {
        let row = r * self.shape[1]..(r + 1) * self.shape[1];
        match &self.data {
            TensorData::F32(values) => out.copy_from_slice(&values[row]),
            TensorData::F16(values) => values[row].convert_to_f32_slice(out),
            TensorData::Q8_0(_) => return Err(Self::quantized()),
        }
        Ok(())
    }

    /// Rows of all heads, `[rows, heads * width]` F32, from `read(head, row, out)` of each.
    ///
    /// # Errors
    /// `Memory`, and what `read` returns.
    pub fn gather_heads(
        rows: usize,
        heads: usize,
        width: usize,
        read: impl Fn(usize, usize, &mut [f32]) -> Result<()>,
    ) -> Result<Self> {
        let mut out = zeros(rows * heads * width)?;
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            read(i % heads, i / heads, out)?;
        }
        Self::from_f32(out, [rows, heads * width])
    }

    pub fn data(&self) -> &TensorData {
        &self.data
    }

    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Rows that fit before storage must grow.
    pub fn capacity_rows(&self) -> usize {
        let values = match &self.data {
            TensorData::F32(v) => v.capacity(),
            TensorData::F16(v) => v.capacity(),
            TensorData::Q8_0(v) => return v.capacity() / self.shape[1].div_ceil(QUANT_BLOCK).max(1),
        };
        values / self.shape[1].max(1)
    }

    /// Bytes claimed, used or not.
    pub fn capacity_bytes(&self) -> usize {
        match &self.data {
            TensorData::F32(v) => v.capacity() * 4,
            TensorData::F16(v) => v.capacity() * 2,
            TensorData::Q8_0(v) => v.capacity() * size_of::<BlockQ8_0>(),
        }
    }

    fn quantized() -> Error {
        Error::argument("a quantized tensor has no rows to append, grow or widen")
    }
}

fn joined<T: Copy>(x: &[T], y: &[T]) -> Result<Vec<T>> {
    let (mut out, len) = (Vec::new(), x.len() + y.len());
    out.try_reserve_exact(len).map_err(|_| Error::Memory(len * size_of::<T>()))?;
    out.extend_from_slice(x);
    out.extend_from_slice(y);
    Ok(out)
}

/// `words` zeros on the heap.
///
/// # Errors
/// `Memory` if they cannot be had.
pub fn zeros(words: usize) -> Result<Vec<f32>> {
    let mut out = Vec::new();
    out.try_reserve_exact(words).map_err(|_| Error::Memory(words.saturating_mul(4)))?;
    out.resize(words, 0.0);
    Ok(out)
}
