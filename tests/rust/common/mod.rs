//! What several test files need.
#![allow(dead_code)] // each test file uses a part of it

use qwen_rs::backend::Backend;
use qwen_rs::cache::{BlockPool, KvCache, PagedKvCache};
use qwen_rs::kernels::Isa;
use qwen_rs::linear::WeightDtype;
use qwen_rs::loader::Checkpoint;
use qwen_rs::model::{Config, Logits, Model, Weights};
use qwen_rs::tensor::KvDtype;
use std::path::PathBuf;
use std::sync::LazyLock;

/// The random checkpoints that `make_golden.py` lists, by their folders: all GQA ratios, head widths and
/// families.
pub static CHECKPOINTS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let entries = golden("").read_dir().unwrap().map(|entry| entry.unwrap());
    let checkpoints = entries.filter(|entry| entry.path().join("golden.npz").exists());
    let mut names: Vec<_> = checkpoints.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
});
pub const DTYPES: &[WeightDtype] = WeightDtype::ALL;
pub const KV_DTYPES: [KvDtype; 2] = [KvDtype::F32, KvDtype::F16];

pub fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub fn load(name: &str, dtype: WeightDtype, backend: Backend) -> Model {
    let config = Config::open(&golden(name)).unwrap();
    let checkpoint = Checkpoint::open(&golden(name)).unwrap();
    let (isa, threads) = (backend.isa, &backend.threads);
    let weights = Weights::load(&config, &checkpoint, &|_| dtype, isa, threads, &|_| true).unwrap();
    Model::new(config, weights, backend)
}

pub fn scalar(name: &str, dtype: WeightDtype) -> Model {
    load(name, dtype, Backend::scalar().unwrap())
}

pub fn simd(name: &str, dtype: WeightDtype, isa: Isa, threads: usize) -> Model {
    load(name, dtype, Backend::simd(isa, threads).unwrap())
}

/// Tokens that look random and are the same everywhere.
pub fn tokens(model: &Model, count: usize, seed: u64) -> Vec<u32> {
    let vocab = model.config().vocab_size as u64;
    let mut state = seed.wrapping_mul(2) + 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % vocab) as u32
        })
        .collect()
}

pub fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

pub fn prefill(model: &Model, cache: &mut dyn KvCache, tokens: &[u32]) -> Vec<f32> {
    let mut logits = vec![0.0; model.config().vocab_size];
    model.prefill(cache, tokens, Logits::Last, &|| false, &mut logits).unwrap();
    logits
}

pub fn prefill_all(model: &Model, cache: &mut dyn KvCache, tokens: &[u32]) -> Vec<f32> {
    let mut logits = vec![0.0; tokens.len() * model.config().vocab_size];
    model.prefill(cache, tokens, Logits::All, &|| false, &mut logits).unwrap();
    logits
}

pub fn decode(model: &Model, cache: &mut dyn KvCache, token: u32) -> Vec<f32> {
    let mut logits = vec![0.0; model.config().vocab_size];
    model.decode(cache, token, &|| false, &mut logits).unwrap();
    logits
}

/// Every kind of cache, the paged one with several block sizes.
pub fn caches(model: &Model, dtype: KvDtype) -> Vec<(String, Box<dyn KvCache>)> {
    let mut all: Vec<(String, Box<dyn KvCache>)> = vec![
        ("basic".into(), Box::new(model.basic_cache(dtype))),
        ("concat".into(), Box::new(model.concat_cache(dtype))),
    ];
    for block_rows in [1, 7, 64, 1000] {
        let shape = model.config().kv_shape();
        let pool = BlockPool::new(shape, dtype, block_rows, 1000).unwrap();
        all.push((format!("paged by {block_rows}"), Box::new(PagedKvCache::new(pool))));
    }
    all
}
