//! The weights of a model: one list of names and shapes, which checking, sizing, packing and random weights
//! all read.

use super::config::Config;
use crate::error::{Error, Result};
use crate::kernels::Isa;
use crate::linear::{Arena, GatedPair, Linear, Packer, WeightDtype};
use crate::loader::{RandomWeights, TensorSource};
use crate::threads::Threads;

/// What a layer has, named as in the checkpoint: specs before it is loaded, then the weights.
pub struct Layer<L, V> {
    pub input_layernorm: V,          // [hidden]
    pub qkv_proj: L,                 // q_proj, k_proj, v_proj stacked: [q + 2 kv, hidden]
    pub q_norm: V,                   // [head_dim]
    pub k_norm: V,                   // [head_dim]
    pub o_proj: L,                   // [hidden, q]
    pub post_attention_layernorm: V, // [hidden]
    pub gate_proj: L,                // [intermediate, hidden]
    pub up_proj: L,                  // [intermediate, hidden]
    pub down_proj: L,                // [hidden, intermediate]
}

pub type LayerWeights = Layer<Linear, Vec<f32>>;

/// Tensors `[rows, k]` of a checkpoint, one below the other, that are packed as one weight.
struct LinearSpec {
    parts: Vec<(String, usize)>,
    k: usize,
}

/// A tensor `[len]`.
struct VectorSpec {
    name: String,
    len: usize,
}

fn embed_tokens(config: &Config) -> LinearSpec {
    let parts = vec![("model.embed_tokens.weight".into(), config.vocab_size)];
    LinearSpec { parts, k: config.hidden_size }
}

fn lm_head(config: &Config) -> Option<LinearSpec> {
    let parts = vec![("lm_head.weight".into(), config.vocab_size)];
    (!config.tie_word_embeddings).then_some(LinearSpec { parts, k: config.hidden_size })
}

fn norm(config: &Config) -> VectorSpec {
    VectorSpec { name: "model.norm.weight".into(), len: config.hidden_size }
}

fn layer(config: &Config, i: usize) -> Layer<LinearSpec, VectorSpec> {
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.q_width(), config.kv_width());
    let full = |name: &str| format!("model.layers.{i}.{name}.weight");
    let vector = |name, len| VectorSpec { name: full(name), len };
    let stacked = |parts: &[(&str, usize)], k| {
        let parts = parts.iter().map(|&(name, rows)| (full(name), rows)).collect();
        LinearSpec { parts, k }
    };
    let linear = |name, rows, k| stacked(&[(name, rows)], k);
    Layer {
        input_layernorm: vector("input_layernorm", hidden),
        qkv_proj: stacked(
            &[("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
            hidden,
        ),
        q_norm: vector("self_attn.q_norm", config.head_dim),
        k_norm: vector("self_attn.k_norm", config.head_dim),
        o_proj: linear("self_attn.o_proj", hidden, q),
        post_attention_layernorm: vector("post_attention_layernorm", hidden),
        gate_proj: linear("mlp.gate_proj", intermediate, hidden),
        up_proj: linear("mlp.up_proj", intermediate, hidden),
        down_proj: linear("mlp.down_proj", hidden, intermediate),
    }
}

impl<L, V> Layer<L, V> {
    /// Every weight of the layer, in the order in which they are packed.
    fn try_map<M, W>(
        self,
        linear: &mut impl FnMut(L) -> Result<M>,
        vector: &mut impl FnMut(V) -> Result<W>,
    ) -> Result<Layer<M, W>> {
        Ok(Layer {
            input_layernorm: vector(self.input_layernorm)?,
            qkv_proj: linear(self.qkv_proj)?,
            q_norm: vector(self.q_norm)?,
            k_norm: vector(self.k_norm)?,
            o_proj: linear(self.o_proj)?,
            post_attention_layernorm: vector(self.post_attention_layernorm)?,
            gate_proj: linear(self.gate_proj)?,
            up_proj: linear(self.up_proj)?,
            down_proj: linear(self.down_proj)?,
        })
    }
}

/// Random weights for a model of this shape.
///
/// # Errors
/// `Memory` if it cannot be had.
pub fn random_weights(config: &Config, seed: u64) -> Result<RandomWeights> {
    let (mut matrix, mut longest) = (0, 0);
    let mut linear = |spec: LinearSpec| {
        matrix = spec.parts.iter().map(|(_, rows)| rows * spec.k).fold(matrix, usize::max);
        Ok(())
    };
    let mut vector = |spec: VectorSpec| {
        longest = spec.len.max(longest);
        Ok(())
    };
    linear(embed_tokens(config))?;
    layer(config, 0).try_map(&mut linear, &mut vector)?; // all layers are alike
    lm_head(config).map_or(Ok(()), &mut linear)?;
    vector(norm(config))?;
    RandomWeights::new(matrix, longest, seed)
}

/// All weights of a model; the packed ones are in `arena`.
pub struct Weights {
    pub arena: Arena,
    pub embed_tokens: Linear, // [vocab, hidden]
    pub layers: Vec<LayerWeights>,
    pub norm: Vec<f32>,          // [hidden]
    pub lm_head: Option<Linear>, // [vocab, hidden]; none: tied to embed_tokens
}

/// Told the share that is done, 0 to 1; `false` stops the load.
pub type Progress<'a> = &'a dyn Fn(f64) -> bool;

impl Weights {
    /// Checks all names, shapes and dtypes, then packs all weights in one pass over their bytes. `dtype`
    /// says how each is kept, by its name (of stacked ones, by the first's).
    ///
    /// # Errors
    /// `Model` for a tensor that is missing, has another shape or dtype, or holds a value that is NaN,
    /// infinite or too large for its dtype, named; `File` if one cannot be read; `Memory`; `Interrupted` if
    /// `progress` says so.
    pub fn load(
        config: &Config,
        source: &dyn TensorSource,
        dtype: &dyn Fn(&str) -> WeightDtype,
        isa: Isa,
        threads: &Threads,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let go_on = |share| if progress(share) { Ok(()) } else { Err(Error::Interrupted) };
        let bytes = check(config, source, dtype, &go_on)?;
        let mut packer = Packer::new(bytes, isa, threads)?;
        let mut pack = |spec: LinearSpec| -> Result<Linear> {
            let tensors = spec
                .parts
                .iter()
                .map(|(name, rows)| source.tensor(name, &[*rows, spec.k]))
                .collect::<Result<Vec<_>>>()?;
            packer.pack(&tensors, dtype(&spec.parts[0].0), &go_on)
        };
        let mut vector = |spec: VectorSpec| -> Result<Vec<f32>> {
            let tensor = source.tensor(&spec.name, &[spec.len])?;
            let values = tensor.to_f32()?;
            match values.iter().all(|x| x.is_finite()) {
                true => Ok(values),
                false => Err(tensor.error("holds NaN or infinity")),
            }
        };
        let embed_tokens = pack(embed_tokens(config))?;
        let mut layers = Vec::new();
        let count = config.num_hidden_layers;
        layers.try_reserve_exact(count).map_err(|_| Error::Memory(count * size_of::<LayerWeights>()))?;
        for i in 0..count {
            layers.push(layer(config, i).try_map(&mut pack, &mut vector)?);
        }
        let lm_head = lm_head(config).map(&mut pack).transpose()?;
        let norm = vector(norm(config))?;
        go_on(1.0)?;
        Ok(Self { arena: packer.finish(), embed_tokens, layers, norm, lm_head })
    }

    /// Bytes of the packed weights.
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// How the layers' weights are kept, for display: the first one's.
    pub fn dtype(&self) -> WeightDtype {
        self.layers.first().map_or(self.embed_tokens.dtype(), |layer| layer.qkv_proj.dtype())
    }

    /// Every vector, layer by layer; `norm` is the last.
    pub fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        self.layers.iter().flat_map(LayerWeights::vectors).chain([&self.norm])
    }

    /// What gives the logits: the embedding's rows if it is tied.
    pub fn lm_head(&self) -> &Linear {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }

    /// f32 words of a row of activations for the widest of the matmuls but `down_proj`.
    pub fn operand_words(&self) -> usize {
        let layers = self.layers.iter().flat_map(|l| [&l.qkv_proj, &l.o_proj, &l.gate_proj]);
        layers.chain([self.lm_head()]).map(Linear::activation_words).max().unwrap_or(0)
    }

    /// f32 words of a row of activations for `down_proj`, the widest of them.
    pub fn activated_words(&self) -> usize {
        self.layers.iter().map(|layer| layer.down_proj.activation_words()).max().unwrap_or(0)
    }

    /// f32 words of scratch for the gated pair of any layer, of `m` rows.
    pub fn gated_words(&self, m: usize, threads: usize) -> usize {
        self.layers.iter().map(|layer| layer.gated().scratch_words(m, threads)).max().unwrap_or(0)
    }
}

