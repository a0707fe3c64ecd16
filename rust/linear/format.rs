//! What a format must say, whichever it is.

use super::activations::Activations;
use crate::error::Result;
use crate::kernels::Destination;
use crate::kernels::Isa;
use crate::threads::Threads;
use half::f16;

/// What a format has of its own. Its weights are groups of 16 output rows, whose bytes are in one or two
/// planes: two runs of memory, each holding its part of every group, group after group.
pub(super) trait Format: Sync {
    fn name(&self) -> &'static str;

    fn activations(&self) -> Activations;

    /// Bytes of a group, `[16, k]`, in each plane; a format of one plane has 0 in the other.
    fn group_bytes(&self, k: usize) -> [usize; 2];

    /// Columns that a row of `k` is packed as, those beyond `k` zero.
    fn padded(&self, k: usize) -> usize;

    /// Packs a group: finite values `scratch.wide` `[16][padded(k)]` to its planes. A row whose values
    /// would become infinite is returned.
    fn pack_group(&self, isa: Isa, scratch: &mut Scratch, planes: [&mut [u8]; 2]) -> Result<Option<usize>>;

    /// The product `x[m, k] W^T`; `x` is rows of the format's activations.
    fn matmul(&self, w: Packed<'_>, isa: Isa, threads: &Threads, x: &[f32], out: Destination<'_>);

    /// `silu(gate x) * (up x)` in one pass, from and to rows of the format's activations; `scratch` holds
    /// [`GATED_WORDS`](crate::kernels::gated::GATED_WORDS) for each worker.
    fn gated(
        &self,
        pair: [Packed<'_>; 2],
        isa: Isa,
        threads: &Threads,
        x: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
    );

    /// Row `lane` of the group that the planes of `w` start with, back to f32.
    fn row(&self, w: Packed<'_>, lane: usize, out: &mut [f32]);
}

/// A weight's planes, borrowed from the arena.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    pub planes: [&'a [u8]; 2],
    pub n: usize,
    pub k: usize,
}

/// What packing a group needs.
#[derive(Default)]
pub struct Scratch {
    pub(super) stored: Vec<u8>,  // up to 16 rows as they are stored
    pub(super) wide: Vec<f32>,   // [16][padded k]
    pub(super) quants: Vec<i8>,  // a format's own
    pub(super) scales: Vec<f16>, // likewise
}
