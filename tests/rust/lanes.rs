//! Every lane operation and every kernel on hostile input: zeros of both signs, denormals, the largest
//! floats, infinities, NaN and ordinary numbers, mixed. Every instruction set must give the portable
//! one's bits, where all NaNs count as one value; and what is not finite must not vanish.
#![allow(unsafe_code)] // the operations on memory are: each block says why it is sound
#![allow(clippy::redundant_closure)] // a constructor is not general over lifetimes, a closure is

use half::{bf16, f16};
use proptest::array::uniform;
use proptest::collection::vec;
use proptest::prelude::*;
use qwen_rs::kernels::attention::{AttentionRow, KvHead, KvRun, LentHead, MergeChunks, partial_len};
use qwen_rs::kernels::finite::AllFinite;
use qwen_rs::kernels::gated::{GATED_WORDS, gated_float, gated_int8};
use qwen_rs::kernels::matmul_float::{ROW_PADDING, matmul_float};
use qwen_rs::kernels::matmul_int8::{interleave_scales, matmul_int8};
use qwen_rs::kernels::norm::RmsNorm;
use qwen_rs::kernels::prefill_attention::{PrefillQueries, attention_prefill, prefill_scratch_words};
use qwen_rs::kernels::q8_0::{InterleaveRows, Q8_0};
use qwen_rs::kernels::quantize::{
    QUANT_BLOCK, QuantizeActivations, QuantizeNormed, QuantizeWeights, quantized_words,
};
use qwen_rs::kernels::rope::{NormRope, Rope};
use qwen_rs::kernels::softmax::ExpSum;
use qwen_rs::kernels::swiglu::SwiGlu;
use qwen_rs::kernels::{Destination, Element, Isa, Kernel, LANES, Lanes};
use qwen_rs::threads::Threads;

const NAN: u32 = f32::NAN.to_bits();

/// Bits, all NaNs as one.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| if x.is_nan() { NAN } else { x.to_bits() }).collect()
}

/// Floats of every kind, half of them ordinary.
fn hostile() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => -100f32..100.0,
        1 => (-1e4f32..1e4).prop_map(f32::round),
        1 => (-300i32..300).prop_map(|x| x as f32 / 2.0),
        1 => prop::sample::select(vec![0.0, -0.0]),
        1 => (1u32..0x80_0000, any::<bool>()).prop_map(|(x, minus)| {
            let denormal = f32::from_bits(x);
            if minus { -denormal } else { denormal }
        }),
        1 => prop::sample::select(vec![
            f32::from_bits(1), f32::MIN_POSITIVE, 1e-38, -3e-37, 1.4e-36, 1e-20, 1e19, -1e20, 1e30, 3e38,
            f32::MAX, f32::MIN, 127.5, 128.0, -128.5, -129.0, 2147483648.0, -2147483648.0, 4294967296.0,
            -86.99999, -87.0, -87.000_01, 88.0, 88.3, 88.4, 88.8, 89.0, 100.0, 126.0, 127.0, 128.0, 300.0,
        ]),
        1 => prop::sample::select(vec![
            f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001),
        ]),
        1 => any::<u32>().prop_map(f32::from_bits),
    ]
}

/// Rows that are ordinary throughout, hostile throughout, or ordinary but for one value.
fn row(len: usize) -> impl Strategy<Value = Vec<f32>> {
    prop_oneof![
        vec(-100f32..100.0, len),
        vec(hostile(), len),
        (-44i32..38, vec(-1f64..1.0, len)).prop_map(|(exponent, row)| {
            row.into_iter().map(|x| (x * 10f64.powi(exponent)) as f32).collect()
        }),
        (vec(-100f32..100.0, len), 0..len, hostile()).prop_map(|(mut row, at, x)| {
            row[at] = x;
            row
        }),
    ]
}

fn halves(len: usize) -> impl Strategy<Value = Vec<f16>> {
    let half = prop_oneof![
        3 => (-100f32..100.0).prop_map(f16::from_f32),
        1 => any::<u16>().prop_map(f16::from_bits),
    ];
    vec(half, len)
}

