//! The kernels: safe to call, chosen at run time.
//!
//! [`Isa`] holds the instruction set that was found (or forced) and runs any [`Kernel`] on it. The
//! kernels themselves are in `ops`, written once over 16 lanes; the instruction sets in `isa` are those
//! lanes; `tiles` holds the choices of tile and prefetch, `split` shares a matmul out to threads.
#![allow(unsafe_code)] // intrinsics and unchecked rows: each block says why it is sound
#![allow(clippy::needless_range_loop)] // one index runs over registers and memory together

mod isa;
mod ops;
mod split;
mod tiles;

pub use isa::lanes::{Element, Kernel, LANES, Lanes};
pub use isa::{ISA_VARIABLE, Isa};
pub use ops::*;
pub use split::Destination;