impl LayerWeights {
    fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        // Without `..`, so that a field that is added has to be listed or left out here.
        let Self {
            input_layernorm,
            qkv_proj: _,
            q_norm,
            k_norm,
            o_proj: _,
            post_attention_layernorm,
            gate_proj: _,
            up_proj: _,
            down_proj: _,
        } = self;
        [input_layernorm, q_norm, k_norm, post_attention_layernorm].into_iter()
    }

    pub fn gated(&self) -> GatedPair<'_> {
        let (gate, up) = (&self.gate_proj, &self.up_proj);
        GatedPair { gate, up, reader: self.down_proj.activations() }
    }
}

/// Looks at every tensor, and gives the size of all once packed.
fn check(
    config: &Config,
    source: &dyn TensorSource,
    dtype: &dyn Fn(&str) -> WeightDtype,
    go_on: &dyn Fn(f64) -> Result<()>,
) -> Result<usize> {
    let mut bytes = 0usize;
    let mut linear = |spec: LinearSpec| {
        go_on(0.0)?;
        for (name, rows) in &spec.parts {
            source.tensor(name, &[*rows, spec.k])?;
        }
        let rows = spec.parts.iter().map(|(_, rows)| rows).sum();
        let packed = dtype(&spec.parts[0].0).packed_bytes(rows, spec.k);
        // Random weights have no file that would have to hold them: any size can be asked for.
        bytes = packed
            .and_then(|packed| bytes.checked_add(packed))
            .ok_or_else(|| Error::model("the model is larger than any memory"))?;
        Ok(())
    };
    let mut vector = |spec: VectorSpec| source.tensor(&spec.name, &[spec.len]).map(drop);
    linear(embed_tokens(config))?;
    // One layer's names are made at a time: a config may ask for any number of them.
    for i in 0..config.num_hidden_layers {
        let layer = layer(config, i);
        let [gate, up] = [&layer.gate_proj, &layer.up_proj].map(|spec| &spec.parts[0].0);
        if dtype(gate).activations() != dtype(up).activations() {
            return Err(Error::model(format!(
                "{gate} as {:?} and {up} as {:?} read different activations; keep both alike",
                dtype(gate),
                dtype(up)
            )));
        }
        layer.try_map(&mut linear, &mut vector)?;
    }
    lm_head(config).map_or(Ok(()), &mut linear)?;
    vector(norm(config))?;
    Ok(bytes)
}