/// What `f` gives on every instruction set, which must be what it gives on the portable one.
fn same_everywhere<T: PartialEq + std::fmt::Debug>(what: &str, f: impl Fn(Isa) -> T) -> T {
    let expected = f(Isa::PORTABLE);
    for isa in Isa::available() {
        assert_eq!(f(isa), expected, "{what} on {isa:?}");
    }
    expected
}

/// Every operation of [`Lanes`], by name.
struct Operations<'a> {
    rows: &'a [[f32; LANES]; LANES],
    halves: &'a [u16; LANES],
    weights: &'a [u8; 64],
    activations: &'a [i8; 4],
    count: usize,
}

impl Kernel for Operations<'_> {
    type Output = Vec<(&'static str, Vec<u32>)>;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> Self::Output {
        // SAFETY: a row holds 16 values.
        let rows = self.rows.map(|row| unsafe { l.load(row.as_ptr()) });
        let [a, b, c, ..] = rows;
        let lanes = |v: L::F| {
            let mut out = [0f32; LANES];
            // SAFETY: `out` holds 16 values.
            unsafe { l.store(out.as_mut_ptr(), v) };
            bits(&out)
        };
        let (mut bytes, mut first) = ([0i8; LANES], [7f32; LANES]);
        let halves: *const u16 = self.halves.as_ptr();
        // SAFETY: the arrays hold 16 values each, the weights 64 bytes, the activations 4.
        let (half, brain, some, dots) = unsafe {
            l.store_i8(bytes.as_mut_ptr(), a);
            l.store_first(first.as_mut_ptr(), a, self.count);
            let weights = l.load_q8_0(self.weights.as_ptr());
            // What the unsigned weights add too much is corrected, as in the kernel that uses it.
            let sum: i32 = self.activations.iter().map(|&a| i32::from(a)).sum();
            (
                l.load_f16(halves.cast()),
                l.load_bf16(halves.cast()),
                l.load_first(self.rows[1].as_ptr(), self.count),
                l.dot_q8_0(l.dot_start(-128 * sum), weights, self.activations.as_ptr()),
            )
        };
        vec![
            ("splat", lanes(l.splat(self.rows[0][0]))),
            ("load and store", lanes(a)),
            ("load_f16", lanes(half)),
            ("load_bf16", lanes(brain)),
            ("load_first", lanes(some)),
            ("store_first", bits(&first)),
            ("store_i8", bytes.map(|x| x as u32).to_vec()),
            ("add", lanes(l.add(a, b))),
            ("sub", lanes(l.sub(a, b))),
            ("mul", lanes(l.mul(a, b))),
            ("div", lanes(l.div(a, b))),
            ("mul_add", lanes(l.mul_add(a, b, c))),
            ("max", lanes(l.max(a, b))),
            ("min", lanes(l.min(a, b))),
            ("max_bits", lanes(l.max_bits(a, b))),
            ("abs", lanes(l.abs(a))),
            ("floor", lanes(l.floor(a))),
            ("round", lanes(l.round(a))),
            ("zero_if_lt", lanes(l.zero_if_lt(a, b, c))),
            ("zero_if_lt, equal", lanes(l.zero_if_lt(a, a, c))),
            ("exp2_int", lanes(l.exp2_int(a))),
            ("exp", lanes(l.exp(a))),
            ("sum", bits(&[l.sum(a)])),
            ("max_lane", bits(&[l.max_lane(a)])),
            ("sum_each", lanes(l.sum_each(&rows))),
            ("max_bits_each", lanes(l.max_bits_each(&rows))),
            ("transpose", l.transpose(&rows).into_iter().flat_map(lanes).collect()),
            ("dot_q8_0", lanes(l.to_f32(dots))),
        ]
    }
}

/// Quantized activations: integers as they are, scales with all NaNs as one.
fn quantized(words: &[f32]) -> Vec<u32> {
    let blocks = words.len() / quantized_words(1);
    let (quants, rest) = words.split_at(blocks * QUANT_BLOCK / 4);
    let (scales, corrections) = rest.split_at(blocks);
    let raw = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    [raw(quants), bits(scales), raw(corrections)].concat()
}

/// Quants `[blocks * 32]` and scales `[blocks]` of quantized activations.
fn parts(words: &[f32]) -> (&[i8], &[f32]) {
    let blocks = words.len() / quantized_words(1);
    (bytemuck::cast_slice(&words[..blocks * QUANT_BLOCK / 4]), &words[blocks * QUANT_BLOCK / 4..][..blocks])
}

