//! Counts and time per operation, split into prefill and decode. Off by default; when it is on it
//! costs two clock readings per operation and never allocates.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

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
    /// Rows made ready for a matmul, where no other operation leaves them so.
    Activations,
    OProj,
    /// Both products, SiLU and what `down_proj` reads.
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

/// Shared by a model's backend and its caches.
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

    pub fn set_phase(&self, phase: Phase) {
        self.decode.store(phase == Phase::Decode, Ordering::Relaxed);
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
