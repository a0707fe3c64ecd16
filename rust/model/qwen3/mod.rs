//! Qwen3, dense, any size.

mod attention;
mod config;
mod forward;
mod mlp;
mod rope;

pub use config::Qwen3Config;
pub use forward::{Logits, Qwen3, zeros};
pub use rope::Rope;