fn quantize(isa: Isa, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; quantized_words(x.len().div_ceil(QUANT_BLOCK))];
    isa.run(QuantizeActivations { x, out: &mut out });
    out
}

/// One query head over all positions, and the same as the last row of a prefill where there is a tile.
fn check_attention<T: Element>(q: &[f32], k: &[T], v: &[T], lent: for<'a> fn(KvHead<'a, T>) -> LentHead<'a>) {
    let (width, context) = (q.len(), k.len() / q.len());
    let chunks = k.chunks(5 * width).zip(v.chunks(5 * width)); // runs of 5 rows
    let runs: Vec<_> = chunks.map(|(k, v)| KvRun { k, v }).collect();
    let kv = KvHead { runs: &runs, run_rows: 5, stride: width, rows: context };
    let out = same_everywhere("attention", |isa| {
        let mut out = vec![0.0; width];
        isa.run(AttentionRow { q, head_dim: width, kv, context, scale: 0.2, out: &mut out });
        bits(&out)
    });
    let finite = |x: &[T]| x.iter().all(|x| x.widen().is_finite());
    if !(finite(k) && finite(v) && q.iter().all(|x| x.is_finite())) {
        let out: Vec<_> = out.iter().map(|&x| f32::from_bits(x)).collect();
        assert!(out.iter().any(|x| !x.is_finite()), "{out:?} of what is not finite");
    }
    if width == 64 {
        let threads = Threads::new(1).unwrap();
        let prefilled = same_everywhere("prefill attention", |isa| {
            let mut out = vec![0.0; width];
            let queries = PrefillQueries {
                q,
                stride: width,
                rows: 1,
                num_attention_heads: 1,
                num_key_value_heads: 1,
                head_dim: width,
                past: context - 1,
                scale: 0.2,
            };
            let mut scratch = vec![0.0; prefill_scratch_words(width, 1)];
            attention_prefill(isa, &threads, queries, &|_| lent(kv), &mut scratch, &mut out);
            bits(&out)
        });
        assert_eq!(prefilled, out);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn lane_operations(
        rows in vec(row(LANES), LANES),
        halves in uniform::<_, LANES>(any::<u16>()),
        weights in uniform::<_, 64>(any::<u8>()),
        activations in uniform::<_, 4>(-127i8..=127),
        count in 0..=LANES,
    ) {
        let rows: Vec<[f32; LANES]> = rows.into_iter().map(|row| row.try_into().unwrap()).collect();
        let rows = rows.try_into().unwrap();
        let (halves, weights, activations) = (&halves, &weights, &activations);
        let on = |isa: Isa| {
            isa.run(Operations { rows: &rows, halves, weights, activations, count })
        };
        let expected = on(Isa::PORTABLE);
        for isa in Isa::available() {
            for ((name, x), (_, expected)) in on(isa).iter().zip(&expected) {
                prop_assert_eq!(x, expected, "{} of {:?} on {:?}", name, &rows[..3], isa);
            }
        }
    }

    #[test]
    fn row_operations(
        (x, y, rotation) in (1usize..50).prop_flat_map(|n| (row(2 * n), row(2 * n), row(2 * n))),
        largest in hostile(),
    ) {
        let finite = |x: &[f32]| x.iter().all(|x| x.is_finite());
        let (width, eps) = (x.len(), 1e-6);
        let norm = same_everywhere("rms_norm", |isa| {
            let mut out = vec![0.0; width];
            isa.run(RmsNorm { x: &x, weight: &y, out: &mut out, eps });
            bits(&out)
        });
        if !finite(&x) {
            prop_assert!(norm.iter().all(|&x| x == NAN), "{:?} of {:?}", norm, x);
        }
        same_everywhere("norm_rope", |isa| {
            let mut head = x.clone();
            isa.run(NormRope { head: &mut head, weight: &y, rotation: &rotation, eps });
            bits(&head)
        });
        same_everywhere("rope", |isa| {
            let mut head = x.clone();
            isa.run(Rope { head: &mut head, rotation: &rotation });
            bits(&head)
        });
        let gated = same_everywhere("swiglu", |isa| {
            let mut gate = x.clone();
            isa.run(SwiGlu { gate: &mut gate, up: &y });
            bits(&gate)
        });
        for (i, &out) in gated.iter().enumerate() {
            let (gate, up, out) = (x[i], y[i], f32::from_bits(out));
            prop_assert!(!out.is_finite() || (gate.is_finite() && up.is_finite()), "{gate} x {up}: {out}");
        }
        let sum = same_everywhere("exp_sum", |isa| {
            let mut e = x.clone();
            let sum = isa.run(ExpSum { x: &mut e, largest });
            (bits(&e), bits(&[sum]))
        });
        if x.iter().any(|x| x.is_nan()) {
            prop_assert_eq!(&sum.1, &[NAN]);
        }
        prop_assert_eq!(same_everywhere("all_finite", |isa| isa.run(AllFinite { x: &x })), finite(&x));
    }

    #[test]
    fn activations_to_int8(x in (1usize..600).prop_flat_map(row), weight in row(600)) {
        let words = same_everywhere("quantize", |isa| quantized(&quantize(isa, &x)));
        same_everywhere("quantize_normed", |isa| {
            let mut out = vec![0.0; words.len()];
            isa.run(QuantizeNormed { x: &x, weight: &weight[..x.len()], out: &mut out, eps: 1e-6 });
            quantized(&out)
        });
        let words = quantize(Isa::PORTABLE, &x);
        let (quants, scales) = parts(&words);
        for ((x, quants), &scale) in x.chunks(QUANT_BLOCK).zip(quants.chunks(QUANT_BLOCK)).zip(scales) {
            let largest = x.iter().fold(0f32, |a, x| a.max(x.abs()));
            if !x.iter().all(|x| x.is_finite()) {
                prop_assert!(scale.is_nan() && quants.iter().all(|&q| q == 0));
            } else if largest / 127.0 < f32::MIN_POSITIVE {
                prop_assert!(scale.to_bits() == 0 && quants.iter().all(|&q| q == 0));
            } else {
                prop_assert_eq!(scale, largest / 127.0);
                prop_assert_eq!(quants.iter().map(|q| q.unsigned_abs()).max(), Some(127));
                for (&x, &q) in x.iter().zip(quants) {
                    prop_assert!((f64::from(x) / f64::from(scale) - f64::from(q)).abs() <= 0.5001);
                }
            }
        }
    }

    #[test]
    fn weights_to_int8(x in (1usize..40).prop_flat_map(|blocks| row(blocks * QUANT_BLOCK))) {
        let blocks = x.len() / QUANT_BLOCK;
        let (quants, scales) = same_everywhere("quantize_weights", |isa| {
            let (mut quants, mut scales) = (vec![0i8; x.len()], vec![f16::ZERO; blocks]);
            isa.run(QuantizeWeights { x: &x, quants: &mut quants, scales: &mut scales });
            (quants, scales.iter().map(|d| bits(&[d.to_f32()])[0]).collect::<Vec<_>>())
        });
        for (b, x) in x.chunks(QUANT_BLOCK).enumerate() {
            // As the gguf package computes it; where 1 / d is not finite it leaves the quants undefined.
            let d = x.iter().fold(0f32, |a, x| a.max(x.abs())) / 127.0;
            let inverse = 1.0 / d;
            let quants = &quants[b * QUANT_BLOCK..][..QUANT_BLOCK];
            if !x.iter().all(|x| x.is_finite()) {
                prop_assert!(!f32::from_bits(scales[b]).is_finite() && quants.iter().all(|&q| q == 0));
            } else if inverse.is_finite() {
                prop_assert_eq!(f16::from_f32(d).to_f32().to_bits(), scales[b]);
                prop_assert!(x.iter().zip(quants).all(|(x, &q)| (x * inverse).round() == f32::from(q)));
            } else {
                prop_assert!(scales[b] == 0 && quants.iter().all(|&q| q == 0));
            }
        }
    }

    #[test]
    fn interleaved_rows(quants in vec(any::<i8>(), LANES * QUANT_BLOCK * 3), scales in halves(LANES * 3)) {
        same_everywhere("interleave", |isa| {
            let (mut out, mut out_scales) = (vec![0u8; quants.len()], vec![f16::ZERO; scales.len()]);
            isa.run(InterleaveRows { quants: &quants, out: &mut out });
            interleave_scales(&scales, &mut out_scales);
            (out, out_scales.iter().map(|d| d.to_bits()).collect::<Vec<_>>())
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    #[test]
    fn float_products(
        (k, x, w) in (1usize..40, 1usize..30).prop_flat_map(|(m, k)| (Just(k), row(m * k), row(24 * k))),
    ) {
        let (n, rows) = (w.len() / k, x.chunks(k).map(|row| [row, &[f32::NAN; ROW_PADDING]].concat()));
        let x: Vec<f32> = rows.flatten().collect();
        let m = x.len() / (k + ROW_PADDING);
        let packed: Vec<f32> = (0..n.div_ceil(LANES) * k * LANES)
            .map(|i| w.get((i / (k * LANES) * LANES + i % LANES) * k + i / LANES % k).map_or(0.0, |&x| x))
            .collect();
        let narrow: Vec<bf16> = packed.iter().map(|x| bf16::from_bits((x.to_bits() >> 16) as u16)).collect();
        let threads = Threads::new(1).unwrap();
        same_everywhere("float product", |isa| {
            let (mut out, mut added) = (vec![0.0; m * n], vec![1e38; m * n]);
            matmul_float(isa, &threads, &x, &packed, (k, n), Destination::Overwrite(&mut out));
            matmul_float(isa, &threads, &x, &narrow, (k, n), Destination::Accumulate(&mut added));
            let (mut scratch, mut gated) = (vec![0.0; GATED_WORDS], vec![0.0; m * (n + ROW_PADDING)]);
            gated_float(isa, &threads, &x, [&packed, &packed], (k, n), &mut scratch, &mut gated);
            [bits(&out), bits(&added), bits(&gated)]
        });
    }

    #[test]
    fn q8_0_products(
        (blocks, x) in (1usize..10, 1usize..4)
            .prop_flat_map(|(m, blocks)| (Just(blocks), vec(row(blocks * QUANT_BLOCK), m))),
        quants in vec(any::<u8>(), 2 * 3 * QUANT_BLOCK * LANES),
        scales in halves(2 * 3 * LANES),
    ) {
        let n = 23;
        let weights = (&quants[..2 * blocks * QUANT_BLOCK * LANES], &scales[..2 * blocks * LANES]);
        let threads = Threads::new(1).unwrap();
        let product = same_everywhere("q8_0 product", |isa| {
            let activations: Vec<f32> = x.iter().flat_map(|x| quantize(isa, x)).collect();
            let mut out = vec![0.0; x.len() * n];
            matmul_int8::<Q8_0>(isa, &threads, &activations, weights, (blocks, n), Destination::Overwrite(&mut out));
            let (mut scratch, mut gated) = (vec![0.0; GATED_WORDS], vec![0.0; x.len() * quantized_words(1)]);
            gated_int8::<Q8_0>(isa, &threads, &activations, [weights; 2], (blocks, n), &mut scratch, &mut gated);
            let gated: Vec<_> = gated.chunks(quantized_words(1)).flat_map(quantized).collect();
            (bits(&out), gated)
        });
        for (x, product) in x.iter().zip(product.0.chunks(n)) {
            if !x.iter().all(|x| x.is_finite()) {
                prop_assert!(product.iter().all(|&y| y == NAN), "{:?}", product);
            }
        }
    }

    #[test]
    fn attention(
        (q, k, v) in (prop::sample::select(vec![6usize, 16, 64]), 1usize..40).prop_flat_map(
            |(width, context)| (row(width), row(width * context), row(width * context)),
        ),
    ) {
        check_attention(&q, &k, &v, |kv| LentHead::F32(kv));
        let narrow = |x: &[f32]| x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>();
        check_attention(&q, &narrow(&k), &narrow(&v), |kv| LentHead::F16(kv));
    }

    #[test]
    fn merged_chunks(partials in (1usize..6).prop_flat_map(|chunks| row(chunks * partial_len(20)))) {
        let chunks = partials.len() / partial_len(20);
        same_everywhere("merge", |isa| {
            let mut out = vec![0.0; 20];
            let partials = &partials;
            isa.run(MergeChunks { partials, stride: partial_len(20), chunks, out: &mut out });
            bits(&out)
        });
    }
}
