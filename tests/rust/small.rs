//! Everything that has `unsafe` beneath it, at sizes that Miri can interpret:
//!
//! ```sh
//! cargo +nightly miri test --test small
//! ```
//!
//! Miri sees the portable kernels, the caches, the tensors and the pool of threads; what it cannot
//! run are the instruction sets (tested with `==` in `kernels`) and files (`valgrind` runs those).

mod common;

use common::{bits, decode, prefill, prefill_all};
use half::{bf16, f16};
use qwen_rs::backend::Backend;
use qwen_rs::cache::{BlockPool, KvCache, PagedKvCache};
use qwen_rs::kernels::Destination;
use qwen_rs::kernels::Isa;
use qwen_rs::kernels::gated::{GATED_WORDS, gated_float, gated_int8};
use qwen_rs::kernels::matmul_float::{ROW_PADDING, matmul_float};
use qwen_rs::kernels::matmul_int8::{QuantFormat, matmul_int8};
use qwen_rs::kernels::q8_0::Q8_0;
use qwen_rs::kernels::quantize::{QuantizeActivations, quantized_words};
use qwen_rs::linear::WeightDtype;
use qwen_rs::model::{Config, Logits, Model, Sequence, Weights, random_weights};
use qwen_rs::tensor::{Buffer, KvDtype, Tensor};
use qwen_rs::threads::Threads;
use std::sync::atomic::{AtomicUsize, Ordering};

fn model(head_dim: usize, dtype: WeightDtype, threads: usize) -> Model {
    let config = format!(
        r#"{{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 21, "hidden_size": 20,
            "intermediate_size": 18, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": {head_dim}, "max_position_embeddings": 64,
            "tie_word_embeddings": false}}"#
    );
    let config = Config::from_json(&config).unwrap();
    let source = random_weights(&config, 3).unwrap();
    let (isa, workers) = (Isa::PORTABLE, Threads::new(threads).unwrap());
    let weights = Weights::load(&config, &source, &|_| dtype, isa, &workers, &|_| true).unwrap();
    Model::new(config, weights, Backend::simd(isa, threads).unwrap())
}

#[test]
fn a_model_of_every_dtype_on_every_cache() {
    for &dtype in WeightDtype::ALL {
        let kv = if dtype == WeightDtype::F32 { KvDtype::F32 } else { KvDtype::F16 };
        let model = model(6, dtype, 1);
        let mut expected = None;
        let pool = BlockPool::new(model.config().kv_shape(), kv, 2, 9).unwrap();
        let caches: [Box<dyn KvCache>; 3] = [
            Box::new(model.basic_cache(kv)),
            Box::new(model.concat_cache(kv)),
            Box::new(PagedKvCache::new(pool)),
        ];
        for mut cache in caches {
            let logits = prefill(&model, &mut *cache, &[1, 2, 3]);
            let next = decode(&model, &mut *cache, 5);
            cache.truncate(2);
            assert_eq!(bits(&prefill(&model, &mut *cache, &[3])), bits(&logits));
            assert_eq!(bits(&next), bits(expected.get_or_insert_with(|| next.clone())));
        }
    }
}

#[test]
fn the_tile_of_prefill_attention() {
    let model = model(64, WeightDtype::Q8_0, 1);
    let tokens = [1, 2, 3];
    let mut whole = model.basic_cache(KvDtype::F16);
    let all = prefill_all(&model, &mut whole, &tokens);
    let mut steps = model.basic_cache(KvDtype::F16);
    for (&token, expected) in tokens.iter().zip(all.chunks(21)) {
        assert_eq!(bits(&prefill(&model, &mut steps, &[token])), bits(expected));
    }
}

#[test]
fn sequences_decoded_together_by_several_threads() {
    let model = model(6, WeightDtype::Q8_0, 3);
    let pool = BlockPool::new(model.config().kv_shape(), KvDtype::F32, 2, 20).unwrap();
    let mut first = PagedKvCache::new(pool);
    prefill(&model, &mut first, &[1, 2, 3]);
    let mut forked = first.fork().unwrap();
    let mut basic = model.basic_cache(KvDtype::F32);
    prefill(&model, &mut basic, &[1, 2, 3]);
    let mut logits = vec![0.0; 3 * 21];
    let mut steps = [
        Sequence::new(&mut first, &[7], Logits::Last),
        Sequence::new(&mut *forked, &[8], Logits::Last),
        Sequence::new(&mut basic, &[7], Logits::Last),
    ];
    model.decode_batch(&mut steps, &|| false, &mut logits).unwrap();
    assert_eq!(bits(&logits[..21]), bits(&logits[42..]));
    assert_ne!(bits(&logits[..21]), bits(&logits[21..42]));
}

