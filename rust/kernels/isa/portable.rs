//! The portable instruction set: plain loops over 16-lane arrays. It is the oracle that the others
//! are tested against, and what any CPU without AVX2 runs.

use super::lanes::{InstructionSet, Kernel, LANES, Lanes};
use crate::kernels::tiles;
use half::{bf16, f16};

#[derive(Clone, Copy)]
pub struct Portable;

impl InstructionSet for Portable {
    const NAME: &'static str = "portable";

    fn detect() -> Option<Self> {
        Some(Self)
    }

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
}

type Floats = [f32; LANES];

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> Floats {
    std::array::from_fn(f)
}

#[inline(always)]
fn larger_bits(a: f32, b: f32) -> f32 {
    if a.to_bits() as i32 > b.to_bits() as i32 { a } else { b }
}

impl Lanes for Portable {
    type F = Floats;
    type I = [i32; LANES];
    type W = [u8; 64]; // [16 rows][4 values of k]
    type Tiles = tiles::Sixteen256;

    #[inline(always)]
    fn splat(self, x: f32) -> Floats {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Floats {
        // SAFETY: the caller lends 16 values; the read is unaligned.
        unsafe { p.cast::<Floats>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> Floats {
        // SAFETY: the caller lends 16 values; the read is unaligned.
        let h = unsafe { p.cast::<[f16; LANES]>().read_unaligned() };
        each(|i| h[i].to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> Floats {
        // SAFETY: the caller lends 16 values; the read is unaligned.
        let h = unsafe { p.cast::<[bf16; LANES]>().read_unaligned() };
        each(|i| h[i].to_f32())
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Floats) {
        // SAFETY: the caller lends room for 16 values; the write is unaligned.
        unsafe { p.cast::<Floats>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: Floats) {
        // SAFETY: the caller lends room for 16 values; the write is unaligned.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(v.map(|x| x.round_ties_even() as i8)) }
    }

    #[inline(always)]
    fn add(self, a: Floats, b: Floats) -> Floats {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Floats, b: Floats) -> Floats {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Floats, b: Floats) -> Floats {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn mul_add(self, a: Floats, b: Floats, c: Floats) -> Floats {
        each(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Floats, b: Floats) -> Floats {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn max_bits(self, a: Floats, b: Floats) -> Floats {
        each(|i| larger_bits(a[i], b[i]))
    }
    #[inline(always)]
    fn abs(self, a: Floats) -> Floats {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn floor(self, a: Floats) -> Floats {
        a.map(f32::floor)
    }
    #[inline(always)]
    fn round(self, a: Floats) -> Floats {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn zero_if_lt(self, a: Floats, b: Floats, v: Floats) -> Floats {
        each(|i| if a[i] < b[i] { 0.0 } else { v[i] })
    }
    #[inline(always)]
    fn exp2_int(self, n: Floats) -> Floats {
        n.map(|n| {
            let n = if n.abs() < 2_147_483_648.0 { n as i32 } else { i32::MIN }; // NaN is not below
            f32::from_bits((n.wrapping_add(127) << 23) as u32)
        })
    }
    #[inline(always)]
    fn sum(self, mut a: Floats) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] += a[i + half];
            }
        }
        a[0]
    }
    #[inline(always)]
    fn max_lane(self, mut a: Floats) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] = if a[i] > a[i + half] { a[i] } else { a[i + half] };
            }
        }
        a[0]
    }
    #[inline(always)]
    fn sum_each(self, rows: &[Floats; 16]) -> Floats {
        each(|i| self.sum(rows[i]))
    }
    #[inline(always)]
    fn max_bits_each(self, rows: &[Floats; 16]) -> Floats {
        each(|i| rows[i].into_iter().fold(rows[i][0], larger_bits))
    }
    #[inline(always)]
    fn transpose(self, rows: &[Floats; 16]) -> [Floats; 16] {
        std::array::from_fn(|i| each(|j| rows[j][i]))
    }

    #[inline(always)]
    fn dot_start(self, _correction: i32) -> [i32; LANES] {
        [0; LANES] // the weights are made signed below, so nothing is to be corrected
    }
    #[inline(always)]
    unsafe fn load_q8_0(self, p: *const u8) -> [u8; 64] {
        // SAFETY: the caller lends 64 bytes.
        unsafe { p.cast::<[u8; 64]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn dot_q8_0(self, mut acc: [i32; LANES], w: [u8; 64], a: *const i8) -> [i32; LANES] {
        // SAFETY: the caller lends 4 values.
        let a = unsafe { a.cast::<[i8; 4]>().read_unaligned() };
        for (lane, w) in acc.iter_mut().zip(w.chunks_exact(4)) {
            for k in 0..4 {
                *lane += (i32::from(w[k]) - 128) * i32::from(a[k]);
            }
        }
        acc
    }
    #[inline(always)]
    fn to_f32(self, a: [i32; LANES]) -> Floats {
        a.map(|x| x as f32)
    }
}
