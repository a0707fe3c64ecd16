//! What a checkpoint may hold, and what is said of one that is wrong.

mod common;

use common::{bits, decode, prefill, prefill_all};
use qwen_rs::backend::Backend;
use qwen_rs::error::{Error, Result};
use qwen_rs::kernels::Isa;
use qwen_rs::linear::{Activations, GatedPair, Linear, Packer, WeightDtype};
use qwen_rs::loader::Checkpoint;
use qwen_rs::model::{Config, Model, Weights, random_weights};
use qwen_rs::tensor::{KvDtype, StoredBytes, StoredDtype, StoredTensor};
use qwen_rs::threads::Threads;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const HIDDEN: usize = 32;
const ALL: &[WeightDtype] = common::DTYPES;

fn config(tied: bool) -> String {
    format!(
        r#"{{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 48, "hidden_size": {HIDDEN},
            "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
            "tie_word_embeddings": {tied}}}"#
    )
}

struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

type Tensors = BTreeMap<String, Stored>;

/// Every tensor that the config asks for, BF16 values in F32.
fn tensors() -> Tensors {
    let (q, kv, inner) = (32, 16, 96);
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens".into(), vec![48, HIDDEN]),
        ("lm_head".into(), vec![48, HIDDEN]),
        ("model.norm".into(), vec![HIDDEN]),
    ];
    for i in 0..2 {
        for (name, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_norm", vec![16]),
            ("self_attn.k_norm", vec![16]),
            ("self_attn.q_proj", vec![q, HIDDEN]),
            ("self_attn.k_proj", vec![kv, HIDDEN]),
            ("self_attn.v_proj", vec![kv, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, q]),
            ("mlp.gate_proj", vec![inner, HIDDEN]),
            ("mlp.up_proj", vec![inner, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, inner]),
        ] {
            shapes.push((format!("model.layers.{i}.{name}"), shape));
        }
    }
    let mut state = 1u32;
    let mut value = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (f32::from((state >> 24) as u8) - 127.5) / 256.0
    };
    shapes
        .into_iter()
        .map(|(name, shape)| {
            let count: usize = shape.iter().product();
            let bytes = (0..count).flat_map(|_| value().to_le_bytes()).collect();
            (format!("{name}.weight"), Stored { dtype: Dtype::F32, shape, bytes })
        })
        .collect()
}

/// The value at `index` of a tensor, anew.
fn put(tensors: &mut Tensors, name: &str, index: usize, value: f32) {
    tensors.get_mut(name).unwrap().bytes[4 * index..4 * index + 4].copy_from_slice(&value.to_le_bytes());
}

fn write_file<'a>(path: &Path, tensors: impl Iterator<Item = (&'a String, &'a Stored)>) {
    let views = tensors.map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    serialize_to_file(views, None, path).unwrap();
}

/// An empty directory of this test's own, with a config.
fn directory(name: &str) -> PathBuf {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("config.json"), config(false)).unwrap();
    directory
}

fn write(name: &str, tensors: &Tensors) -> PathBuf {
    let directory = directory(name);
    write_file(&directory.join("model.safetensors"), tensors.iter());
    directory
}

fn load_watched(directory: &Path, dtype: WeightDtype, progress: &dyn Fn(f64) -> bool) -> Result<Weights> {
    let config = Config::open(directory)?;
    let checkpoint = Checkpoint::open(directory)?;
    Weights::load(&config, &checkpoint, &|_| dtype, Isa::PORTABLE, &Threads::new(2)?, progress)
}

fn load(directory: &Path, dtype: WeightDtype) -> Result<Weights> {
    load_watched(directory, dtype, &|_| true)
}

/// The message of a checkpoint that is wrong.
fn message(loaded: Result<Weights>) -> String {
    match loaded {
        Err(Error::Model(message)) => message,
        Err(other) => panic!("not what is wrong with a checkpoint: {other}"),
        Ok(_) => panic!("it was loaded"),
    }
}

#[test]
fn a_weight_that_its_dtype_cannot_hold_is_refused() {
    let name = "model.layers.1.self_attn.k_proj.weight"; // inside the stacked q, k and v
    for (value, refusing) in
        [(1e7, &["q8_0"][..]), (3.4e38, &["q8_0", "bf16"]), (-f32::MAX, &["q8_0", "bf16"]), (8e6, &[])]
    {
        let mut tensors = tensors();
        put(&mut tensors, name, 5 * HIDDEN + 3, value);
        let directory = write("too_large", &tensors);
        for &dtype in ALL {
            let loaded = load(&directory, dtype);
            if refusing.contains(&dtype.name()) {
                let message = message(loaded);
                for part in ["model.safetensors", name, "row 5", dtype.name(), "dtype f32"] {
                    assert!(message.contains(part), "{message}");
                }
            } else {
                assert!(loaded.is_ok(), "{value} as {dtype:?}");
            }
        }
    }
}

