//! AVX2 with FMA and F16C: two registers hold 16 lanes.

use super::lanes::{InstructionSet, Kernel, Lanes};
use crate::kernels::tiles;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Proof that CPU and operating system run AVX2, FMA and F16C, and with `VNNI` also AVX-VNNI (int8 dot
/// products in 256-bit registers, on CPUs that have no AVX-512).
#[derive(Clone, Copy)]
pub struct Avx2<const VNNI: bool>(());

impl InstructionSet for Avx2<false> {
    const NAME: &'static str = "avx2";

    fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
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

impl InstructionSet for Avx2<true> {
    const NAME: &'static str = "avx2-vnni";

    fn detect() -> Option<Self> {
        let base = Avx2::<false>::detect();
        base.filter(|_| is_x86_feature_detected!("avxvnni")).map(|_| Self(()))
    }

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves that the features are there.
        unsafe { run_vnni(self, kernel) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn run<K: Kernel>(l: Avx2<false>, kernel: K) -> K::Output {
    kernel.run(l)
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn run_vnni<K: Kernel>(l: Avx2<true>, kernel: K) -> K::Output {
    kernel.run(l)
}

/// Each lane operation is one expression of intrinsics.
macro_rules! lane {
    ($($intrinsics:tt)*) => {
        // SAFETY: `self` proves that the CPU has the features; memory operands are the caller's duty.
        unsafe { $($intrinsics)* }
    };
}

/// Sixteen rows x 4 weights, one operand unsigned as the instructions want it.
///
/// Without VNNI `unsigned` is |w|, and the sign of w goes to the activation: with |w| <= 128 and
/// |a| <= 127 the 16-bit sums of two of `maddubs` cannot saturate. With VNNI it is w + 128.
#[derive(Clone, Copy)]
pub struct Weights {
    unsigned: [__m256i; 2],
    signed: [__m256i; 2],
}

type Floats = [__m256; 2];

/// The tree of the AVX-512 version, for 8 rows at a time.
macro_rules! fold_each {
    ($fold:ident, $rows:ident) => {
        lane! {{
            let mut out = $rows[0];
            for half in 0..2 {
                let mut two = [$rows[0][0]; 4];
                for e in 0..4 {
                    let [a, b] = [$rows[8 * half + e], $rows[8 * half + 4 + e]];
                    let (a, b) = ($fold(a[0], a[1]), $fold(b[0], b[1])); // 16 to 8
                    // 8 to 4: [a, b]
                    two[e] = $fold(
                        _mm256_permute2f128_ps::<0x20>(a, b),
                        _mm256_permute2f128_ps::<0x31>(a, b),
                    );
                }
                let mut four = [$rows[0][0]; 2];
                for e in 0..2 {
                    // 4 to 2
                    let (a, b) = (_mm256_castps_pd(two[2 * e]), _mm256_castps_pd(two[2 * e + 1]));
                    four[e] = $fold(
                        _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                        _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)),
                    );
                }
                // 2 to 1
                out[half] = $fold(
                    _mm256_shuffle_ps::<0x88>(four[0], four[1]),
                    _mm256_shuffle_ps::<0xDD>(four[0], four[1]),
                );
            }
            out
        }}
    };
}

/// [`Lanes::max_bits`] of half the lanes. Only they call it, so the CPU has AVX2.
#[inline(always)]
fn larger_bits(a: __m256, b: __m256) -> __m256 {
    lane!(_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))))
}

impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    type F = Floats;
    type I = [__m256i; 2];
    type W = Weights;
    type Tiles = tiles::Sixteen256;

    #[inline(always)]
    fn splat(self, x: f32) -> Floats {
        lane!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Floats {
        lane!([_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))])
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> Floats {
        lane! {{
            let p = p.cast::<__m128i>();
            [_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p.add(1)))]
        }}
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> Floats {
        lane! {{
            let p = p.cast::<__m128i>();
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(1)));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }}
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Floats) {
        lane! {{
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }}
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: Floats) {
        lane! {{
            // Conversion gives i32::MIN for all that no i32 holds: what is large is clamped before, NaN is
            // made 0, and packing saturates the rest.
            let largest = _mm256_set1_ps(127.0);
            let mut whole = [_mm256_setzero_si256(); 2];
            for half in 0..2 {
                let number = _mm256_cmp_ps::<_CMP_ORD_Q>(v[half], v[half]);
                let clamped = _mm256_min_ps(largest, v[half]);
                whole[half] = _mm256_cvtps_epi32(_mm256_and_ps(number, clamped));
            }
            let words = _mm256_packs_epi32(whole[0], whole[1]);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words); // packs works in 128-bit halves
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), bytes);
        }}
    }

    #[inline(always)]
    fn add(self, a: Floats, b: Floats) -> Floats {
        lane!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: Floats, b: Floats) -> Floats {
        lane!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        lane!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: Floats, b: Floats) -> Floats {
        lane!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul_add(self, a: Floats, b: Floats, c: Floats) -> Floats {
        lane!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn max(self, a: Floats, b: Floats) -> Floats {
        lane!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        lane!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn max_bits(self, a: Floats, b: Floats) -> Floats {
        [larger_bits(a[0], b[0]), larger_bits(a[1], b[1])]
    }
    #[inline(always)]
    fn abs(self, a: Floats) -> Floats {
        lane! {{
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        }}
    }
    #[inline(always)]
    fn floor(self, a: Floats) -> Floats {
        lane!([_mm256_floor_ps(a[0]), _mm256_floor_ps(a[1])])
    }
    #[inline(always)]
    fn round(self, a: Floats) -> Floats {
        lane!([
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[0]),
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[1])
        ])
    }
    #[inline(always)]
    fn zero_if_lt(self, a: Floats, b: Floats, v: Floats) -> Floats {
        lane!([
            _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(a[0], b[0]), v[0]),
            _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(a[1], b[1]), v[1])
        ])
    }
    #[inline(always)]
    fn exp2_int(self, n: Floats) -> Floats {
        lane! {{
            let bias = _mm256_set1_epi32(127);
            let biased = [
                _mm256_add_epi32(_mm256_cvttps_epi32(n[0]), bias),
                _mm256_add_epi32(_mm256_cvttps_epi32(n[1]), bias),
            ];
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased[0])),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased[1])),
            ]
        }}
    }
    #[inline(always)]
    fn sum(self, a: Floats) -> f32 {
        lane! {{
            let a = _mm256_add_ps(a[0], a[1]);
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }}
    }
    #[inline(always)]
    fn max_lane(self, a: Floats) -> f32 {
        lane! {{
            let a = _mm256_max_ps(a[0], a[1]);
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }}
    }
    #[inline(always)]
    fn sum_each(self, rows: &[Floats; 16]) -> Floats {
        fold_each!(_mm256_add_ps, rows)
    }
    #[inline(always)]
    fn max_bits_each(self, rows: &[Floats; 16]) -> Floats {
        fold_each!(larger_bits, rows)
    }
    #[inline(always)]
    fn transpose(self, rows: &[Floats; 16]) -> [Floats; 16] {
        lane! {{
            let mut out = *rows;
            for (row_half, column_half) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                // An 8 x 8 quarter: rows 8 row_half.., columns 8 column_half..
                let mut t = [rows[0][0]; 8];
                for r in 0..2 {
                    let i = 8 * row_half + 4 * r;
                    let [a, b] = [rows[i][column_half], rows[i + 1][column_half]];
                    let [c, d] = [rows[i + 2][column_half], rows[i + 3][column_half]];
                    let ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
                    let cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
                    let ab_high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
                    let cd_high = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
                    t[4 * r] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
                    t[4 * r + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
                    t[4 * r + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab_high, cd_high));
                    t[4 * r + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab_high, cd_high));
                }
                for c in 0..4 {
                    out[8 * column_half + c][row_half] = _mm256_permute2f128_ps::<0x20>(t[c], t[4 + c]);
                    out[8 * column_half + 4 + c][row_half] = _mm256_permute2f128_ps::<0x31>(t[c], t[4 + c]);
                }
            }
            out
        }}
    }

    #[inline(always)]
    fn dot_start(self, correction: i32) -> [__m256i; 2] {
        // Without VNNI the weights are made signed, so nothing is to be corrected.
        lane!([_mm256_set1_epi32(if VNNI { correction } else { 0 }); 2])
    }
    #[inline(always)]
    unsafe fn load_q8_0(self, p: *const u8) -> Weights {
        lane! {{
            let p = p.cast::<__m256i>();
            let stored = [_mm256_loadu_si256(p), _mm256_loadu_si256(p.add(1))];
            if VNNI {
                return Weights { unsigned: stored, signed: stored };
            }
            let offset = _mm256_set1_epi8(-128);
            let signed = [_mm256_xor_si256(stored[0], offset), _mm256_xor_si256(stored[1], offset)];
            Weights { unsigned: [_mm256_abs_epi8(signed[0]), _mm256_abs_epi8(signed[1])], signed }
        }}
    }
    #[inline(always)]
    unsafe fn dot_q8_0(self, acc: [__m256i; 2], w: Weights, a: *const i8) -> [__m256i; 2] {
        lane! {{
            let a = _mm256_set1_epi32(a.cast::<i32>().read_unaligned());
            let ones = _mm256_set1_epi16(1);
            let mut out = acc;
            for half in 0..2 {
                out[half] = if VNNI {
                    _mm256_dpbusd_avx_epi32(acc[half], w.unsigned[half], a)
                } else {
                    let signed = _mm256_sign_epi8(a, w.signed[half]);
                    let pairs = _mm256_maddubs_epi16(w.unsigned[half], signed);
                    _mm256_add_epi32(acc[half], _mm256_madd_epi16(pairs, ones))
                };
            }
            out
        }}
    }
    #[inline(always)]
    fn to_f32(self, a: [__m256i; 2]) -> Floats {
        lane!([_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])])
    }
}
