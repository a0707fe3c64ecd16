//! What a forward pass runs on: an instruction set, a set of workers, and counters.
//!
//! Whatever the first two are, the results are the same bits; the counters tell what each operation took.

use crate::error::Result;
use crate::kernels::Isa;
use crate::threads::Threads;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

pub struct Backend {
    name: &'static str,
    pub isa: Isa,
    pub threads: Threads,
    /// Shared with the caches that count their own operations.
    pub profiler: Arc<Profiler>,
}

impl Backend {
    /// The portable kernels on one thread.
    pub fn scalar() -> Result<Self> {
        Ok(Self { name: "scalar", ..Self::simd(Isa::PORTABLE, 1)? })
    }

    /// The kernels of an instruction set, on `threads` workers.
    ///
    /// # Errors
    /// As [`Threads::new`].
    pub fn simd(isa: Isa, threads: usize) -> Result<Self> {
        Ok(Self { name: "simd", isa, threads: Threads::new(threads)?, profiler: Arc::default() })
    }

    /// The name on the command line and in the metrics.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

/// The operations of a forward pass, in data-flow order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Embed,
    RmsNorm,
    QkvProj,
    QkNormRope,
    KvPush,
    /// A cache's growth by copying: two calls per layer and step in the concat cache, none in others.
    ConcatDim0,
    /// A copy of a layer's cache, for a cache that cannot lend.
    Materialize,
    Attention,
    /// Quantizing (or copying) the rows that `o_proj` reads; elsewhere the operation before does it.
    Activations,
    OProj,
    /// Both products, SiLU and the activations that `down_proj` reads.
    GateUpProj,
    DownProj,
    LmHead,
}

const OPS: [(Op, &str); 13] = [
    (Op::Embed, "embed"),
    (Op::RmsNorm, "rms_norm"),
    (Op::QkvProj, "qkv_proj"),
    (Op::QkNormRope, "qk_norm_rope"),
    (Op::KvPush, "kv_push"),
    (Op::ConcatDim0, "concat_dim0"),
    (Op::Materialize, "materialize"),
    (Op::Attention, "attention"),
    (Op::Activations, "activations"),
    (Op::OProj, "o_proj"),
    (Op::GateUpProj, "gate_up_proj"),
    (Op::DownProj, "down_proj"),
    (Op::LmHead, "lm_head"),
];

impl Op {
    /// The name in the table of `--trace-ops`.
    pub fn name(self) -> &'static str {
        OPS[self as usize].1
    }
}

/// A pass with rows of a prompt is a prefill; one of decode steps alone is a decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Prefill,
    Decode,
}

/// What one operation took in one phase.
#[derive(Clone, Copy, Debug)]
pub struct OpStats {
    pub op: &'static str,
    pub calls: u64,
    pub nanoseconds: u64,
}

#[derive(Default)]
struct Counter {
    calls: AtomicU64,
    nanoseconds: AtomicU64,
}

/// Counts and time per operation, split into prefill and decode. Off by default; when it is on it costs
/// two clock readings per operation and never allocates.
#[derive(Default)]
pub struct Profiler {
    enabled: AtomicBool,
    decode: AtomicBool,
    counters: [[Counter; OPS.len()]; 2], // [prefill, decode][op]
}

impl Profiler {
    pub fn enable(&self, enabled: bool) {
        self.enabled.store(enabled, Ordering::Relaxed);
    }

    /// What operations are booked as from now on; returns what it was. Only the pass whose turn it is calls
    /// this.
    pub fn set_phase(&self, phase: Phase) -> Phase {
        match self.decode.swap(phase == Phase::Decode, Ordering::Relaxed) {
            true => Phase::Decode,
            false => Phase::Prefill,
        }
    }

    /// Runs `f`, counted as `op`.
    #[inline]
    pub fn time<T>(&self, op: Op, f: impl FnOnce() -> T) -> T {
        if !self.enabled.load(Ordering::Relaxed) {
            return f();
        }
        let started = Instant::now();
        let result = f();
        let phase = usize::from(self.decode.load(Ordering::Relaxed));
        let counter = &self.counters[phase][op as usize];
        counter.calls.fetch_add(1, Ordering::Relaxed);
        let nanoseconds = started.elapsed().as_nanos() as u64;
        counter.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        result
    }

    /// All operations of a phase, in data-flow order.
    pub fn stats(&self, phase: Phase) -> Vec<OpStats> {
        let counters = &self.counters[usize::from(phase == Phase::Decode)];
        OPS.iter()
            .zip(counters)
            .map(|(&(_, op), counter)| OpStats {
                op,
                calls: counter.calls.load(Ordering::Relaxed),
                nanoseconds: counter.nanoseconds.load(Ordering::Relaxed),
            })
            .collect()
    }

    pub fn reset(&self) {
        for counter in self.counters.iter().flatten() {
            counter.calls.store(0, Ordering::Relaxed);
            counter.nanoseconds.store(0, Ordering::Relaxed);
        }
    }
}
