//! Storage of values that grows in place: on the heap while small, in pages of its own once large.

use crate::error::{Error, Result as Fallible};
use bytemuck::Pod;
use memmap2::MmapMut;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// From here on values live in pages of their own, advised for huge pages before anything touches
/// them. The heap would not do: the allocator's own bookkeeping puts a small page into every 2 MiB,
/// and no huge page fits there any more. A head's storage may be smaller than a huge page, but the
/// heads of a cache are mapped side by side and share them. Below this, small pages are the better
/// ones: those of the headroom are not touched before they are needed.
const MAPPED_BYTES: usize = if cfg!(miri) { 4096 } else { 1 << 20 };

/// Values in one run of memory, and room for more.
pub struct Buffer<T>(Storage<T>);

enum Storage<T> {
    Heap(Vec<T>),
    Mapped {
        map: MmapMut,
        /// Values that were asked for: pages may hold a few more.
        capacity: usize,
        len: usize,
    },
}

/// The memory cannot be had.
#[derive(Debug)]
pub struct NoMemory;

/// Makes `values` `len` long, with zeros where it grows.
///
/// # Errors
/// `Memory` if it cannot be had; nothing has changed then.
pub fn try_resize<T: Pod>(values: &mut Vec<T>, len: usize) -> Fallible<()> {
    let more = len.saturating_sub(values.len());
    values.try_reserve_exact(more).map_err(|_| Error::Memory(len.saturating_mul(size_of::<T>())))?;
    values.resize(len, T::zeroed());
    Ok(())
}

impl<T: Pod> Buffer<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// `NoMemory`.
    pub fn zeroed(len: usize) -> Result<Self, NoMemory> {
        let mut buffer = Self::default();
        buffer.reserve_exact(len)?;
        buffer.grow(len);
        Ok(buffer)
    }

    /// Values that fit before storage must move.
    pub fn capacity(&self) -> usize {
        match &self.0 {
            Storage::Heap(values) => values.capacity(),
            Storage::Mapped { capacity, .. } => *capacity,
        }
    }

    /// Room for `more` values, exactly; what there is already is not claimed again.
    ///
    /// # Errors
    /// `NoMemory`; nothing has changed then.
    pub fn reserve_exact(&mut self, more: usize) -> Result<(), NoMemory> {
        let wanted = self.len().checked_add(more).ok_or(NoMemory)?;
        if wanted <= self.capacity() {
            return Ok(());
        }
        let bytes = wanted.checked_mul(size_of::<T>()).ok_or(NoMemory)?;
        if let (Storage::Heap(values), true) = (&mut self.0, bytes < MAPPED_BYTES) {
            return values.try_reserve_exact(more).map_err(|_| NoMemory);
        }
        let mut map = MmapMut::map_anon(bytes).map_err(|_| NoMemory)?;
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage); // only advice: a kernel may have none
        let held: &[u8] = bytemuck::cast_slice(self);
        map[..held.len()].copy_from_slice(held);
        self.0 = Storage::Mapped { map, capacity: wanted, len: self.len() };
        Ok(())
    }

    /// `more` values at the end, to be written: what they hold until then is not defined.
    ///
    /// # Panics
    /// If no room was reserved for them.
    pub fn grow(&mut self, more: usize) -> &mut [T] {
        let start = self.len();
        let end = start + more;
        assert!(end <= self.capacity(), "no room was reserved");
        match &mut self.0 {
            Storage::Heap(values) => values.resize(end, T::zeroed()),
            Storage::Mapped { len, .. } => *len = end,
        }
        &mut self[start..]
    }

    /// Forgets all but the first `len` values; the capacity stays.
    pub fn truncate(&mut self, to: usize) {
        match &mut self.0 {
            Storage::Heap(values) => values.truncate(to),
            Storage::Mapped { len, .. } => *len = to.min(*len),
        }
    }
}

impl<T> Default for Buffer<T> {
    fn default() -> Self {
        Self(Storage::Heap(Vec::new()))
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Storage::Heap(values) => values,
            Storage::Mapped { map, len, .. } => bytemuck::cast_slice(&map[..len * size_of::<T>()]),
        }
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Storage::Heap(values) => values,
            Storage::Mapped { map, len, .. } => bytemuck::cast_slice_mut(&mut map[..*len * size_of::<T>()]),
        }
    }
}

impl<T> From<Vec<T>> for Buffer<T> {
    fn from(values: Vec<T>) -> Self {
        Self(Storage::Heap(values))
    }
}

impl<T: Pod> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        self.to_vec().into()
    }
}

impl<T: Pod + PartialEq> PartialEq for Buffer<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Pod + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