#[test]
fn matmul_at_odd_sizes() {
    let threads = Threads::new(2).unwrap();
    let mut scratch = vec![0.0; 2 * GATED_WORDS];
    for (m, n, k) in [(1, 1, 1), (3, 17, 5), (5, 33, 2)] {
        let x = vec![0.5; m * (k + ROW_PADDING)];
        let mut out = vec![f32::NAN; m * n];
        let weights = vec![bf16::ONE; n.div_ceil(16) * k * 16];
        matmul_float(Isa::PORTABLE, &threads, &x, &weights, (k, n), Destination::Overwrite(&mut out));
        assert!(out.iter().all(|&y| y == 0.5 * k as f32));
        let mut gated = vec![f32::NAN; m * (n + ROW_PADDING)];
        gated_float(Isa::PORTABLE, &threads, &x, [&weights, &weights], (k, n), &mut scratch, &mut gated);
        assert!(gated.chunks(n + ROW_PADDING).all(|row| row[..n].iter().all(|&y| y > 0.0)));
        let blocks = k.div_ceil(32);
        let mut quantized = vec![0.0; m * quantized_words(blocks)];
        for row in quantized.chunks_mut(quantized_words(blocks)) {
            Isa::PORTABLE.run(QuantizeActivations { x: &x[..k], out: row });
        }
        let groups = n.div_ceil(16) * blocks;
        let (quants, scales) = (vec![129; groups * Q8_0::PANEL_BLOCK_BYTES], vec![f16::ONE; groups * 16]);
        let weights = (&quants[..], &scales[..]);
        matmul_int8::<Q8_0>(
            Isa::PORTABLE,
            &threads,
            &quantized,
            weights,
            (blocks, n),
            Destination::Accumulate(&mut out),
        );
        assert!(out.iter().all(|&y| (y - k as f32).abs() < 1e-3));
        let mut gated = vec![f32::NAN; m * quantized_words(n.div_ceil(32))];
        let pair = [weights, weights];
        gated_int8::<Q8_0>(Isa::PORTABLE, &threads, &quantized, pair, (blocks, n), &mut scratch, &mut gated);
        assert!(gated.iter().all(|y| y.to_bits() != f32::NAN.to_bits()));
    }
}

#[test]
fn tensors_and_buffers_grow_in_place() {
    for dtype in [KvDtype::F32, KvDtype::F16] {
        let mut tensor = Tensor::empty_rows_of(dtype, 3);
        let row = Tensor::from_f32(vec![1.0, 2.0, 3.0], [1, 3]).unwrap();
        for _ in 0..9 {
            tensor.append_rows(&row).unwrap();
        }
        tensor.truncate_rows(2);
        assert_eq!(tensor.to_f32().unwrap(), [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        let both = Tensor::concat_dim0(&tensor, &tensor).unwrap();
        assert_eq!(both.shape(), [4, 3]);
    }
    // From the heap into pages of its own, and on there.
    let mut buffer = Buffer::<f32>::default();
    let mut held = 0;
    let large = if cfg!(miri) { 2000 } else { 1 << 18 };
    for len in [3, 5, large, large + 7] {
        buffer.reserve_exact(len - held).unwrap();
        buffer.grow(len - held).fill(len as f32);
        held = len;
    }
    assert_eq!((buffer.len(), buffer[2], buffer[4]), (held, 3.0, 5.0));
    assert_eq!((buffer[5], buffer[held - 1]), (large as f32, held as f32));
    assert!(buffer.reserve_exact(usize::MAX / 8).is_err() && buffer.len() == held);
    assert_eq!(buffer.clone(), buffer);
}

#[test]
fn every_task_runs_once_and_a_panic_is_raised_again() {
    for count in [1, 2, 4] {
        let threads = Threads::new(count).unwrap();
        for tasks in [0, 1, 2, 9] {
            let mut items = vec![0; tasks];
            threads.for_each_mut(&mut items, |i, item| *item += i + 1);
            assert_eq!(items, (1..=tasks).collect::<Vec<_>>());
            let mut rows = vec![0.0; 3 * tasks];
            threads.for_each_row(&mut rows, 3, 2, |r, row| row.fill(r as f32));
            assert!(rows.chunks(3).enumerate().all(|(r, row)| row.iter().all(|&x| x == r as f32)));
        }
        let done = AtomicUsize::new(0);
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            threads.run(6, &|i| {
                assert!(i != 3, "a task that fails");
                done.fetch_add(1, Ordering::Relaxed);
            });
        }));
        assert!(panics.is_err());
        threads.run(4, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert!(done.load(Ordering::Relaxed) >= 4);
    }
}
