//! Whether a row is finite.

use super::pieces::{load_piece, pieces};
use crate::kernels::isa::lanes::{Kernel, Lanes};

/// Whether no value is NaN or infinite.
pub struct AllFinite<'a> {
    pub x: &'a [f32],
}

impl Kernel for AllFinite<'_> {
    type Output = bool;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> bool {
        // x - x is 0 for every finite x and NaN for the others, and NaN stays.
        let mut zero = l.splat(0.0);
        for (i, n) in pieces(self.x.len()) {
            // SAFETY: i + n <= x.len().
            let x = unsafe { load_piece(l, self.x.as_ptr().add(i), n) };
            zero = l.add(zero, l.sub(x, x));
        }
        l.sum(zero) == 0.0
    }
}
