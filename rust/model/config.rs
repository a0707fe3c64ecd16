//! `config.json`, as transformers writes it: the old spelling (`rope_theta`, `torch_dtype`) and that
//! of transformers 5 (`rope_parameters`, `dtype`).

use crate::cache::KvShape;
use crate::error::{Error, Result};
use crate::kernels::attention::MAX_HEAD_DIM;
use crate::loader::read_json;
use serde_json::{Map, Value};
use std::path::Path;

/// The shape of a Qwen3 model, checked. Field names are the checkpoint's.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
}

/// No released model comes near it, and products of a few such sizes fit in 64 bits.
const LARGEST_SIZE: usize = 1 << 24;

impl Config {
    /// Reads the `config.json` of a checkpoint directory.
    ///
    /// # Errors
    /// `File` if it cannot be read, `Model` for what is wrong; both name the file, and the field.
    pub fn open(directory: &Path) -> Result<Self> {
        let text = read_json(&directory.join("config.json"))?;
        Self::from_json(&text).map_err(|error| match error {
            Error::Model(what) => Error::model(format!("{}: {what}", directory.display())),
            other => other,
        })
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// `Model`, naming the field.
    pub fn from_json(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)
            .map_err(|e| Error::model(format!("config.json is not valid JSON: {e}")))?;
        let Value::Object(config) = value else {
            return Err(Error::model("config.json: an object is expected"));
        };
        check_architecture(&config)?;
        let hidden_size = size(&config, "hidden_size", None)?;
        let num_attention_heads = size(&config, "num_attention_heads", None)?;
        let num_key_value_heads = size(&config, "num_key_value_heads", Some(num_attention_heads))?;
        let parsed = Self {
            vocab_size: size(&config, "vocab_size", None)?,
            hidden_size,
            intermediate_size: size(&config, "intermediate_size", None)?,
            num_hidden_layers: size(&config, "num_hidden_layers", None)?,
            num_attention_heads,
            num_key_value_heads,
            // The 0.6B model's heads are not hidden_size / num_attention_heads wide.
            head_dim: size(&config, "head_dim", Some(hidden_size / num_attention_heads))?,
            max_position_embeddings: size(&config, "max_position_embeddings", Some(32768))?,
            rms_norm_eps: number(&config, "rms_norm_eps", 1e-6)? as f32,
            rope_theta: rope_theta(&config)?,
            tie_word_embeddings: flag(&config, "tie_word_embeddings")?,
        };
        parsed.check()?;
        Ok(parsed)
    }

    fn check(&self) -> Result<()> {
        let wrong = |message: String| Err(Error::model(format!("config.json: {message}")));
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if heads % kv_heads != 0 {
            return wrong(format!(
                "num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
            ));
        }
        if !self.head_dim.is_multiple_of(2) || self.head_dim == 0 || self.head_dim > MAX_HEAD_DIM {
            return wrong(format!("head_dim must be even and 2 to {MAX_HEAD_DIM}, not {}", self.head_dim));
        }
        if self.q_width() > LARGEST_SIZE {
            return wrong(format!("num_attention_heads x head_dim is more than {LARGEST_SIZE}"));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return wrong(format!("rms_norm_eps must be between 0 and 1, not {}", self.rms_norm_eps));
        }
        if !(self.rope_theta >= 1.0 && self.rope_theta.is_finite()) {
            return wrong(format!("rope_theta must be at least 1, not {}", self.rope_theta));
        }
        Ok(())
    }

    /// The fields that logits depend on, as text. A field that is added later is written only where it is
    /// not what a model without it has, so that the text of today's models stays.
    pub fn identity(&self) -> String {
        let Self { vocab_size, hidden_size, intermediate_size, num_hidden_layers, .. } = self;
        let Self { num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, rope_theta, .. } = self;
        format!(
            "vocab_size={vocab_size} hidden_size={hidden_size} intermediate_size={intermediate_size} \
             num_hidden_layers={num_hidden_layers} num_attention_heads={num_attention_heads} \
             num_key_value_heads={num_key_value_heads} head_dim={head_dim} rms_norm_eps={rms_norm_eps:e} \
             rope_theta={rope_theta:e} tie_word_embeddings={}",
            self.tie_word_embeddings
        )
    }

