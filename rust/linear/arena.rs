//! One block of memory for all weights of a model.

use crate::error::{Error, Result};
use memmap2::MmapMut;
use std::ops::Range;

const ALIGN: usize = 64;
const HUGE_PAGE: usize = if cfg!(miri) { 4096 } else { 2 << 20 }; // all that is mapped costs Miri time

pub(super) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

/// One block of memory for all weights, on 2 MiB boundaries and advised for huge pages: a decode
/// step reads all of it, and small pages cost a third of the bandwidth.
pub struct Arena {
    pub(super) map: MmapMut,
    used: usize,
    end: usize,
}

impl Arena {
    /// Room for `bytes`.
    ///
    /// # Errors
    /// `Memory` if it cannot be had.
    pub fn new(bytes: usize) -> Result<Self> {
        let map = MmapMut::map_anon(bytes.saturating_add(HUGE_PAGE)).map_err(|_| Error::Memory(bytes))?;
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage); // only advice: a kernel may have none
        let used = map.as_ptr().align_offset(HUGE_PAGE);
        Ok(Self { map, used, end: used + bytes })
    }

    pub(super) fn take(&mut self, bytes: usize) -> Range<usize> {
        let start = self.used;
        self.used += aligned(bytes);
        assert!(self.used <= self.end, "the arena was made too small");
        start..start + bytes
    }

    /// Bytes it was made for.
    pub fn bytes(&self) -> usize {
        self.end - self.map.as_ptr().align_offset(HUGE_PAGE)
    }

    /// The share of them that is taken, 0 to 1.
    pub fn used_share(&self) -> f64 {
        self.contents().len() as f64 / self.bytes().max(1) as f64
    }

    /// All that was taken: what a decode step reads.
    pub fn contents(&self) -> &[u8] {
        &self.map[self.map.as_ptr().align_offset(HUGE_PAGE)..self.used]
    }

    pub(super) fn slice<T: bytemuck::Pod>(&self, range: &Range<usize>) -> &[T] {
        bytemuck::cast_slice(&self.map[range.clone()])
    }
}
