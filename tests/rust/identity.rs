//! The same bits everywhere: logits do not depend on kernel, threads, batch, cache or how a prompt
//! was split. The oracle is the scalar backend (portable kernels, one thread) on the basic cache,
//! whole prompt at once. Every comparison is `==` on bits.

mod common;

use common::*;
use qwen_rs::kernels::Isa;
use qwen_rs::linear::WeightDtype;
use qwen_rs::model::{Logits, Model, Sequence};
use qwen_rs::tensor::KvDtype;
use std::sync::LazyLock;

/// Longer than an attention chunk, so that the merge of chunks is in every test.
const LENGTH: usize = 270;

/// What the scalar backend says of one checkpoint, weight dtype and cache dtype.
struct Oracle {
    name: &'static str,
    dtype: WeightDtype,
    kv: KvDtype,
    tokens: Vec<u32>,
    logits: Vec<f32>, // [LENGTH, vocab_size]
}

static ORACLES: LazyLock<Vec<Oracle>> = LazyLock::new(|| {
    let mut oracles = Vec::new();
    for name in &*CHECKPOINTS {
        for &dtype in DTYPES {
            let model = scalar(name, dtype);
            let tokens = tokens(&model, LENGTH, 1);
            for kv in KV_DTYPES {
                let logits = prefill_all(&model, &mut model.basic_cache(kv), &tokens);
                oracles.push(Oracle { name, dtype, kv, tokens: tokens.clone(), logits });
            }
        }
    }
    oracles
});

/// Calls `check` with every oracle.
fn for_each_oracle(check: impl Fn(&str, WeightDtype, KvDtype, &[u32], &[f32])) {
    for o in &*ORACLES {
        check(o.name, o.dtype, o.kv, &o.tokens, &o.logits);
    }
}

fn row(logits: &[f32], model: &Model, position: usize) -> Vec<u32> {
    let vocab = model.config().vocab_size;
    bits(&logits[position * vocab..(position + 1) * vocab])
}

#[test]
fn every_instruction_set_and_thread_count() {
    println!("instruction sets: {:?}", Isa::available());
    for_each_oracle(|name, dtype, kv, tokens, expected| {
        for isa in Isa::available() {
            // The portable kernels on one thread are the oracle; on three they are slow here.
            let threads = if isa.name() == "portable" { &[2][..] } else { &[1, 2, 3] };
            for &threads in threads {
                let model = simd(name, dtype, isa, threads);
                let logits = prefill_all(&model, &mut model.basic_cache(kv), tokens);
                let what = format!("{name} {dtype:?} {kv:?} {isa:?} {threads} threads");
                assert!(bits(&logits) == bits(expected), "{what}");
                // By decode: other kernels (one row, chunks side by side), the same bits.
                let mut cache = model.basic_cache(kv);
                prefill(&model, &mut cache, &tokens[..LENGTH - 20]);
                for (position, &token) in tokens.iter().enumerate().skip(LENGTH - 20) {
                    let logits = decode(&model, &mut cache, token);
                    assert!(bits(&logits) == row(expected, &model, position), "{what} decode {position}");
                }
            }
        }
    });
}

#[test]
fn every_cache_and_every_split_of_the_prompt() {
    for_each_oracle(|name, dtype, kv, tokens, expected| {
        let model = simd(name, dtype, Isa::available()[0], 2);
        for split in [1, 7, 64, LENGTH] {
            for (cache_name, mut cache) in caches(&model, kv) {
                for (i, chunk) in tokens.chunks(split).enumerate() {
                    let logits = prefill(&model, &mut *cache, chunk);
                    let position = i * split + chunk.len() - 1;
                    assert!(
                        bits(&logits) == row(expected, &model, position),
                        "{name} {dtype:?} {kv:?} {cache_name} in chunks of {split}, at {position}"
                    );
                }
                assert_eq!(cache.seq_len(), LENGTH);
            }
        }
        for (cache_name, mut cache) in caches(&model, kv) {
            for (position, &token) in tokens.iter().enumerate() {
                let logits = decode(&model, &mut *cache, token);
                assert!(
                    bits(&logits) == row(expected, &model, position),
                    "{name} {dtype:?} {kv:?} {cache_name} by decode, at {position}"
                );
            }
        }
    });
}

