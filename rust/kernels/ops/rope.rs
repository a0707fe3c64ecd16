//! RMSNorm and rotary position embedding of q and k heads.

use super::norm::{inverse_rms, normed_piece};
use super::pieces::{load_piece, pieces, store_piece};
use crate::kernels::isa::lanes::{Kernel, Lanes};

/// RMSNorm of one head in place, then rotary position embedding (Su et al. 2021) in the half-split
/// form of the Qwen3 checkpoints: element `i` turns with element `i + head_dim / 2`.
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
                let cos = load_piece(l, rotation.add(i), n);
                let sin = load_piece(l, rotation.add(half + i), n);
                let turned_x = l.mul_add(x, cos, l.sub(l.splat(0.0), l.mul(y, sin)));
                let turned_y = l.mul_add(y, cos, l.mul(x, sin));
                store_piece(l, head.add(i), turned_x, n);
                store_piece(l, head.add(half + i), turned_y, n);
            }
        }
    }
}
