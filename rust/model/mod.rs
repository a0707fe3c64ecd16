//! The forward pass: a checkpoint's config, its weights, and one loop over the layers.

mod attention;
mod config;
mod mlp;
mod pass;
mod rope;
mod weights;

pub use config::Config;
pub use pass::{Logits, Model, zeros};
pub use rope::Rope;
pub use weights::{LayerWeights, Progress, Weights, random_weights};