#[test]
fn batches_of_sequences_of_different_lengths() {
    for name in &*CHECKPOINTS {
        for &dtype in DTYPES {
            for isa in Isa::available() {
                let model = simd(name, dtype, isa, 2);
                if isa.name() == "portable" {
                    batch_equals_alone(&model, 5, KvDtype::F32);
                    continue;
                }
                for size in [1, 2, 5, 8] {
                    KV_DTYPES.iter().for_each(|&kv| batch_equals_alone(&model, size, kv));
                }
            }
        }
    }
}

/// More sequences than one pass takes.
#[test]
fn a_large_batch() {
    let model = simd("gqa_4_1", WeightDtype::Q8_0, Isa::available()[0], 2);
    batch_equals_alone(&model, 70, KvDtype::F32);
}

/// Prompts, chunks of prompts and decode steps in one pass: each sequence gets what it gets alone.
#[test]
fn any_mixture_of_rows_in_one_pass() {
    for_each_oracle(|name, dtype, kv, tokens, expected| {
        let model = simd(name, dtype, Isa::available()[0], 2);
        let vocab = model.config().vocab_size;
        // Each in a cache of another kind: where it stands, how many rows it brings, which logits it wants.
        let mixture = [
            (100, 1, Logits::Last),
            (0, LENGTH, Logits::All),
            (250, 7, Logits::Last),
            (0, 1, Logits::All),
            (17, 64, Logits::None),
            (LENGTH - 1, 1, Logits::Last),
        ];
        for turn in 0..mixture.len() {
            let mut parts = mixture;
            parts.rotate_left(turn);
            let mut caches: Vec<_> = caches(&model, kv).into_iter().map(|(_, cache)| cache).collect();
            for (cache, &(start, ..)) in caches.iter_mut().zip(&parts).filter(|(_, part)| part.0 > 0) {
                prefill(&model, &mut **cache, &tokens[..start]);
            }
            let mut rows = Vec::new(); // positions whose logits are wanted, in order
            let mut sequences = Vec::new();
            for (cache, &(start, count, wanted)) in caches.iter_mut().zip(&parts) {
                let end = start + count;
                rows.extend(match wanted {
                    Logits::None => end..end,
                    Logits::Last => end - 1..end,
                    Logits::All => start..end,
                });
                sequences.push(Sequence::new(&mut **cache, &tokens[start..end], wanted));
            }
            let mut logits = vec![f32::NAN; rows.len() * vocab];
            model.forward(&mut sequences, &|| false, &mut logits).unwrap();
            drop(sequences);
            for (i, &position) in rows.iter().enumerate() {
                let what = format!("{name} {dtype:?} {kv:?} mixture {turn} row {i}");
                assert!(row(&logits, &model, i) == row(expected, &model, position), "{what}");
            }
            // What they pushed is what they would have pushed alone.
            for (cache, &(start, count, _)) in caches.iter_mut().zip(&parts) {
                assert_eq!(cache.seq_len(), start + count);
                if start + count < LENGTH {
                    let next = decode(&model, &mut **cache, tokens[start + count]);
                    assert!(bits(&next) == row(expected, &model, start + count), "{name} {dtype:?} {kv:?}");
                }
            }
        }
    });
}

