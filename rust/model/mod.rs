//! Model families. There is one: Qwen3.

pub mod qwen3;
