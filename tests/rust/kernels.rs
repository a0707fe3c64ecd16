//! Every kernel that this CPU has against the portable one, with `==`, at every remainder of rows,
//! columns and depth; and the portable one against plain arithmetic.

use half::{bf16, f16};
use proptest::prelude::*;
use qwen_rs::kernels::attention::{AttentionRow, CHUNK, KvHead, KvRun, MergeChunks, partial_len};
use qwen_rs::kernels::gated::{GATED_WORDS, gated_float, gated_int8};
use qwen_rs::kernels::matmul_float::{ROW_PADDING, matmul_float};
use qwen_rs::kernels::matmul_int8::{QuantFormat, matmul_int8};
use qwen_rs::kernels::norm::RmsNorm;
use qwen_rs::kernels::peak::{f32_rate, int8_rate};
use qwen_rs::kernels::q8_0::Q8_0;
use qwen_rs::kernels::quantize::{QUANT_BLOCK, QuantizeActivations, QuantizeNormed, quantized_words};
use qwen_rs::kernels::rope::{NormRope, Rope};
use qwen_rs::kernels::softmax::ExpSum;
use qwen_rs::kernels::swiglu::SwiGlu;
use qwen_rs::kernels::{Destination, Element, Isa, LANES};
use qwen_rs::threads::Threads;
use std::marker::PhantomData;

/// Numbers of many magnitudes, the same everywhere.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2) + 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let mantissa = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            mantissa * 2f32.powi((state >> 20) as i32 % 6)
        })
        .collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Runs `f` on every instruction set; all results must be the portable one's.
fn same_everywhere(what: &str, f: impl Fn(Isa) -> Vec<f32>) -> Vec<f32> {
    let expected = f(Isa::PORTABLE);
    for isa in Isa::available() {
        assert!(bits(&f(isa)) == bits(&expected), "{what} on {isa:?}");
    }
    expected
}

fn quantize(isa: Isa, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; quantized_words(x.len().div_ceil(QUANT_BLOCK))];
    isa.run(QuantizeActivations { x, out: &mut out });
    out
}

#[test]
fn row_operations() {
    println!("instruction sets: {:?}", Isa::available());
    for width in (1..70).chain([128, 1024, 3072]) {
        let (x, y) = (numbers(width, 1), numbers(width, 2));
        let norm = same_everywhere("rms_norm", |isa| {
            let mut out = vec![0.0; width];
            isa.run(RmsNorm { x: &x, weight: &y, out: &mut out, eps: 1e-6 });
            out
        });
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
        for i in 0..width {
            let expected = f64::from(x[i]) / (mean + 1e-6).sqrt() * f64::from(y[i]);
            assert!((f64::from(norm[i]) - expected).abs() <= 1e-5 * expected.abs() + 1e-30);
        }
        let swiglu = same_everywhere("swiglu", |isa| {
            let mut gate = x.clone();
            isa.run(SwiGlu { gate: &mut gate, up: &y });
            gate
        });
        for i in 0..width {
            let (x, y) = (f64::from(x[i]), f64::from(y[i]));
            let expected = x / (1.0 + (-x).exp()) * y;
            assert!((f64::from(swiglu[i]) - expected).abs() <= 1e-5 * expected.abs() + 1e-30);
        }
        let quantized = same_everywhere("quantize_normed", |isa| {
            let mut out = vec![0.0; quantized_words(width.div_ceil(QUANT_BLOCK))];
            isa.run(QuantizeNormed { x: &x, weight: &y, out: &mut out, eps: 1e-6 });
            out
        });
        assert!(bits(&quantized) == bits(&quantize(Isa::PORTABLE, &norm)), "{width}");
        same_everywhere("exp_sum", |isa| {
            let mut out = x.clone();
            let sum = isa.run(ExpSum { x: &mut out, largest: 30.0 });
            out.push(sum);
            out
        });
        if width % 2 == 0 {
            let rotation = numbers(width, 3);
            let fused = same_everywhere("norm_rope", |isa| {
                let mut head = x.clone();
                isa.run(NormRope { head: &mut head, weight: &y, rotation: &rotation, eps: 1e-6 });
                head
            });
            let turned = same_everywhere("rope", |isa| {
                let mut head = norm.clone();
                isa.run(Rope { head: &mut head, rotation: &rotation });
                head
            });
            assert!(bits(&turned) == bits(&fused), "{width}");
        }
    }
}

