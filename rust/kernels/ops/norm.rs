//! RMSNorm.

use super::pieces::{load_piece, pieces, store_piece};
use crate::kernels::isa::lanes::{Kernel, Lanes};

/// 1 / sqrt(mean(x^2) + eps); NaN where the squares overflow: an infinite mean would make the row 0.
#[inline(always)]
pub(in crate::kernels) fn inverse_rms<L: Lanes>(l: L, x: &[f32], eps: f32) -> f32 {
    let mut squares = l.splat(0.0);
    for (i, n) in pieces(x.len()) {
        // SAFETY: i + n <= x.len().
        let v = unsafe { load_piece(l, x.as_ptr().add(i), n) };
        squares = l.mul_add(v, v, squares);
    }
    let mean = l.sum(squares) / x.len() as f32 + eps;
    if mean == f32::INFINITY { f32::NAN } else { 1.0 / mean.sqrt() }
}

/// `n` values of a normed row: `x * scale * weight`.
///
/// # Safety
/// `x` and `weight` are valid for reading `n` values, `n <= 16`.
#[inline(always)]
pub(in crate::kernels) unsafe fn normed_piece<L: Lanes>(
    l: L,
    x: *const f32,
    weight: *const f32,
    scale: L::F,
    n: usize,
) -> L::F {
    // SAFETY: the caller's duty is the same.
    unsafe { l.mul(l.mul(load_piece(l, x, n), scale), load_piece(l, weight, n)) }
}

/// `out = x / rms(x) * weight` (Zhang and Sennrich 2019), one row.
pub struct RmsNorm<'a> {
    pub x: &'a [f32],       // [width]
    pub weight: &'a [f32],  // [width]
    pub out: &'a mut [f32], // [width]
    pub eps: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        assert!(self.weight.len() == self.x.len() && self.out.len() == self.x.len());
        let scale = l.splat(inverse_rms(l, self.x, self.eps));
        for (i, n) in pieces(self.x.len()) {
            // SAFETY: i + n <= the length of all three.
            unsafe {
                let normed = normed_piece(l, self.x.as_ptr().add(i), self.weight.as_ptr().add(i), scale, n);
                store_piece(l, self.out.as_mut_ptr().add(i), normed, n);
            }
        }
    }
}
