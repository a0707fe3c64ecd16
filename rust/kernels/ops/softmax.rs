//! Softmax: of the scores of an attention chunk, and of a sampler's logits.

use super::pieces::{load_piece, pieces, store_piece};
use crate::kernels::isa::lanes::{Kernel, LANES, Lanes};

/// Positions in a chunk of attention: a part of the arithmetic law.
pub const CHUNK: usize = 256;

/// Scores to exponentials of their distance from the largest; returns it and their sum. Scores
/// beyond `len` are -infinity and become 0. A score that is not finite (an infinite key, or an overflow)
/// makes the sum NaN: it would get a weight of 0, or leave the others none.
#[inline(always)]
pub(in crate::kernels) fn softmax<L: Lanes>(l: L, scores: &mut [f32; CHUNK], len: usize) -> (f32, f32) {
    let used = len.next_multiple_of(LANES);
    let mut not_finite = l.splat(0.0); // 0 x score: NaN stays
    let p = scores.as_mut_ptr();
    let mut largest = l.splat(f32::NEG_INFINITY);
    let mut sum = l.splat(0.0);
    // SAFETY: `used` is at most CHUNK.
    unsafe {
        let whole = len / LANES * LANES;
        for i in (0..whole).step_by(LANES) {
            let scores = l.load(p.add(i));
            largest = l.max(largest, scores);
            not_finite = l.mul_add(scores, l.splat(0.0), not_finite);
        }
        if whole < len {
            largest = l.max(largest, l.load(p.add(whole)));
            let scores = l.load_first(p.add(whole), len - whole);
            not_finite = l.mul_add(scores, l.splat(0.0), not_finite);
        }
        let largest = l.max_lane(largest);
        for i in (0..used).step_by(LANES) {
            let e = l.exp(l.sub(l.load(p.add(i)), l.splat(largest)));
            sum = l.add(sum, e);
            l.store(p.add(i), e);
        }
        (largest, l.sum(sum) + l.sum(not_finite))
    }
}

/// `x = e^(x - largest)`; returns the sum in 16 lanes. What the sampler's softmax needs.
pub struct ExpSum<'a> {
    pub x: &'a mut [f32],
    pub largest: f32,
}

impl Kernel for ExpSum<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> f32 {
        let largest = l.splat(self.largest);
        let mut lanes = [0f32; LANES];
        let mut total = l.splat(0.0);
        for (i, n) in pieces(self.x.len()) {
            // SAFETY: i + n <= x.len(); `lanes` holds 16 values.
            unsafe {
                let p = self.x.as_mut_ptr().add(i);
                let e = l.exp(l.sub(load_piece(l, p, n), largest));
                l.store(lanes.as_mut_ptr(), e);
                // A padded lane holds e^-largest: it is not one of ours.
                lanes[n..].fill(0.0);
                total = l.add(total, l.load(lanes.as_ptr()));
                store_piece(l, p, e, n);
            }
        }
        l.sum(total)
    }
}
