//! A warm decode step allocates nothing. One test, alone in its process: the allocator counts for all
//! threads.

mod common;

use common::*;
use qwen_rs::cache::{BlockPool, KV_HEADROOM_ROWS, KvCache, PagedKvCache};
use qwen_rs::kernels::Isa;
use qwen_rs::linear::WeightDtype;
use qwen_rs::model::{Logits, Model, Sequence};
use qwen_rs::tensor::KvDtype;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts allocations of all threads.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it is.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's duty is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller's duty is the same.
        unsafe { System.dealloc(p, layout) }
    }
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's duty is the same.
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn model(dtype: WeightDtype) -> Model {
    simd("head_dim_128_old_spelling", dtype, Isa::available()[0], 2)
}

#[test]
fn warm_decode_steps_allocate_nothing() {
    a_warm_decode_step_allocates_nothing_within_the_headroom();
    a_warm_batch_step_allocates_nothing_either();
}

fn a_warm_decode_step_allocates_nothing_within_the_headroom() {
    for &dtype in DTYPES {
        for kv in KV_DTYPES {
            let model = model(dtype);
            let mut cache = model.basic_cache(kv);
            let mut logits = prefill(&model, &mut cache, &tokens(&model, 20, 1));
            model.decode(&mut cache, 1, &|| false, &mut logits).unwrap();
            let claimed = cache.kv_bytes(); // large storage is mapped, which the allocator does not see
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            for i in 1..KV_HEADROOM_ROWS {
                model.decode(&mut cache, i as u32 % 256, &|| false, &mut logits).unwrap();
            }
            let allocated = ALLOCATIONS.load(Ordering::Relaxed) - before;
            assert_eq!(allocated, 0, "{dtype:?} {kv:?}");
            assert_eq!(cache.kv_bytes(), claimed, "{dtype:?} {kv:?}");
            // The next row is beyond the headroom: storage grows.
            model.decode(&mut cache, 1, &|| false, &mut logits).unwrap();
            assert!(cache.kv_bytes() > claimed, "{dtype:?} {kv:?}");
        }
    }
}

fn a_warm_batch_step_allocates_nothing_either() {
    let model = model(WeightDtype::Q8_0);
    let shape = model.config().kv_shape();
    let pool = BlockPool::new(shape, KvDtype::F16, 512, 10).unwrap();
    let mut basic = model.basic_cache(KvDtype::F32);
    let mut paged = PagedKvCache::new(pool);
    prefill(&model, &mut basic, &tokens(&model, 20, 1));
    prefill(&model, &mut paged, &tokens(&model, 30, 2));
    let mut logits = vec![0.0; 2 * model.config().vocab_size];
    let mut step = |first: u32| {
        let tokens = [first, first + 1];
        let mut steps = [
            Sequence::new(&mut basic, &tokens[..1], Logits::Last),
            Sequence::new(&mut paged, &tokens[1..], Logits::Last),
        ];
        model.decode_batch(&mut steps, &|| false, &mut logits).unwrap();
    };
    step(1);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..50 {
        step(3);
    }
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0);
}