    pub fn kv_shape(&self) -> KvShape {
        KvShape {
            num_layers: self.num_hidden_layers,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
        }
    }

    /// Columns of all query heads.
    pub fn q_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Columns of all key (or value) heads.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }
}

fn check_architecture(config: &Map<String, Value>) -> Result<()> {
    let unsupported = |what: String| Err(Error::model(format!("config.json: {what} is not supported")));
    let model_type = config.get("model_type").and_then(Value::as_str);
    let architecture = config.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
    match (architecture, model_type) {
        (Some("Qwen3ForCausalLM"), _) | (None, Some("qwen3")) => {}
        (Some(name), _) => {
            return unsupported(format!("architecture {name} (Qwen3ForCausalLM is)"));
        }
        (None, name) => {
            let name = name.unwrap_or("(none)");
            return unsupported(format!("model_type {name} (qwen3 is)"));
        }
    }
    match config.get("hidden_act").and_then(Value::as_str) {
        None | Some("silu") => {}
        Some(name) => return unsupported(format!("hidden_act {name}")),
    }
    for name in ["attention_bias", "use_sliding_window"] {
        if flag(config, name)? {
            return unsupported(format!("{name} = true"));
        }
    }
    if let Some(Value::Array(types)) = config.get("layer_types") {
        let other = types.iter().find(|t| t.as_str() != Some("full_attention"));
        if let Some(other) = other {
            return unsupported(format!("a layer of type {other}"));
        }
    }
    if config.get("quantization_config").is_some_and(|q| !q.is_null()) {
        return unsupported("a quantized checkpoint (quantization_config)".into());
    }
    Ok(())
}

/// `rope_parameters` (transformers 5), else `rope_theta` and `rope_scaling`.
fn rope_theta(config: &Map<String, Value>) -> Result<f64> {
    let parameters = |name| match config.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(parameters)) => Ok(Some(parameters)),
        Some(_) => Err(Error::model(format!("config.json: {name} must be an object"))),
    };
    let new = parameters("rope_parameters")?;
    for parameters in [new, parameters("rope_scaling")?].into_iter().flatten() {
        let kind = parameters.get("rope_type").or_else(|| parameters.get("type"));
        match kind.map(|kind| kind.as_str().unwrap_or("(not a string)")) {
            None | Some("default") => {}
            Some(kind) => {
                return Err(Error::model(format!(
                    "config.json: RoPE type {kind} is not supported (default is)"
                )));
            }
        }
    }
    match new {
        Some(parameters) if parameters.contains_key("rope_theta") => {
            number(parameters, "rope_theta", 10_000.0)
        }
        _ => number(config, "rope_theta", 10_000.0),
    }
}

fn size(config: &Map<String, Value>, name: &str, default: Option<usize>) -> Result<usize> {
    let wrong = |found: &dyn std::fmt::Display| {
        Err(Error::model(format!(
            "config.json: {name} must be a whole number from 1 to {LARGEST_SIZE}, not {found}"
        )))
    };
    match (config.get(name), default) {
        (None | Some(Value::Null), Some(default)) => Ok(default),
        (None | Some(Value::Null), None) => Err(Error::model(format!("config.json: {name} is missing"))),
        (Some(value), _) => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=LARGEST_SIZE).contains(&n) => Ok(n),
            _ => wrong(value),
        },
    }
}

fn number(config: &Map<String, Value>, name: &str, default: f64) -> Result<f64> {
    match config.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(value) => value
            .as_f64()
            .ok_or_else(|| Error::model(format!("config.json: {name} must be a number, not {value}"))),
    }
}

fn flag(config: &Map<String, Value>, name: &str) -> Result<bool> {
    match config.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(value) => Err(Error::model(format!("config.json: {name} must be true or false, not {value}"))),
    }
}