#[test]
fn swiglu_at_the_ends_of_the_range() {
    let gate = [-1e30, -1000.0, -88.5, -87.5, -0.0, 0.0, 87.5, 1000.0, 1e30, f32::MIN_POSITIVE];
    let out = same_everywhere("swiglu", |isa| {
        let mut out = gate.to_vec();
        isa.run(SwiGlu { gate: &mut out, up: &[1.0; 10] });
        out
    });
    assert!(out.iter().all(|x| x.is_finite()));
    assert_eq!(&out[6..9], &gate[6..9]);
    assert!(out[1].abs() < 1e-30);
}

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    let x: Vec<f32> = (0..200_000).map(|i| -(i as f32) * 87.0 / 200_000.0).collect();
    let y = same_everywhere("exp", |isa| {
        let mut y = x.clone();
        isa.run(ExpSum { x: &mut y, largest: 0.0 });
        y
    });
    for (x, y) in x.iter().zip(y) {
        let expected = f64::from(*x).exp();
        let ulp = f64::from(f32::from_bits((expected as f32).to_bits() + 1)) - f64::from(expected as f32);
        assert!((f64::from(y) - expected).abs() <= 2.0 * ulp, "exp({x}) = {y}");
    }
}

/// `[n, k]` to `[ceil(n / 16)][k][16]`.
fn pack<T: Copy>(w: &[T], n: usize, k: usize, zero: T) -> Vec<T> {
    let mut packed = vec![zero; n.div_ceil(LANES) * k * LANES];
    for row in 0..n {
        for i in 0..k {
            packed[(row / LANES * k + i) * LANES + row % LANES] = w[row * k + i];
        }
    }
    packed
}

/// Rows `k` wide as float weights read them; nobody reads the padding.
fn padded(x: &[f32], k: usize) -> Vec<f32> {
    x.chunks(k).flat_map(|row| [row, &[f32::NAN; ROW_PADDING]].concat()).collect()
}