#[test]
fn a_bf16_weight_that_q8_0_cannot_hold_is_refused() {
    let mut tensors = tensors();
    let embed = tensors.get_mut("model.embed_tokens.weight").unwrap();
    let values = embed.bytes.chunks(4).flat_map(|b| [b[2], b[3]]);
    embed.bytes = values.collect();
    embed.dtype = Dtype::BF16;
    embed.bytes[2 * 40 * HIDDEN..][..2].copy_from_slice(&0x7f7f_u16.to_le_bytes()); // 3.39e38
    let directory = write("too_large_bf16", &tensors);
    assert!(message(load(&directory, WeightDtype::Q8_0)).contains("row 40"));
    for dtype in [WeightDtype::F32, WeightDtype::BF16] {
        load(&directory, dtype).unwrap();
    }
}

#[test]
fn a_block_that_is_too_small_for_q8_0_is_one_of_zeros() {
    let mut tensors = tensors();
    for i in 0..HIDDEN {
        put(&mut tensors, "model.embed_tokens.weight", i, 1e-7);
    }
    let weights = load(&write("too_small", &tensors), WeightDtype::Q8_0).unwrap();
    let mut row = [f32::NAN; HIDDEN];
    weights.embed_tokens.row(&weights.arena, 0, &mut row);
    assert_eq!(row, [0.0; HIDDEN]);
}

#[test]
fn every_name_shape_and_dtype_is_checked_before_anything_is_packed() {
    let names: Vec<String> = tensors().into_keys().collect();
    for name in &names {
        for wrong in ["missing", "shape", "dtype"] {
            let mut tensors = tensors();
            let mut tensor = tensors.remove(name).unwrap();
            match wrong {
                "missing" => {}
                "shape" => {
                    tensor.shape.push(1);
                    tensors.insert(name.clone(), tensor);
                }
                _ => {
                    tensor.dtype = Dtype::I32;
                    tensors.insert(name.clone(), tensor);
                }
            }
            let directory = write("wrong", &tensors);
            let shares = RefCell::new(Vec::new());
            let loaded = load_watched(&directory, WeightDtype::F32, &|share| {
                shares.borrow_mut().push(share);
                true
            });
            let message = message(loaded);
            assert!(message.contains(name) && message.contains("model.safetensors"), "{message}");
            assert!(shares.borrow().iter().all(|&share| share == 0.0), "{name} {wrong}: found after packing");
        }
    }
}

/// Shards by name, and an index of some of their tensors.
fn write_shards(name: &str, shards: &[(&str, &Tensors)], weight_map: &[(&str, &str)]) -> PathBuf {
    let directory = directory(name);
    for (file, tensors) in shards {
        write_file(&directory.join(file), tensors.iter());
    }
    let map: BTreeMap<_, _> = weight_map.iter().copied().collect();
    let index = serde_json::json!({ "weight_map": map }).to_string();
    fs::write(directory.join("model.safetensors.index.json"), index).unwrap();
    directory
}

const NORM: &str = "model.norm.weight";

/// A whole model in `a`, and in `b` another norm, which `b` may call by another name.
fn two_norms(as_name: &str) -> [Tensors; 2] {
    let (mut a, mut b) = (tensors(), Tensors::new());
    put(&mut a, NORM, 0, 1.0);
    let mut other = tensors();
    put(&mut other, NORM, 0, 2.0);
    b.insert(as_name.into(), other.remove(NORM).unwrap());
    [a, b]
}

#[test]
fn the_index_decides_which_file_holds_a_tensor() {
    let [a, mut b] = two_norms(NORM);
    b.extend(two_norms("extra.weight")[1].pop_first());
    for (file, expected) in [("a.safetensors", 1.0), ("b.safetensors", 2.0)] {
        let map = [("lm_head.weight", "a.safetensors"), (NORM, file), ("extra.weight", "b.safetensors")];
        let directory = write_shards("decides", &[("a.safetensors", &a), ("b.safetensors", &b)], &map);
        assert_eq!(load(&directory, WeightDtype::F32).unwrap().norm[0], expected);
    }
}

