//! One block of memory for all weights of a model.

use crate::error::{Error, Result};
use memmap2::MmapMut;
use std::ops::Range;

const ALIGN: usize = 64;
const HUGE_PAGE: usize = if cfg!(miri) { 4096 } else { 2 << 20 }; // all that is mapped costs Miri time

/// What `bytes` take in an arena; `None` if no number holds it.
pub(super) fn aligned(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(ALIGN)
}

/// One block of memory for all weights, on 2 MiB boundaries and advised for huge pages: a decode
/// step reads all of it, and small pages cost a third of the bandwidth.
pub struct Arena {
    map: MmapMut,
    start: usize,
    used: usize,
    end: usize,
}

impl Arena {
    /// Room for `bytes`.
    ///
    /// # Errors
    /// `Memory` if it cannot be had.
    pub fn new(bytes: usize) -> Result<Self> {
        let room = bytes.checked_add(HUGE_PAGE).ok_or(Error::Memory(bytes))?;
        let map = MmapMut::map_anon(room).map_err(|_| Error::Memory(bytes))?;
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage); // only advice: a kernel may have none
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        Ok(Self { map, start, used: start, end: start + bytes })
    }

    pub(super) fn take(&mut self, bytes: usize) -> Range<usize> {
        let range = self.used..self.used + bytes;
        self.used = range.end.next_multiple_of(ALIGN);
        assert!(self.used <= self.end, "the arena was made too small");
        range
    }

    /// Bytes it was made for.
    pub fn bytes(&self) -> usize {
        self.end - self.start
    }

    /// The share of them that is taken, 0 to 1.
    pub fn used_share(&self) -> f64 {
        self.contents().len() as f64 / self.bytes().max(1) as f64
    }

    /// All that was taken: what a decode step reads.
    pub fn contents(&self) -> &[u8] {
        &self.map[self.start..self.used]
    }

    pub(super) fn slice(&self, range: &Range<usize>) -> &[u8] {
        &self.map[range.clone()]
    }

    /// Two ranges, the second of which starts where the first ends or later.
    pub(super) fn slices_mut(&mut self, [first, second]: [Range<usize>; 2]) -> [&mut [u8]; 2] {
        let (low, high) = self.map.split_at_mut(second.start);
        [&mut low[first], &mut high[..second.len()]]
    }
}