/// Checks both outputs of a matmul on all instruction sets, on one thread and on two.
fn check_product(expected: &[f32], what: &str, multiply: impl Fn(Isa, &Threads, Destination<'_>)) {
    let before = numbers(expected.len(), 10);
    let sums: Vec<f32> = before.iter().zip(expected).map(|(x, y)| x + y).collect();
    for isa in Isa::available() {
        for threads in [1, 2] {
            let threads = Threads::new(threads).unwrap();
            let mut out = vec![f32::NAN; expected.len()];
            multiply(isa, &threads, Destination::Overwrite(&mut out));
            assert!(bits(&out) == bits(expected), "{what} on {isa:?}");
            let mut out = before.clone();
            multiply(isa, &threads, Destination::Accumulate(&mut out));
            assert!(bits(&out) == bits(&sums), "{what} added on {isa:?}");
        }
    }
}

/// The same of a gated pair, which leaves rows of `words`, of which the first are expected.
fn check_gated(
    (m, words): (usize, usize),
    expected: &[f32],
    what: &str,
    multiply: impl Fn(Isa, &Threads, &mut [f32], &mut [f32]),
) {
    for isa in Isa::available() {
        for threads in [1, 2] {
            let threads = Threads::new(threads).unwrap();
            let mut scratch = vec![f32::NAN; threads.count() * GATED_WORDS];
            let mut out = vec![f32::NAN; m * words];
            multiply(isa, &threads, &mut scratch, &mut out);
            for (out, expected) in out.chunks(words).zip(expected.chunks(expected.len() / m)) {
                assert!(bits(&out[..expected.len()]) == bits(expected), "gated {what} on {isa:?}");
            }
        }
    }
}

/// `x[m, k] W^T` by the law, word for word.
fn float_law<T: Element>((m, n, k): (usize, usize, usize), x: &[f32], w: &[T]) -> Vec<f32> {
    let mut out = vec![0f32; m * n];
    for (i, y) in out.iter_mut().enumerate() {
        for j in 0..k {
            *y = x[i / n * k + j].mul_add(w[i % n * k + j].widen(), *y);
        }
    }
    out
}

fn swiglu(mut gate: Vec<f32>, up: &[f32]) -> Vec<f32> {
    Isa::PORTABLE.run(SwiGlu { gate: &mut gate, up });
    gate
}

fn check_float<T: Element>(m: usize, n: usize, k: usize, w: &[T], zero: T) {
    let (what, x) = (format!("{m} x {n} x {k}"), numbers(m * k, 5));
    let (packed, rows) = (pack(w, n, k, zero), padded(&x, k));
    let product = float_law((m, n, k), &x, w);
    check_product(&product, &what, |isa, threads, out| {
        matmul_float(isa, threads, &rows, &packed, (k, n), out);
    });
    let turned: Vec<T> = w.iter().rev().copied().collect();
    let up = float_law((m, n, k), &x, &turned);
    let pair = [&packed[..], &pack(&turned, n, k, zero)];
    check_gated((m, n + ROW_PADDING), &swiglu(product, &up), &what, |isa, threads, scratch, out| {
        gated_float(isa, threads, &rows, pair, (k, n), scratch, out);
    });
}

/// Quantized weights `[n, k]`, plain and packed.
struct Quantized<Q> {
    quants: Vec<i8>,         // [n][blocks * 32]
    scales: Vec<f16>,        // [n][blocks]
    packed: Vec<u8>,         // [ceil(n / 16)][blocks][PANEL_BLOCK_BYTES]
    packed_scales: Vec<f16>, // [ceil(n / 16)][blocks][16]
    format: PhantomData<Q>,
}

impl<Q: QuantFormat> Quantized<Q> {
    fn new(n: usize, k: usize, seed: u64) -> Self {
        let blocks = k.div_ceil(QUANT_BLOCK);
        let padded = blocks * QUANT_BLOCK;
        let mut w = numbers(n * padded, seed);
        for row in w.chunks_mut(padded) {
            row[k..].fill(0.0);
        }
        let groups = n.div_ceil(LANES);
        let (mut quants, mut scales) =
            (vec![0i8; groups * LANES * padded], vec![f16::ZERO; groups * LANES * blocks]);
        Q::quantize(Isa::PORTABLE, &w, &mut quants[..n * padded], &mut scales[..n * blocks]);
        let mut packed = vec![0; groups * blocks * Q::PANEL_BLOCK_BYTES];
        let mut packed_scales = vec![f16::ZERO; groups * blocks * LANES];
        for (i, panel) in packed.chunks_mut(blocks * Q::PANEL_BLOCK_BYTES).enumerate() {
            let quants = &quants[i * LANES * padded..(i + 1) * LANES * padded];
            Q::interleave(Isa::PORTABLE, quants, panel);
            for (row, quants) in quants.chunks(padded).enumerate() {
                for (k, &quant) in quants.iter().enumerate() {
                    let block = &panel[k / QUANT_BLOCK * Q::PANEL_BLOCK_BYTES..];
                    assert_eq!(Q::quant(block, row, k % QUANT_BLOCK), quant);
                }
            }
        }
        for row in 0..n {
            for b in 0..blocks {
                packed_scales[(row / LANES * blocks + b) * LANES + row % LANES] = scales[row * blocks + b];
            }
        }
        Self { quants, scales, packed, packed_scales, format: PhantomData }
    }

    fn packed(&self) -> (&[u8], &[f16]) {
        (&self.packed, &self.packed_scales)
    }

    /// The product with quantized activations by the law, word for word.
    fn law(&self, (m, n, blocks): (usize, usize, usize), activations: &[f32]) -> Vec<f32> {
        let (padded, words) = (blocks * QUANT_BLOCK, quantized_words(blocks));
        let mut out = vec![0f32; m * n];
        for (i, y) in out.iter_mut().enumerate() {
            let (row, column) = (&activations[i / n * words..(i / n + 1) * words], i % n);
            let values: &[i8] = bytemuck::cast_slice(&row[..padded / 4]);
            for b in 0..blocks {
                let weights = &self.quants[column * padded + b * QUANT_BLOCK..];
                let pairs = values[b * QUANT_BLOCK..(b + 1) * QUANT_BLOCK].iter().zip(weights);
                let dot: i32 = pairs.map(|(&a, &w)| i32::from(a) * i32::from(w)).sum();
                let scale = self.scales[column * blocks + b].to_f32() * row[padded / 4 + b];
                *y = (dot as f32).mul_add(scale, *y);
            }
        }
        out
    }
}

fn check_int8<Q: QuantFormat>(m: usize, n: usize, k: usize) {
    let what = format!("{} {m} x {n} x {k}", Q::NAME);
    let (blocks, x) = (k.div_ceil(QUANT_BLOCK), numbers(m * k, 6));
    let activations = same_everywhere("quantize", |isa| x.chunks(k).flat_map(|x| quantize(isa, x)).collect());
    let weights = Quantized::<Q>::new(n, k, 7);
    let product = weights.law((m, n, blocks), &activations);
    check_product(&product, &what, |isa, threads, out| {
        matmul_int8::<Q>(isa, threads, &activations, weights.packed(), (blocks, n), out);
    });
    let up = Quantized::<Q>::new(n, k, 11);
    let gated = swiglu(product, &up.law((m, n, blocks), &activations));
    let expected: Vec<f32> = gated.chunks(n).flat_map(|row| quantize(Isa::PORTABLE, row)).collect();
    let pair = [weights.packed(), up.packed()];
    check_gated((m, expected.len() / m), &expected, &what, |isa, threads, scratch, out| {
        gated_int8::<Q>(isa, threads, &activations, pair, (blocks, n), scratch, out);
    });
}

#[test]
fn matmul_at_every_number_of_rows() {
    for m in (1..30).chain([255, 256, 257, 300]) {
        let (n, k) = (37, 70);
        check_float(m, n, k, &numbers(n * k, 8), 0.0);
        check_int8::<Q8_0>(m, n, k);
    }
}

#[test]
fn matmul_at_every_remainder_of_columns_and_depth() {
    for n in 1..=LANES + 1 {
        for k in 1..=QUANT_BLOCK + 1 {
            check_float(2, n, k, &numbers(n * k, 8), 0.0);
            check_int8::<Q8_0>(2, n, k);
        }
    }
    for k in (QUANT_BLOCK..=3 * QUANT_BLOCK).step_by(7) {
        for n in (LANES..=5 * LANES).step_by(5) {
            check_float(13, n, k, &numbers(n * k, 8), 0.0);
            check_int8::<Q8_0>(13, n, k);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn matmul_of_any_shape(m in 1usize..20, n in 1usize..300, k in 1usize..200) {
        let w = numbers(n * k, 9);
        check_float(m, n, k, &w, 0.0);
        let halves: Vec<bf16> = w.iter().map(|&x| bf16::from_f32(x)).collect();
        check_float(m, n, k, &halves, bf16::ZERO);
        check_int8::<Q8_0>(m, n, k);
    }

    #[test]
    fn attention_of_any_shape(
        heads in 1usize..6, half in 1usize..129, context in 1usize..700, run in 1usize..300,
    ) {
        let width = 2 * half;
        check_attention::<f32>(heads, width, context, run, |x| x);
        check_attention::<f16>(heads, width, context, run, f16::from_f32);
    }
}

#[test]
fn attention_at_the_widths_of_released_models() {
    for heads in 1..6 {
        for width in [64, 128] {
            for context in [1, 15, 16, 17, 255, 256, 257, 512, 600] {
                check_attention::<f32>(heads, width, context, 64, |x| x);
                check_attention::<f16>(heads, width, context, 1000, f16::from_f32);
            }
        }
    }
}

/// Keys and values lent in runs of a fixed number of rows.
struct Lent<T> {
    k: Vec<T>,
    v: Vec<T>,
    width: usize,
    run: usize,
}

impl<T> Lent<T> {
    fn runs(&self) -> Vec<KvRun<'_, T>> {
        let len = self.run * self.width;
        self.k.chunks(len).zip(self.v.chunks(len)).map(|(k, v)| KvRun { k, v }).collect()
    }
}

fn check_attention<T: Element>(
    heads: usize,
    width: usize,
    context: usize,
    run: usize,
    narrow: impl Fn(f32) -> T,
) {
    let q = numbers(heads * width, 10);
    let rows = |seed| numbers(context * width, seed).into_iter().map(&narrow).collect::<Vec<T>>();
    let lent = Lent { k: rows(11), v: rows(12), width, run };
    let scale = 0.3 / (width as f32).sqrt();
    let attend = |isa: Isa, source: &Lent<T>| {
        let mut out = vec![f32::NAN; heads * width];
        let kv = KvHead { runs: &source.runs(), run_rows: source.run, stride: width, rows: context };
        isa.run(AttentionRow { q: &q, head_dim: width, kv, context, scale, out: &mut out });
        out
    };
    let out = same_everywhere("attention", |isa| attend(isa, &lent));
    let whole = Lent { run: 1 << 20, ..Lent { k: lent.k.clone(), v: lent.v.clone(), ..lent } };
    assert!(bits(&attend(Isa::PORTABLE, &whole)) == bits(&out), "in one run or in many");
    // Against softmax in f64.
    for h in 0..heads {
        let q = &q[h * width..(h + 1) * width];
        let dot =
            |k: &[T]| -> f64 { q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k.widen())).sum() };
        let scores: Vec<f64> = whole.k.chunks(width).map(|k| dot(k) * f64::from(scale)).collect();
        let largest = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        for i in 0..width {
            let values = whole.v.chunks(width).map(|v| f64::from(v[i].widen()));
            let expected: f64 = weights.iter().zip(values).map(|(w, v)| w * v / total).sum();
            let error = (f64::from(out[h * width + i]) - expected).abs();
            assert!(error < 2e-3, "{error} at {h}, {i} of {heads} x {width} x {context}");
        }
    }
}

