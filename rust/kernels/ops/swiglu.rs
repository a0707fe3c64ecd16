//! The gate of an MLP.

use super::pieces::{load_piece, pieces, store_piece};
use crate::kernels::isa::lanes::{Kernel, Lanes};

/// `gate = silu(gate) * up`, with silu(x) = x / (1 + e^-x) (Shazeer 2020).
pub struct SwiGlu<'a> {
    pub gate: &'a mut [f32],
    pub up: &'a [f32],
}

impl Kernel for SwiGlu<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        assert_eq!(self.up.len(), self.gate.len());
        let (zero, one) = (l.splat(0.0), l.splat(1.0));
        for (i, n) in pieces(self.gate.len()) {
            // SAFETY: i + n <= the length of both.
            unsafe {
                let out = self.gate.as_mut_ptr().add(i);
                let gate = load_piece(l, out, n);
                let up = load_piece(l, self.up.as_ptr().add(i), n);
                // e^88 is the largest power that is finite; silu is 0 there in f32 for all uses.
                let negated = l.sub(zero, l.max(gate, l.splat(-88.0)));
                let silu = l.div(gate, l.add(one, l.exp(negated)));
                store_piece(l, out, l.mul(silu, up), n);
            }
        }
    }
}
