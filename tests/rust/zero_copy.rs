//! The chapter's facts: what is copied and what is held. What is allocated is in `allocation.rs`.

mod common;

use common::*;
use qwen_rs::backend::{Phase, Profiler};
use qwen_rs::cache::{BlockPool, KV_HEADROOM_ROWS, KvCache, PagedKvCache};
use qwen_rs::kernels::Isa;
use qwen_rs::linear::WeightDtype;
use qwen_rs::model::Model;
use qwen_rs::tensor::{KvDtype, Tensor};
use std::sync::atomic::{AtomicUsize, Ordering};

fn model(dtype: WeightDtype) -> Model {
    simd("head_dim_128_old_spelling", dtype, Isa::available()[0], 2)
}

#[test]
fn memory_follows_the_rows_held() {
    for kv in KV_DTYPES {
        let model = model(WeightDtype::Q8_0);
        let token_bytes = model.config().kv_shape().token_bytes(kv);
        for prompt in [1, 17, 300] {
            let mut cache = model.basic_cache(kv);
            assert_eq!(cache.kv_bytes(), 0);
            prefill(&model, &mut cache, &tokens(&model, prompt, 1));
            assert_eq!(cache.kv_bytes(), (prompt + KV_HEADROOM_ROWS) * token_bytes);
            while cache.seq_len() < 900 {
                decode(&model, &mut cache, 1);
                let rows = cache.seq_len().max((prompt + KV_HEADROOM_ROWS).div_ceil(2));
                assert!(cache.kv_bytes() <= 2 * rows * token_bytes, "{} rows", cache.seq_len());
            }
        }
        // A prompt in chunks is held to the same.
        let mut cache = model.basic_cache(kv);
        for chunk in tokens(&model, 900, 1).chunks(7) {
            prefill(&model, &mut cache, chunk);
            let rows = cache.seq_len().max((7 + KV_HEADROOM_ROWS).div_ceil(2));
            assert!(cache.kv_bytes() <= 2 * rows * token_bytes);
        }
    }
}

#[test]
fn concat_dim0_is_called_twice_a_layer_and_step_by_the_concat_cache_alone() {
    let calls = |profiler: &Profiler, op: &str, phase| {
        let stats = profiler.stats(phase);
        stats.iter().find(|s| s.op == op).unwrap().calls as usize
    };
    let model = model(WeightDtype::F32);
    let layers = model.config().num_hidden_layers;
    let profiler = model.backend().profiler.clone();
    for (name, mut cache) in caches(&model, KvDtype::F32) {
        profiler.reset();
        profiler.enable(true);
        prefill(&model, &mut *cache, &tokens(&model, 20, 1));
        for _ in 0..10 {
            decode(&model, &mut *cache, 1);
        }
        profiler.enable(false);
        let concat = name == "concat";
        let expected = |per_layer: usize| if concat { per_layer * layers * 10 } else { 0 };
        assert_eq!(calls(&profiler, "concat_dim0", Phase::Prefill), 0, "{name}");
        assert_eq!(calls(&profiler, "concat_dim0", Phase::Decode), expected(2), "{name}");
        assert_eq!(calls(&profiler, "materialize", Phase::Decode), expected(1), "{name}");
        assert_eq!(calls(&profiler, "attention", Phase::Decode), layers * 10, "{name}");
    }
}

#[test]
fn appended_rows_leave_those_before_them_where_they_are() {
    let mut tensor = Tensor::empty_rows(3);
    assert_eq!(tensor.shape(), [0, 3]);
    tensor.reserve_rows(10).unwrap();
    assert_eq!(tensor.capacity_rows(), 10);
    let row = |x: f32| Tensor::from_f32(vec![x, x + 1.0, x + 2.0], [1, 3]).unwrap();
    tensor.append_rows(&row(0.0)).unwrap();
    let address = |t: &Tensor| match t.data() {
        qwen_rs::tensor::TensorData::F32(values) => values.as_ptr() as usize,
        _ => unreachable!(),
    };
    let start = address(&tensor);
    for i in 1..10 {
        tensor.append_rows(&row(i as f32)).unwrap();
        assert_eq!(address(&tensor), start);
        assert_eq!(tensor.shape(), [i + 1, 3]);
        assert_eq!(tensor.to_f32().unwrap().len(), (i + 1) * 3);
    }
    tensor.append_rows(&row(10.0)).unwrap();
    assert_eq!(tensor.capacity_rows(), 20, "capacity doubles");
    let expected: Vec<f32> = (0..11).flat_map(|i| (0..3).map(move |j| (i + j) as f32)).collect();
    assert_eq!(tensor.to_f32().unwrap(), expected);
}

