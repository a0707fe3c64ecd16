//! BF16 and F32 weights: `[ceil(n / 16)][k][16]`, one plane.

use super::activations::Activations;
use super::format::{Format, Packed, Scratch};
use crate::error::Result;
use crate::kernels::Destination;
use crate::kernels::gated::gated_float;
use crate::kernels::matmul_float::matmul_float;
use crate::kernels::{Element, Isa, LANES};
use crate::threads::Threads;
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use half::bf16;
use std::marker::PhantomData;

pub struct Float<T>(pub PhantomData<T>);

/// A float that weights are kept as.
pub trait WeightFloat: Element + Pod {
    const NAME: &'static str;
    /// To nearest, ties to even: F32's largest values become infinite in BF16.
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;
}

impl WeightFloat for bf16 {
    const NAME: &'static str = "bf16";
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

impl WeightFloat for f32 {
    const NAME: &'static str = "f32";
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_f32(self) -> f32 {
        self
    }
}

impl<T: WeightFloat> Format for Float<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn activations(&self) -> Activations {
        Activations::F32
    }

    fn group_bytes(&self, k: usize) -> [usize; 2] {
        [LANES * k * size_of::<T>(), 0]
    }

    fn padded(&self, k: usize) -> usize {
        k
    }

    fn pack_group(&self, _: Isa, scratch: &mut Scratch, [out, _]: [&mut [u8]; 2]) -> Result<Option<usize>> {
        let (wide, k) = (&scratch.wide, scratch.wide.len() / LANES);
        let out = cast_slice_mut::<u8, T>(out);
        for (i, out) in out.iter_mut().enumerate() {
            *out = T::from_f32(wide[i % LANES * k + i / LANES]);
        }
        Ok(out.iter().position(|x| !x.to_f32().is_finite()).map(|i| i % LANES))
    }

    fn matmul(&self, w: Packed<'_>, isa: Isa, threads: &Threads, x: &[f32], out: Destination<'_>) {
        matmul_float::<T>(isa, threads, x, cast_slice(w.planes[0]), (w.k, w.n), out);
    }

    fn gated(
        &self,
        pair: [Packed<'_>; 2],
        isa: Isa,
        threads: &Threads,
        x: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let weights = pair.map(|w| cast_slice::<u8, T>(w.planes[0]));
        gated_float(isa, threads, x, weights, (pair[0].k, pair[0].n), scratch, out);
    }

    fn row(&self, w: Packed<'_>, lane: usize, out: &mut [f32]) {
        let group = cast_slice::<u8, T>(w.planes[0]);
        for (k, out) in out.iter_mut().enumerate() {
            *out = group[k * LANES + lane].to_f32();
        }
    }
}
