//! A loaded model: its config, its weights, and the passes that run it.

mod attention;
mod config;
mod context;
mod layer;
mod mlp;
#[allow(clippy::module_inception)] // the folder's own idea
mod model;
mod pass;
mod rope;
mod scratch;
mod sequence;
mod snapshot;
mod turns;
mod weights;

pub use config::Config;
pub use model::{Model, PREFILL_ROWS};
pub use rope::Rope;
pub use sequence::{Logits, Sequence};
pub use turns::Interrupt;
pub use weights::{LayerWeights, Progress, Weights, random_weights};
