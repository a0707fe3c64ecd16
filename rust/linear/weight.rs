//! A weight of a linear layer, in one of the formats that are listed here.

use super::activations::Activations;
use super::arena::{self, Arena};
use super::float::Float;
use super::format::{Format, Packed};
use super::quantized::Quantized;
use crate::error::{Error, Result};
use crate::kernels::{Destination, Isa, LANES, q8_0};
use crate::threads::Threads;
use half::bf16;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

/// How a weight is kept: one of the formats.
#[derive(Clone, Copy)]
pub struct WeightDtype(pub(super) &'static dyn Format);

impl WeightDtype {
    pub const Q8_0: Self = Self(&Quantized::<q8_0::Q8_0>(PhantomData));
    pub const BF16: Self = Self(&Float::<bf16>(PhantomData));
    pub const F32: Self = Self(&Float::<f32>(PhantomData));
    /// All of them, the default first.
    pub const ALL: &[Self] = &[Self::Q8_0, Self::BF16, Self::F32];

    /// # Errors
    /// `Argument`, with all names.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|dtype| dtype.name()).collect();
            let (last, others) = (names[names.len() - 1], names[..names.len() - 1].join(", "));
            Error::argument(format!("dtype must be {others} or {last}, not {name:?}"))
        })
    }

    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// What a matmul with such a weight reads.
    pub fn activations(self) -> Activations {
        self.0.activations()
    }

    /// Bytes of `[n, k]` weights once packed; `None` if no number holds it.
    pub fn packed_bytes(self, n: usize, k: usize) -> Option<usize> {
        let groups = n.div_ceil(LANES);
        let plane = |bytes: usize| arena::aligned(groups.checked_mul(bytes)?);
        let [first, second] = self.0.group_bytes(k);
        plane(first)?.checked_add(plane(second)?)
    }
}

impl PartialEq for WeightDtype {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for WeightDtype {}

impl fmt::Debug for WeightDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name().to_uppercase())
    }
}

/// Weights `[n, k]` of a linear layer; rows beyond `n` that fill the last group are zeros.
pub struct Linear {
    pub n: usize,
    pub k: usize,
    pub(super) dtype: WeightDtype,
    pub(super) planes: [Range<usize>; 2], // in the arena
}

impl Linear {
    pub fn dtype(&self) -> WeightDtype {
        self.dtype
    }

    /// What its matmul reads.
    pub fn activations(&self) -> Activations {
        self.dtype.activations()
    }

    /// f32 words of a row of `k` activations as its matmul reads it.
    pub fn activation_words(&self) -> usize {
        self.activations().words(self.k)
    }

    pub(super) fn packed<'a>(&self, arena: &'a Arena) -> Packed<'a> {
        let planes = [arena.slice(&self.planes[0]), arena.slice(&self.planes[1])];
        Packed { planes, n: self.n, k: self.k }
    }

    /// The product `x[m, k] W^T`; `x` is rows of [`Linear::activations`].
    pub fn matmul(&self, arena: &Arena, isa: Isa, threads: &Threads, x: &[f32], out: Destination<'_>) {
        self.dtype.0.matmul(self.packed(arena), isa, threads, x, out);
    }

    /// Row `r`, back to f32: what an embedding look-up reads.
    pub fn row(&self, arena: &Arena, r: usize, out: &mut [f32]) {
        assert!(r < self.n && out.len() == self.k);
        let mut w = self.packed(arena);
        for (plane, bytes) in w.planes.iter_mut().zip(self.dtype.0.group_bytes(self.k)) {
            *plane = &plane[r / LANES * bytes..];
        }
        self.dtype.0.row(w, r % LANES, out);
    }
}