#[test]
fn a_tensor_in_two_files_that_the_index_does_not_settle_is_refused() {
    let [a, mut b] = two_norms(NORM);
    b.extend(two_norms("extra.weight")[1].pop_first());
    let map = [("lm_head.weight", "a.safetensors"), ("extra.weight", "b.safetensors")];
    let directory = write_shards("unsettled", &[("a.safetensors", &a), ("b.safetensors", &b)], &map);
    let message = message(load(&directory, WeightDtype::F32));
    for part in ["a.safetensors", "b.safetensors", NORM, "index.json"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_tensor_that_is_not_where_the_index_says_is_refused() {
    let [a, b] = two_norms("extra.weight");
    let map = [("lm_head.weight", "a.safetensors"), (NORM, "b.safetensors")];
    let directory = write_shards("elsewhere", &[("a.safetensors", &a), ("b.safetensors", &b)], &map);
    let message = message(load(&directory, WeightDtype::F32));
    for part in ["b.safetensors", NORM, "index.json"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_single_file_beside_an_index_that_does_not_name_it_is_refused() {
    let [a, b] = two_norms(NORM);
    let single = ("model.safetensors", &b);
    let directory = write_shards("both", &[("a.safetensors", &a), single], &[(NORM, "a.safetensors")]);
    let message = message(load(&directory, WeightDtype::F32));
    for part in ["delete model.safetensors.index.json", "delete model.safetensors to", "transformers"] {
        assert!(message.contains(part), "{message}");
    }
    // An index that does name it is one of a model that was saved in one file.
    let directory = write_shards("both", &[("model.safetensors", &a)], &[(NORM, "model.safetensors")]);
    assert_eq!(load(&directory, WeightDtype::F32).unwrap().norm[0], 1.0);
}

#[test]
fn a_file_that_is_cut_short_while_it_is_read_is_an_error() {
    let directory = write("cut", &tensors());
    let path = directory.join("model.safetensors");
    let config = Config::open(&directory).unwrap();
    let checkpoint = Checkpoint::open(&directory).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    for count in [1, 2] {
        let threads = Threads::new(count).unwrap();
        let dtype = |_: &str| WeightDtype::Q8_0;
        let loaded = Weights::load(&config, &checkpoint, &dtype, Isa::PORTABLE, &threads, &|_| true);
        match loaded {
            Err(error @ Error::File { .. }) => {
                let message = error.to_string();
                assert!(
                    message.contains("model.safetensors: ") && message.contains("cut short"),
                    "{message}"
                );
            }
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("it was loaded"),
        }
    }
}

/// A model each of whose weights is kept as `dtype` says by its name.
fn mixed(dtype: &dyn Fn(&str) -> WeightDtype, isa: Isa, threads: usize) -> Result<Model> {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("mixed");
    let config = Config::open(&directory)?;
    let checkpoint = Checkpoint::open(&directory)?;
    let backend = Backend::simd(isa, threads)?;
    let weights = Weights::load(&config, &checkpoint, dtype, isa, &Threads::new(threads)?, &|_| true)?;
    Ok(Model::new(config, weights, backend))
}

#[test]
fn formats_may_differ_from_weight_to_weight() {
    write("mixed", &tensors());
    let prompt: Vec<u32> = (0..30).map(|i| i * 7 % 48).collect();
    let all = |model: &Model| bits(&prefill_all(model, &mut model.basic_cache(KvDtype::F32), &prompt));
    // Values that BF16 holds: whichever weights are F32 and whichever BF16, the sums are the same.
    let expected = all(&mixed(&|_| WeightDtype::F32, Isa::PORTABLE, 1).unwrap());
    for name in ["gate_proj", "up_proj", "down_proj", "qkv", "o_proj", "lm_head", "embed"] {
        let dtype = |full: &str| if full.contains(name) { WeightDtype::BF16 } else { WeightDtype::F32 };
        assert_eq!(all(&mixed(&dtype, Isa::PORTABLE, 2).unwrap()), expected, "{name}");
    }
    // Any of them in Q8_0: the same everywhere, whole or token by token.
    for name in ["_proj", "mlp", "down_proj", "q_proj", "o_proj", "lm_head", "embed"] {
        for other in [WeightDtype::F32, WeightDtype::BF16] {
            for swap in [false, true] {
                let dtype = |full: &str| if full.contains(name) == swap { other } else { WeightDtype::Q8_0 };
                let expected = all(&mixed(&dtype, Isa::PORTABLE, 1).unwrap());
                for isa in Isa::available() {
                    let model = mixed(&dtype, isa, 2).unwrap();
                    assert_eq!(all(&model), expected, "{name} {isa:?}");
                    let mut cache = model.basic_cache(KvDtype::F32);
                    prefill(&model, &mut cache, &prompt[..20]);
                    let step = bits(&decode(&model, &mut cache, prompt[20]));
                    assert_eq!(step, expected[20 * 48..21 * 48], "{name} {isa:?}");
                }
            }
        }
    }
}

#[test]
fn a_gated_pair_that_reads_different_activations_is_refused() {
    let directory = write("mixed_pair", &tensors());
    let dtype = |name: &str| if name.contains("gate_proj") { WeightDtype::Q8_0 } else { WeightDtype::F32 };
    let config = Config::open(&directory).unwrap();
    let checkpoint = Checkpoint::open(&directory).unwrap();
    let threads = Threads::new(1).unwrap();
    let message = message(Weights::load(&config, &checkpoint, &dtype, Isa::PORTABLE, &threads, &|_| true));
    assert!(message.contains("gate_proj") && message.contains("up_proj") && message.contains("alike"));
}

struct Bytes(Vec<u8>);

impl StoredBytes for Bytes {
    fn read<'b>(&'b self, range: std::ops::Range<u64>, _: &'b mut Vec<u8>) -> Result<&'b [u8]> {
        Ok(&self.0[range.start as usize..range.end as usize])
    }
    fn origin(&self) -> String {
        "here".into()
    }
}

#[test]
fn a_gated_pair_gives_the_same_in_one_pass_and_over_memory() {
    let (n, k, m) = (83, 70, 9);
    let value = |i: usize| ((i * 7919) % 511) as f32 / 256.0 - 1.0;
    let stored = Bytes((0..2 * n * k).flat_map(|i| value(i).to_le_bytes()).collect());
    let tensor =
        |start| StoredTensor { name: "w", dtype: StoredDtype::F32, rows: n, cols: k, bytes: &stored, start };
    let tensors = [tensor(0), tensor((n * k * 4) as u64)];
    let threads = Threads::new(2).unwrap();
    for &dtype in ALL {
        let isa = Isa::available()[0];
        let mut packer = Packer::new(2 * dtype.packed_bytes(n, k).unwrap(), isa, &threads).unwrap();
        let mut pack = |i: usize| packer.pack(&tensors[i..=i], dtype, &|_| Ok(())).unwrap();
        let (gate, up): (Linear, Linear) = (pack(0), pack(1));
        let arena = packer.finish();
        let own = gate.activations();
        let words = own.words(k);
        let mut x = vec![0.0; m * words];
        for (r, x) in x.chunks_mut(words).enumerate() {
            let row: Vec<f32> = (0..k).map(|i| value(r * k + i + 5)).collect();
            own.write(isa, &row, x);
        }
        let run = |reader| {
            let pair = GatedPair { gate: &gate, up: &up, reader };
            let mut scratch = vec![0.0; pair.scratch_words(m, 2)];
            let mut out = vec![0.0; m * pair.reader.words(n)];
            pair.run(&arena, isa, &threads, &x, &mut scratch, &mut out);
            out
        };
        // One of the two is left by a pass of its own, the other goes over memory.
        let [f32s, int8s] = [Activations::F32, Activations::Int8].map(run);
        let rows = f32s.chunks(Activations::F32.words(n)).zip(int8s.chunks(Activations::Int8.words(n)));
        for (wide, expected) in rows {
            let mut quantized = vec![0.0; expected.len()];
            Activations::Int8.write(isa, &wide[..n], &mut quantized);
            assert_eq!(bits(&quantized), bits(expected), "{dtype:?}");
        }
    }
}

#[test]
fn random_weights_are_as_large_as_the_largest_tensor() {
    let config = Config::from_json(&config(true)).unwrap();
    let source = random_weights(&config, 1).unwrap();
    let threads = Threads::new(1).unwrap();
    Weights::load(&config, &source, &|_| WeightDtype::F32, Isa::PORTABLE, &threads, &|_| true).unwrap();
    // One that no machine holds is an error, not an abort.
    let large = Config { vocab_size: 1 << 24, hidden_size: 1 << 24, ..config };
    assert!(matches!(random_weights(&large, 1), Err(Error::Memory(_))));
}