fn batch_equals_alone(model: &Model, size: usize, kv: KvDtype) {
    const STEPS: usize = 3;
    let vocab = model.config().vocab_size;
    // One prompt is longer than an attention chunk.
    let prompts: Vec<_> =
        (0..size).map(|i| tokens(model, if i == 1 { 260 } else { 1 + 5 * (i % 9) }, i as u64)).collect();
    let next = tokens(model, size * STEPS, 99);
    let mut together: Vec<_> = (0..size).map(|_| model.basic_cache(kv)).collect();
    for (cache, prompt) in together.iter_mut().zip(&prompts) {
        prefill(model, cache, prompt);
    }
    let mut batched = Vec::new();
    for step in next.chunks(size) {
        let caches = together.iter_mut().zip(step.chunks(1));
        let mut steps: Vec<_> = caches.map(|(c, t)| Sequence::new(c, t, Logits::Last)).collect();
        let mut logits = vec![0.0; size * vocab];
        model.decode_batch(&mut steps, &|| false, &mut logits).unwrap();
        batched.push(logits);
    }
    for (i, prompt) in prompts.iter().enumerate() {
        let mut alone = model.basic_cache(kv);
        prefill(model, &mut alone, prompt);
        for (step, logits) in batched.iter().enumerate() {
            let expected = decode(model, &mut alone, next[step * size + i]);
            assert!(
                bits(&expected) == row(logits, model, i),
                "sequence {i} of {size}, step {step}, {kv:?}, {:?}",
                model.backend().isa
            );
        }
    }
}

#[test]
fn snapshot_restore_and_go_on() {
    for_each_oracle(|name, dtype, kv, tokens, expected| {
        let model = simd(name, dtype, Isa::available()[0], 2);
        let half = LENGTH / 2;
        for (i, (from_name, mut from)) in caches(&model, kv).into_iter().enumerate() {
            prefill(&model, &mut *from, &tokens[..half]);
            let snapshot = model.snapshot(&*from).unwrap();
            // Each kind into the next one, round in a ring.
            for (to_name, mut to) in caches(&model, kv).into_iter().skip((i + 1) % 6).take(1) {
                model.restore(&mut *to, &snapshot).unwrap();
                assert_eq!(to.seq_len(), half);
                let logits = prefill(&model, &mut *to, &tokens[half..]);
                assert!(
                    bits(&logits) == row(expected, &model, LENGTH - 1),
                    "{name} {dtype:?} {kv:?} from {from_name} to {to_name}"
                );
            }
        }
    });
}

#[test]
fn truncate_and_go_on() {
    for_each_oracle(|name, dtype, kv, tokens, expected| {
        let model = simd(name, dtype, Isa::available()[0], 2);
        for (cache_name, mut cache) in caches(&model, kv) {
            prefill(&model, &mut *cache, tokens);
            cache.truncate(100);
            let logits = prefill(&model, &mut *cache, &tokens[100..]);
            let what = format!("{name} {dtype:?} {kv:?} {cache_name}");
            assert!(bits(&logits) == row(expected, &model, LENGTH - 1), "{what}");
        }
    });
}

#[test]
fn forks_share_a_prefix_and_go_their_own_ways() {
    let model = simd("gqa_4_1", WeightDtype::Q8_0, Isa::available()[0], 2);
    let prompt = tokens(&model, 100, 3);
    for (name, mut cache) in caches(&model, KvDtype::F32).into_iter().skip(2) {
        prefill(&model, &mut *cache, &prompt);
        let mut forks: Vec<_> = (0..3).map(|_| cache.fork().unwrap()).collect();
        for (i, fork) in forks.iter_mut().enumerate() {
            let ending = tokens(&model, 30, 40 + i as u64);
            let logits = prefill(&model, &mut **fork, &ending);
            let mut alone = model.basic_cache(KvDtype::F32);
            let whole = [&prompt[..], &ending].concat();
            assert!(bits(&logits) == bits(&prefill(&model, &mut alone, &whole)), "{name} fork {i}");
        }
        // The first sequence still holds what it held.
        let logits = decode(&model, &mut *cache, 5);
        let mut alone = model.basic_cache(KvDtype::F32);
        prefill(&model, &mut alone, &prompt);
        assert!(bits(&logits) == bits(&decode(&model, &mut alone, 5)), "{name}");
    }
}
