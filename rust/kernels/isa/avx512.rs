//! AVX-512 with VNNI: one register holds 16 lanes.

use super::lanes::{InstructionSet, Kernel, Lanes};
use crate::kernels::tiles;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Proof that CPU and operating system run AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy)]
pub struct Avx512(());

impl InstructionSet for Avx512 {
    const NAME: &'static str = "avx512";

    fn detect() -> Option<Self> {
        // The standard library asks the operating system (XGETBV) too: a virtual machine may report
        // AVX-512 without enabling its registers.
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves that the features are there.
        unsafe { run(self, kernel) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run<K: Kernel>(l: Avx512, kernel: K) -> K::Output {
    kernel.run(l)
}

/// Each lane operation is one expression of intrinsics.
macro_rules! lane {
    ($($intrinsics:tt)*) => {
        // SAFETY: `self` proves that the CPU has the features; memory operands are the caller's duty.
        unsafe { $($intrinsics)* }
    };
}

/// A tree over the 16 vectors; each step does the same fold for two rows at a time, and rows
/// e, 4 + e, 8 + e and 12 + e meet in one vector so that lane i ends as row i.
macro_rules! fold_each {
    ($fold:ident, $rows:ident) => {
        lane! {{
            let mut four = [$rows[0]; 4];
            for e in 0..4 {
                // 16 to 8: [a, a, b, b]
                let (a, b) = ($rows[e], $rows[4 + e]);
                let p = $fold(
                    _mm512_shuffle_f32x4::<0x44>(a, b),
                    _mm512_shuffle_f32x4::<0xEE>(a, b),
                );
                let (c, d) = ($rows[8 + e], $rows[12 + e]);
                let q = $fold(
                    _mm512_shuffle_f32x4::<0x44>(c, d),
                    _mm512_shuffle_f32x4::<0xEE>(c, d),
                );
                // 8 to 4: [a, b, c, d]
                four[e] = $fold(
                    _mm512_shuffle_f32x4::<0x88>(p, q),
                    _mm512_shuffle_f32x4::<0xDD>(p, q),
                );
            }
            let mut two = [$rows[0]; 2];
            for e in 0..2 {
                // 4 to 2
                let (a, b) = (_mm512_castps_pd(four[2 * e]), _mm512_castps_pd(four[2 * e + 1]));
                two[e] = $fold(
                    _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)),
                );
            }
            // 2 to 1
            $fold(
                _mm512_shuffle_ps::<0x88>(two[0], two[1]),
                _mm512_shuffle_ps::<0xDD>(two[0], two[1]),
            )
        }}
    };
}

/// [`Lanes::max_bits`]. Only it and `max_bits_each` call it, so the CPU has AVX-512.
#[inline(always)]
fn larger_bits(a: __m512, b: __m512) -> __m512 {
    lane!(_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b))))
}

impl Lanes for Avx512 {
    type F = __m512;
    type I = __m512i;
    type W = __m512i;
    type Tiles = tiles::ThirtyTwo512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        lane!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        lane!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m512 {
        lane!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m512 {
        lane!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
            p.cast()
        )))))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        lane!(_mm512_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: __m512) {
        lane! {{
            // Conversion gives i32::MIN for all that no i32 holds: what is large is clamped before, NaN is
            // made 0, and narrowing saturates the rest.
            let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(v, v);
            let whole = _mm512_maskz_cvtps_epi32(number, _mm512_min_ps(_mm512_set1_ps(127.0), v));
            _mm_storeu_si128(p.cast(), _mm512_cvtsepi32_epi8(whole));
        }}
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        lane!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        lane!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        lane!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        lane!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        lane!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        lane!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        lane!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn max_bits(self, a: __m512, b: __m512) -> __m512 {
        larger_bits(a, b)
    }
    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        lane!(_mm512_abs_ps(a))
    }
    #[inline(always)]
    fn floor(self, a: __m512) -> __m512 {
        lane!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        lane!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn zero_if_lt(self, a: __m512, b: __m512, v: __m512) -> __m512 {
        lane!(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(a, b), v))
    }
    #[inline(always)]
    fn exp2_int(self, n: __m512) -> __m512 {
        lane!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(
            _mm512_cvttps_epi32(n),
            _mm512_set1_epi32(127)
        ))))
    }
    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        lane! {{
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }}
    }
    #[inline(always)]
    fn max_lane(self, a: __m512) -> f32 {
        lane! {{
            let a = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }}
    }
    #[inline(always)]
    fn sum_each(self, rows: &[__m512; 16]) -> __m512 {
        fold_each!(_mm512_add_ps, rows)
    }
    #[inline(always)]
    fn max_bits_each(self, rows: &[__m512; 16]) -> __m512 {
        fold_each!(larger_bits, rows)
    }
    #[inline(always)]
    fn transpose(self, rows: &[__m512; 16]) -> [__m512; 16] {
        lane! {{
            let mut t = *rows;
            for r in 0..4 {
                // 4 x 4 within each 128-bit part: t[4r + c] holds columns 4p + c of rows 4r..4r + 4.
                let [a, b, c, d] = [rows[4 * r], rows[4 * r + 1], rows[4 * r + 2], rows[4 * r + 3]];
                let ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                let cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                let ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                let cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                t[4 * r] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                t[4 * r + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
                t[4 * r + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
                t[4 * r + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
            }
            let mut out = *rows;
            for c in 0..4 {
                let ab = _mm512_shuffle_f32x4::<0x44>(t[c], t[4 + c]);
                let ab_high = _mm512_shuffle_f32x4::<0xEE>(t[c], t[4 + c]);
                let cd = _mm512_shuffle_f32x4::<0x44>(t[8 + c], t[12 + c]);
                let cd_high = _mm512_shuffle_f32x4::<0xEE>(t[8 + c], t[12 + c]);
                out[c] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                out[4 + c] = _mm512_shuffle_f32x4::<0xDD>(ab, cd);
                out[8 + c] = _mm512_shuffle_f32x4::<0x88>(ab_high, cd_high);
                out[12 + c] = _mm512_shuffle_f32x4::<0xDD>(ab_high, cd_high);
            }
            out
        }}
    }

    #[inline(always)]
    fn dot_start(self, correction: i32) -> __m512i {
        lane!(_mm512_set1_epi32(correction))
    }
    #[inline(always)]
    unsafe fn load_q8_0(self, p: *const u8) -> __m512i {
        lane!(_mm512_loadu_si512(p.cast()))
    }
    #[inline(always)]
    unsafe fn dot_q8_0(self, acc: __m512i, w: __m512i, a: *const i8) -> __m512i {
        lane!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a.cast::<i32>().read_unaligned())))
    }
    #[inline(always)]
    fn to_f32(self, a: __m512i) -> __m512 {
        lane!(_mm512_cvtepi32_ps(a))
    }
}
