//! Sixteen lanes: the one vector shape that every kernel is written for.
//!
//! A kernel is written once, generic over [`Lanes`], and instantiated for each instruction set. The
//! trait has only operations that IEEE 754 defines to the last bit (and exact integer sums), so a
//! kernel gives the same bits whichever implementation runs it. A value of an implementing type is
//! the proof that the CPU can run it: `Avx2` and `Avx512` are made by run-time detection alone.

use crate::kernels::tiles::Tiles;
use half::{bf16, f16};

/// A kernel call with its arguments; `run` is the kernel's only source.
pub trait Kernel {
    type Output;
    fn run<L: Lanes>(self, l: L) -> Self::Output;
}

/// How many lanes a vector has, in every instruction set.
pub const LANES: usize = 16;

/// An instruction set: lanes that a machine may have, and how to run kernels on them.
pub trait InstructionSet: Lanes {
    /// What `QWEN_RS_ISA` calls it.
    const NAME: &'static str;
    /// The proof, if CPU and operating system run it.
    fn detect() -> Option<Self>;
    /// Runs a kernel that is compiled with the set's features.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;
}

/// Sixteen f32 lanes, sixteen i32 lanes, and what can be done with them bit for bit the same
/// everywhere.
///
/// Every operation is defined for every input. Arithmetic is that of IEEE 754, rounded to nearest, ties
/// to even; denormals are kept, in and out. Which NaN a NaN is (its sign and payload) is the only thing
/// that may differ: nothing may depend on it. What each operation makes of a NaN stands with it; where
/// nothing does, a NaN among its inputs gives a NaN.
///
/// The memory operations are `unsafe`: the pointer must be valid for the lanes that are read or
/// written. Nothing needs alignment.
pub trait Lanes: Copy + Send + Sync + 'static {
    /// 16 x f32.
    type F: Copy;
    /// 16 x i32.
    type I: Copy;
    /// 16 output rows x 4 values of k of unsigned Q8_0 weights, ready for [`Lanes::dot_q8_0`].
    type W: Copy;
    /// The tiles of kernels on its registers.
    type Tiles: Tiles;

    fn splat(self, x: f32) -> Self::F;
    /// # Safety
    /// `p` is valid for reading 16 f32. Here and below it need not be aligned.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// Widens exactly: denormals become normal floats, infinities stay.
    /// # Safety
    /// `p` is valid for reading 16 f16.
    unsafe fn load_f16(self, p: *const f16) -> Self::F;
    /// Widens exactly: denormals and infinities stay what they are.
    /// # Safety
    /// `p` is valid for reading 16 bf16.
    unsafe fn load_bf16(self, p: *const bf16) -> Self::F;
    /// # Safety
    /// `p` is valid for writing 16 f32.
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// To the nearest integer, ties to even, and saturated: what is above 127 (infinity too) is stored as
    /// 127, what is below -128 as -128, NaN as 0.
    /// # Safety
    /// `p` is valid for writing 16 i8.
    unsafe fn store_i8(self, p: *mut i8, v: Self::F);

    /// Asks for the cache line at `p`, which need not be a valid address.
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: every x86-64 has it, and it never faults.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
        }
        let _ = p; // elsewhere nothing is asked for
    }
    /// [`Lanes::prefetch`] into the second-level cache only.
    #[inline(always)]
    fn prefetch_l2(self, p: *const u8) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: as in `prefetch`.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast());
        }
        let _ = p;
    }

    /// A sum of infinities of opposite signs is NaN, as is their difference in `sub`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// 0 x infinity is NaN.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// x / 0 is an infinity; 0 / 0 and infinity / infinity are NaN.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once; NaN where the product or the sum would be.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }` in each lane: of a NaN and a number, and of two zeros, the one that
    /// stands second.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }` in each lane, as in [`Lanes::max`].
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The one whose bit pattern is the larger signed integer, in each lane. Without signs (after
    /// [`Lanes::abs`]) that is the larger number, infinity is above all numbers and NaN above infinity.
    fn max_bits(self, a: Self::F, b: Self::F) -> Self::F;
    /// Clears the sign, of zeros, infinities and NaN too.
    fn abs(self, a: Self::F) -> Self::F;
    /// Zeros and infinities stay what they are.
    fn floor(self, a: Self::F) -> Self::F;
    /// To the nearest integer, ties to even; zeros and infinities stay what they are, and what rounds to
    /// 0 keeps its sign.
    fn round(self, a: Self::F) -> Self::F;
    /// `if a < b { 0.0 } else { v }` in each lane: `v` where `a` or `b` is NaN.
    fn zero_if_lt(self, a: Self::F, b: Self::F, v: Self::F) -> Self::F;
    /// `2^n` for integers of [-126, 127], infinity for 128. In general the float whose bits are
    /// `(n + 127) << 23`, where `n` is truncated to i32 and wraps; 1 for NaN and what no i32 holds.
    fn exp2_int(self, n: Self::F) -> Self::F;
    /// The sum of the lanes, folded by halves: 16 to 8 to 4 to 2 to 1.
    fn sum(self, a: Self::F) -> f32;
    /// The largest lane, folded by halves with [`Lanes::max`]: it may drop a NaN.
    fn max_lane(self, a: Self::F) -> f32;
    /// Sixteen sums at once, each folded by halves: lane `i` is `sum(rows[i])`.
    fn sum_each(self, rows: &[Self::F; 16]) -> Self::F;
    /// Lane `i` is the lane of `rows[i]` with the largest bit pattern, as in [`Lanes::max_bits`].
    fn max_bits_each(self, rows: &[Self::F; 16]) -> Self::F;
    /// Rows to columns: lane `j` of result `i` is lane `i` of `rows[j]`.
    fn transpose(self, rows: &[Self::F; 16]) -> [Self::F; 16];

    /// The i32 lanes that a block's dot products start from. `correction` is -128 x the sum of the
    /// block's activations: what the unsigned weights (value + 128) add too much.
    fn dot_start(self, correction: i32) -> Self::I;
    /// # Safety
    /// `p` is valid for reading 64 bytes.
    unsafe fn load_q8_0(self, p: *const u8) -> Self::W;
    /// Adds, in each of the 16 lanes (output rows), the products of four weights with the four
    /// activations at `a`. Exact for every weight and for activations of [-127, 127], which is what
    /// quantizing gives; not for -128.
    /// # Safety
    /// `a` is valid for reading 4 i8.
    unsafe fn dot_q8_0(self, acc: Self::I, w: Self::W, a: *const i8) -> Self::I;
    /// To the nearest float, ties to even.
    fn to_f32(self, a: Self::I) -> Self::F;

    /// The first `n` of 16 lanes; the others are 0.
    /// # Safety
    /// `p` is valid for reading `n` values, `n <= 16`.
    #[inline(always)]
    unsafe fn load_first<T: Element>(self, p: *const T, n: usize) -> Self::F {
        let mut lanes = [T::ZERO; LANES];
        let (from, to) = (p.cast::<u8>(), lanes.as_mut_ptr().cast::<u8>());
        // SAFETY: the caller lends n values, and n <= 16; bytes may be anywhere.
        unsafe { std::ptr::copy_nonoverlapping(from, to, n * size_of::<T>()) };
        // SAFETY: `lanes` holds 16 values.
        unsafe { T::load(self, lanes.as_ptr()) }
    }

    /// # Safety
    /// `p` is valid for writing `n` values, `n <= 16`.
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: Self::F, n: usize) {
        let mut lanes = [0f32; LANES];
        // SAFETY: `lanes` holds 16 values.
        unsafe { self.store(lanes.as_mut_ptr(), v) };
        let (from, to) = (lanes.as_ptr().cast::<u8>(), p.cast::<u8>());
        // SAFETY: the caller lends room for n values, and n <= 16; bytes may be anywhere.
        unsafe { std::ptr::copy_nonoverlapping(from, to, n * size_of::<f32>()) };
    }

    /// e^x, the one polynomial of this crate: 2^n x e^r with r = x - n ln 2 in two steps (Cody and
    /// Waite) and the Taylor coefficients of e^r to the 7th degree; within 2 ulp on [-87, 88]. Below -87
    /// it is 0, above 88.4 infinity, of NaN it is NaN.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        // In this order NaN stays.
        let clamped = self.min(self.splat(89.0), self.max(self.splat(-87.0), x));
        let n = self.round(self.mul(clamped, self.splat(std::f32::consts::LOG2_E)));
        let r = self.mul_add(n, self.splat(-0.693_359_4), clamped);
        let r = self.mul_add(n, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = self.mul_add(p, r, self.splat(c));
        }
        let y = self.mul(p, self.exp2_int(n));
        self.zero_if_lt(x, self.splat(-87.0), y)
    }
}

/// A stored float that widens exactly to f32 on read.
pub trait Element: Copy + Send + Sync + 'static {
    const ZERO: Self;
    /// # Safety
    /// `p` is valid for reading 16 values.
    unsafe fn load<L: Lanes>(l: L, p: *const Self) -> L::F;
    fn widen(self) -> f32;
}

impl Element for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, p: *const Self) -> L::F {
        // SAFETY: the caller's duty is the same.
        unsafe { l.load(p) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Element for f16 {
    const ZERO: Self = f16::ZERO;
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, p: *const Self) -> L::F {
        // SAFETY: the caller's duty is the same.
        unsafe { l.load_f16(p) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Element for bf16 {
    const ZERO: Self = bf16::ZERO;
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, p: *const Self) -> L::F {
        // SAFETY: the caller's duty is the same.
        unsafe { l.load_bf16(p) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}
