//! Float kernels, each written once over 16 lanes: row operations and the float matmul.
//!
//! Every result has one order of operations (design: the arithmetic law). Sums over a row put
//! element `i` into lane `i mod 16` and fold the lanes by halves; what does not fill 16 lanes is
//! padded with zeros, which a sum does not feel.

use crate::kernels::isa::lanes::{Element, Kernel, LANES, Lanes};

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
