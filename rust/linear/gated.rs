//! The gated pair: what `down_proj` reads, `silu(gate_proj x) * (up_proj x)`.

use super::activations::Activations;
use super::arena::Arena;
use super::weight::Linear;
use crate::kernels::Destination;
use crate::kernels::Isa;
use crate::kernels::gated::GATED_WORDS;
use crate::kernels::swiglu::SwiGlu;
use crate::threads::Threads;

/// Rows that a task of the way over memory takes.
const ROWS_PER_TASK: usize = 4;

/// Two weights `[n, k]` that read the same activations, and what reads their combination.
#[derive(Clone, Copy)]
pub struct GatedPair<'a> {
    pub gate: &'a Linear,
    pub up: &'a Linear,
    /// How the result is left.
    pub reader: Activations,
}

impl GatedPair<'_> {
    /// Whether one pass does it all: kernels exist for two weights of one format that leave the
    /// activations of that format. Other pairs go over memory.
    fn is_fused(&self) -> bool {
        self.gate.dtype == self.up.dtype && self.reader == self.gate.activations()
    }

    /// f32 words of scratch for `m` rows.
    pub fn scratch_words(&self, m: usize, threads: usize) -> usize {
        if self.is_fused() { threads * GATED_WORDS } else { 2 * m * self.gate.n }
    }

    /// `silu(gate x) * (up x)` of rows `x` of the pair's activations, to `out` `[m, n]` as the reader reads
    /// it. `scratch` is of [`GatedPair::scratch_words`].
    pub fn run(
        &self,
        arena: &Arena,
        isa: Isa,
        threads: &Threads,
        x: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let (gate, up, n) = (self.gate, self.up, self.gate.n);
        assert!(up.n == n && up.k == gate.k && up.activations() == gate.activations());
        if self.is_fused() {
            let pair = [gate.packed(arena), up.packed(arena)];
            return gate.dtype.0.gated(pair, isa, threads, x, scratch, out);
        }
        let words = self.reader.words(n);
        let m = out.len() / words;
        let (a, b) = scratch[..2 * m * n].split_at_mut(m * n);
        gate.matmul(arena, isa, threads, x, Destination::Overwrite(a));
        up.matmul(arena, isa, threads, x, Destination::Overwrite(b));
        threads.for_each_row(a, n, ROWS_PER_TASK, |r, gate| {
            isa.run(SwiGlu { gate, up: &b[r * n..(r + 1) * n] });
        });
        threads.for_each_row(out, words, ROWS_PER_TASK, |r, out| {
            self.reader.write(isa, &a[r * n..(r + 1) * n], out);
        });
    }
}
