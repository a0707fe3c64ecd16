//! A row as pieces of 16 lanes. Sums over a row put element `i` into lane `i mod 16` and fold the lanes by
//! halves; what does not fill 16 lanes is padded with zeros, which change no sum.

use crate::kernels::isa::lanes::{Element, LANES, Lanes};

/// `(offset, lanes)` of each 16-lane piece of a row of `len` values.
#[inline(always)]
pub(in crate::kernels) fn pieces(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(LANES).map(move |i| (i, LANES.min(len - i)))
}

/// # Safety
/// `p` is valid for reading `n` values, `n <= 16`.
#[inline(always)]
pub(in crate::kernels) unsafe fn load_piece<L: Lanes, T: Element>(l: L, p: *const T, n: usize) -> L::F {
    // SAFETY: the caller's duty is the same.
    unsafe { if n == LANES { T::load(l, p) } else { l.load_first(p, n) } }
}

/// # Safety
/// `p` is valid for writing `n` values, `n <= 16`.
#[inline(always)]
pub(in crate::kernels) unsafe fn store_piece<L: Lanes>(l: L, p: *mut f32, v: L::F, n: usize) {
    // SAFETY: the caller's duty is the same.
    unsafe { if n == LANES { l.store(p, v) } else { l.store_first(p, v, n) } }
}
