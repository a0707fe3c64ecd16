//! A checkpoint directory, checked and packed: names, shapes and dtypes are verified before a byte
//! is computed with.

mod checkpoint;
mod random;

pub use checkpoint::Checkpoint;
pub use random::RandomWeights;

use crate::error::{Error, Result};
use crate::kernels::Isa;
use crate::linear::{Arena, Linear, RowSource, WeightDtype};
use crate::model::Config;
use crate::threads::Threads;

/// The weights of one layer, named as in the checkpoint; shapes are `[out, in]`.
pub struct LayerWeights {
    pub input_layernorm: Vec<f32>,          // [hidden]
    pub qkv_proj: Linear,                   // q_proj, k_proj, v_proj stacked: [q + 2 kv, hidden]
    pub q_norm: Vec<f32>,                   // [head_dim]
    pub k_norm: Vec<f32>,                   // [head_dim]
    pub o_proj: Linear,                     // [hidden, q]
    pub post_attention_layernorm: Vec<f32>, // [hidden]
    pub gate_proj: Linear,                  // [intermediate, hidden]
    pub up_proj: Linear,                    // [intermediate, hidden]
    pub down_proj: Linear,                  // [hidden, intermediate]
}

/// All weights of a model; the packed ones are in `arena`.
pub struct Weights {
    pub arena: Arena,
    pub dtype: WeightDtype,
    pub embed_tokens: Linear, // [vocab, hidden]
    pub layers: Vec<LayerWeights>,
    pub norm: Vec<f32>,          // [hidden]
    pub lm_head: Option<Linear>, // [vocab, hidden]; none: tied to embed_tokens
}

impl Weights {
    /// Bytes of the packed weights.
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }
}

/// Told the share that is done, 0 to 1; `false` stops the load.
pub type Progress<'a> = &'a dyn Fn(f64) -> bool;

/// Where a name's rows come from.
pub trait TensorSource {
    /// The tensor `name`, which must be `[rows, cols]`, or `[cols]` if `rows` is none.
    fn tensor(&self, name: &str, rows: Option<usize>, cols: usize) -> Result<RowSource<'_>>;
    /// Called when a part of a tensor's bytes is no longer needed.
    fn release(&self, bytes: &[u8]);
}

/// Packs all weights of a model in one pass over their bytes.
///
/// # Errors
/// `Model` for a tensor that is missing, has another shape or dtype or holds NaN or infinity, named;
/// `Interrupted` if `progress` says so.
pub fn load_weights(
    config: &Config,
    source: &(dyn TensorSource + Sync),
    dtype: WeightDtype,
    isa: Isa,
    threads: &Threads,
    progress: Progress<'_>,
) -> Result<Weights> {
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let (q, kv, vocab) = (config.q_width(), config.kv_width(), config.vocab_size);
    let layer = |i: usize, name: &str| format!("model.layers.{i}.{name}.weight");
    // Every shape is checked, and so the size of the whole known, before memory is claimed.
    let shapes = [
        ("self_attn.q_proj", q, hidden),
        ("self_attn.k_proj", kv, hidden),
        ("self_attn.v_proj", kv, hidden),
        ("self_attn.o_proj", hidden, q),
        ("mlp.gate_proj", intermediate, hidden),
        ("mlp.up_proj", intermediate, hidden),
        ("mlp.down_proj", hidden, intermediate),
    ];
    source.tensor("model.embed_tokens.weight", Some(vocab), hidden)?;
    for i in 0..config.num_hidden_layers {
        for (name, rows, cols) in shapes {
            source.tensor(&layer(i, name), Some(rows), cols)?;
        }
    }
    let layer_bytes = dtype.packed_bytes(q + 2 * kv, hidden)
        + dtype.packed_bytes(hidden, q)
        + 2 * dtype.packed_bytes(intermediate, hidden)
        + dtype.packed_bytes(hidden, intermediate);
    let tied = config.tie_word_embeddings;
    let embeddings = if tied { 1 } else { 2 };
    // Random weights have no file that would have to hold them: any size can be asked for.
    let bytes = layer_bytes
        .checked_mul(config.num_hidden_layers)
        .and_then(|bytes| bytes.checked_add(embeddings * dtype.packed_bytes(vocab, hidden)))
        .ok_or_else(|| Error::model("the model is larger than any memory"))?;

    let mut arena = Arena::new(bytes)?;
    let mut pack = |names: &[String], shapes: &[(usize, usize)]| -> Result<Linear> {
        let named = names.iter().zip(shapes);
        let sources = named
            .map(|(name, &(rows, cols))| source.tensor(name, Some(rows), cols))
            .collect::<Result<Vec<_>>>()?;
        let share = arena.used_share();
        let done = |bytes: &[u8]| {
            source.release(bytes);
            if progress(share) { Ok(()) } else { Err(Error::Interrupted) }
        };
        Linear::pack(&mut arena, &sources, dtype, isa, threads, &done).map_err(|e| match e {
            Error::Model(what) => Error::model(format!("{}: {what}", names.join(" and "))),
            other => other,
        })
    };
    let vector = |name: String, len: usize| -> Result<Vec<f32>> {
        let values = source.tensor(&name, None, len)?.to_f32();
        match values.iter().all(|x| x.is_finite()) {
            true => Ok(values),
            false => Err(Error::model(format!("{name} holds NaN or infinity"))),
        }
    };

    let embed_tokens = pack(&["model.embed_tokens.weight".into()], &[(vocab, hidden)])?;
    let mut layers = Vec::new();
    for i in 0..config.num_hidden_layers {
        let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].map(|n| layer(i, n));
        layers.push(LayerWeights {
            input_layernorm: vector(layer(i, "input_layernorm"), hidden)?,
            qkv_proj: pack(&qkv, &[(q, hidden), (kv, hidden), (kv, hidden)])?,
            q_norm: vector(layer(i, "self_attn.q_norm"), config.head_dim)?,
            k_norm: vector(layer(i, "self_attn.k_norm"), config.head_dim)?,
            o_proj: pack(&[layer(i, "self_attn.o_proj")], &[(hidden, q)])?,
            post_attention_layernorm: vector(layer(i, "post_attention_layernorm"), hidden)?,
            gate_proj: pack(&[layer(i, "mlp.gate_proj")], &[(intermediate, hidden)])?,
            up_proj: pack(&[layer(i, "mlp.up_proj")], &[(intermediate, hidden)])?,
            down_proj: pack(&[layer(i, "mlp.down_proj")], &[(hidden, intermediate)])?,
        });
    }
    let lm_head = match tied {
        true => None,
        false => Some(pack(&["lm_head.weight".into()], &[(vocab, hidden)])?),
    };
    let norm = vector("model.norm.weight".into(), hidden)?;
    if !progress(1.0) {
        return Err(Error::Interrupted);
    }
    Ok(Weights { arena, dtype, embed_tokens, layers, norm, lm_head })
}