/// An int8 dot product does 4 times as many multiply-adds as an f32 operation; without VNNI it takes four
/// instructions, which is at most twice the f32 rate. A ceiling beyond twice that means that the compiler
/// took work out of the loop. Medians of ratios within one run. The portable f32 ceiling is left out:
/// without FMA it calls a function.
#[test]
fn the_int8_ceiling_is_possible() {
    let threads = Threads::new(1).unwrap();
    for isa in Isa::available().into_iter().filter(|isa| isa.name() != "portable") {
        let rates: [_; 15] = std::array::from_fn(|_| (int8_rate(isa, &threads), f32_rate(isa, &threads)));
        let mut ratios = rates.map(|(int8, f32)| int8 / f32);
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios[ratios.len() / 2];
        println!("{isa:?}: int8 at {ratio:.2} times the f32 rate");
        let most = if isa.name() == "avx2" { 4.0 } else { 8.0 };
        assert!(ratio <= most, "{isa:?}: {ratio} times the f32 rate");
    }
}

#[test]
fn every_instruction_set_has_a_name_of_its_own() {
    let mut names: Vec<_> = Isa::available().iter().map(Isa::name).collect();
    assert_eq!(names.last(), Some(&"portable"));
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Isa::available().len());
}

#[test]
fn merging_chunks_of_very_different_size() {
    let width = 32;
    let chunks = 5;
    let len = partial_len(width);
    let mut partials = numbers(chunks * len, 13);
    for c in 0..chunks {
        partials[c * len + width] = [0.0, -200.0, 5.0, 5.0, 80.0][c];
        partials[c * len + width + 1] = 1.0 + c as f32;
    }
    let out = same_everywhere("merge", |isa| {
        let mut out = vec![0.0; width];
        isa.run(MergeChunks { partials: &partials, stride: len, chunks, out: &mut out });
        out
    });
    // The last chunk outweighs all others by e^75.
    for i in 0..width {
        let expected = partials[4 * len + i] / 5.0;
        assert!((out[i] - expected).abs() <= 1e-6 * expected.abs());
    }
    assert_eq!(CHUNK, 256, "the chunk is part of the arithmetic law: stored bits depend on it");
}