#[test]
fn append_reserve_and_concat_refuse_what_does_not_fit() {
    let mut tensor = Tensor::empty_rows(32);
    let narrow = Tensor::from_f32(vec![1.0; 31], [1, 31]).unwrap();
    let wide = Tensor::from_f32(vec![1.0; 32], [1, 32]).unwrap();
    let mut quantized = wide.quantize_q8_0(Isa::PORTABLE).unwrap();
    assert!(tensor.append_rows(&narrow).is_err());
    assert!(tensor.append_rows(&quantized).is_err());
    assert!(quantized.append_rows(&wide).is_err());
    assert!(quantized.reserve_rows(1).is_err());
    assert!(Tensor::concat_dim0(&wide, &narrow).is_err());
    assert!(Tensor::concat_dim0(&wide, &quantized).is_err());
    assert_eq!(tensor.shape(), [0, 32]);
    assert!(tensor.reserve_rows(usize::MAX).is_err());
    tensor.append_rows(&wide).unwrap();
    let both = Tensor::concat_dim0(&tensor, &wide).unwrap();
    assert_eq!(both.shape(), [2, 32]);
}

#[test]
fn an_exhausted_pool_is_an_error_that_names_the_sizes_and_changes_nothing() {
    let model = model(WeightDtype::F32);
    let shape = model.config().kv_shape();
    let pool = BlockPool::new(shape, KvDtype::F32, 16, 3).unwrap();
    let mut cache = PagedKvCache::new(pool.clone());
    let prompt = tokens(&model, 40, 1);
    let last = prefill(&model, &mut cache, &prompt);
    assert_eq!(pool.free_blocks(), 0);
    let mut logits = last.clone();
    let error =
        model.prefill(&mut cache, &prompt, qwen_rs::model::Logits::Last, &|| false, &mut logits).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("2 more blocks of 16 rows") && text.contains("0 of 3"), "{text}");
    assert_eq!(cache.seq_len(), 40);
    // Up to the pool's end it goes on; then another error, and the rows are still there.
    for i in 40..48 {
        decode(&model, &mut cache, i);
    }
    assert!(model.decode(&mut cache, 1, &|| false, &mut logits).is_err());
    assert_eq!(cache.seq_len(), 48);
    drop(cache);
    assert_eq!(pool.free_blocks(), 3);
}

#[test]
fn an_interrupted_pass_leaves_the_caches_as_they_were() {
    let model = model(WeightDtype::Q8_0);
    let prompt = tokens(&model, 600, 1);
    for stop_at in 1..5 {
        for (name, mut cache) in caches(&model, KvDtype::F32) {
            let expected = prefill(&model, &mut *cache, &prompt[..50]);
            let asked = AtomicUsize::new(0);
            let interrupt = || asked.fetch_add(1, Ordering::Relaxed) + 1 >= stop_at;
            let mut logits = expected.clone();
            let result = model.prefill(
                &mut *cache,
                &prompt[50..],
                qwen_rs::model::Logits::Last,
                &interrupt,
                &mut logits,
            );
            if stop_at <= 4 {
                assert!(matches!(result, Err(qwen_rs::error::Error::Interrupted)), "{name}");
                assert_eq!(cache.seq_len(), 50, "{name}");
            }
            let logits = prefill(&model, &mut *cache, &prompt[50..60]);
            let mut fresh = model.basic_cache(KvDtype::F32);
            assert!(bits(&logits) == bits(&prefill(&model, &mut fresh, &prompt[..60])), "{name}");
        }
    }
}
