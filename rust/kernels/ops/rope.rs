//! Rotary position embedding (Su et al. 2021) of q and k heads, in the half-split form of the Qwen
//! checkpoints: element `i` turns with element `i + head_dim / 2`.

use super::norm::{inverse_rms, normed_piece};
use super::pieces::{load_piece, pieces, store_piece};
use crate::kernels::isa::lanes::{Kernel, Lanes};

/// Turns a piece `x` of the first half of a head, from `i` on, with the piece `y` of the second; stores both.
///
/// # Safety
/// `head` is valid for writing and `rotation` for reading `2 * half` values, and `i + n <= half`, `n <= 16`.
#[inline(always)]
unsafe fn store_turned<L: Lanes>(
    l: L,
    [x, y]: [L::F; 2],
    head: *mut f32,
    rotation: *const f32,
    half: usize,
    (i, n): (usize, usize),
) {
    // SAFETY: the caller's duty is the same.
    unsafe {
        let cos = load_piece(l, rotation.add(i), n);
        let sin = load_piece(l, rotation.add(half + i), n);
        let turned_x = l.mul_add(x, cos, l.sub(l.splat(0.0), l.mul(y, sin)));
        let turned_y = l.mul_add(y, cos, l.mul(x, sin));
        store_piece(l, head.add(i), turned_x, n);
        store_piece(l, head.add(half + i), turned_y, n);
    }
}

/// Rotary position embedding of one head in place.
pub struct Rope<'a> {
    pub head: &'a mut [f32], // [head_dim]
    pub rotation: &'a [f32], // [head_dim]: head_dim / 2 cosines, then as many sines
}

impl Kernel for Rope<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let width = self.head.len();
        let half = width / 2;
        assert!(self.rotation.len() == width && half * 2 == width);
        let (head, rotation) = (self.head.as_mut_ptr(), self.rotation.as_ptr());
        for (i, n) in pieces(half) {
            // SAFETY: i + n <= half, and both hold 2 x half values.
            unsafe {
                let pair = [load_piece(l, head.add(i), n), load_piece(l, head.add(half + i), n)];
                store_turned(l, pair, head, rotation, half, (i, n));
            }
        }
    }
}

/// [`Rope`] of a head's RMSNorm, in one pass.
pub struct NormRope<'a> {
    pub head: &'a mut [f32], // [head_dim]
    pub weight: &'a [f32],   // [head_dim]
    pub rotation: &'a [f32], // [head_dim]: head_dim / 2 cosines, then as many sines
    pub eps: f32,
}

impl Kernel for NormRope<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let width = self.head.len();
        let half = width / 2;
        assert!(self.weight.len() == width && self.rotation.len() == width && half * 2 == width);
        let scale = l.splat(inverse_rms(l, self.head, self.eps));
        let (head, weight, rotation) = (self.head.as_mut_ptr(), self.weight.as_ptr(), self.rotation.as_ptr());
        for (i, n) in pieces(half) {
            // SAFETY: i + n <= half, and all three hold 2 x half values.
            unsafe {
                let x = normed_piece(l, head.add(i), weight.add(i), scale, n);
                let y = normed_piece(l, head.add(half + i), weight.add(half + i), scale, n);
                store_turned(l, [x, y], head, rotation, half, (i, n));
            }
        }
    }
}
