//! What the machine can do at most: the ceilings that the benchmark holds its figures against.

use crate::kernels::Isa;
use crate::kernels::isa::lanes::{Kernel, LANES, Lanes};
use crate::kernels::tiles::{RowTile, Tiles};
use crate::threads::Threads;
use std::hint::black_box;
use std::time::Instant;

/// Reads all of `bytes` once, 8 x 64 bytes at a time.
struct ReadAll<'a> {
    bytes: &'a [f32],
}

impl Kernel for ReadAll<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> f32 {
        let mut acc = [l.splat(0.0); 8];
        for lines in self.bytes.chunks_exact(8 * LANES) {
            for (i, acc) in acc.iter_mut().enumerate() {
                // SAFETY: these are 8 x 16 values.
                *acc = l.max(*acc, unsafe { l.load(lines.as_ptr().add(i * LANES)) });
            }
        }
        acc.iter().map(|&v| l.max_lane(v)).sum()
    }
}

/// Operations of one task: a multiple of both numbers of chains, and of those times [`STEPS`].
const OPERATIONS: usize = 2_400_000;
/// Steps along `k` of the int8 dot products' activations, which stay in the first-level cache.
const STEPS: usize = 64;

/// [`OPERATIONS`] int8 dot products, in as many chains as hide the latency and fit in registers.
///
/// As in a matmul's tile, each product takes activations of its own from memory, broadcast once for all
/// weights. They must change from step to step: of constants the compiler would compute the products,
/// three quarters of the work on AVX2 without VNNI, once before the loop.
struct PeakInt8;

impl Kernel for PeakInt8 {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        L::Tiles::ceiling(&(l, &self));
    }
}

impl<L: Lanes> RowTile for (L, &PeakInt8) {
    #[inline(always)]
    fn row_tile<const MR: usize, const NR: usize, const PREFETCH: bool>(&self, _row: usize) -> usize {
        let l = self.0;
        let weights: [[u8; 64]; NR] = black_box(std::array::from_fn(|p| [125 + 7 * p as u8; 64]));
        let activations: [[[i8; 4]; MR]; STEPS] = std::array::from_fn(|i| [[(i % 15) as i8 - 7; 4]; MR]);
        let activations = black_box(&activations);
        // SAFETY: 64 bytes are there.
        let w: [_; NR] = std::array::from_fn(|p| unsafe { l.load_q8_0(weights[p].as_ptr()) });
        let mut dots = [[l.dot_start(0); NR]; MR];
        for _ in 0..OPERATIONS / (MR * NR * STEPS) {
            for step in activations {
                for (dots, a) in dots.iter_mut().zip(step) {
                    for p in 0..NR {
                        // SAFETY: 4 values are there.
                        dots[p] = unsafe { l.dot_q8_0(dots[p], w[p], a.as_ptr()) };
                    }
                }
            }
        }
        black_box(dots.iter().flatten().map(|&v| l.sum(l.to_f32(v))).sum::<f32>());
        MR
    }
}

/// [`OPERATIONS`] fused multiply-adds in registers, each of which needs the one before.
struct PeakF32;

impl Kernel for PeakF32 {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        L::Tiles::ceiling(&(l, &self));
    }
}

impl<L: Lanes> RowTile for (L, &PeakF32) {
    #[inline(always)]
    fn row_tile<const MR: usize, const NR: usize, const PREFETCH: bool>(&self, _row: usize) -> usize {
        let l = self.0;
        let x = l.splat(black_box(0.999_999_9));
        let y = l.splat(black_box(1e-9));
        let mut acc = [[l.splat(0.0); NR]; MR];
        for _ in 0..OPERATIONS / (MR * NR) {
            for acc in acc.as_flattened_mut() {
                *acc = l.mul_add(*acc, x, y);
            }
        }
        black_box(acc.iter().flatten().map(|&v| l.sum(v)).sum::<f32>());
        MR
    }
}

/// Bytes a second of reading `memory` once, on all workers, in parts that they claim as a matmul's
/// tasks are claimed.
pub fn read_bandwidth(isa: Isa, threads: &Threads, memory: &[u8]) -> f64 {
    const PART: usize = 256 << 10;
    // The weights' memory is aligned and padded to 64 bytes: nothing is left over at the ends.
    let (_, words, _) = bytemuck::pod_align_to::<u8, f32>(memory);
    let parts: Vec<_> = words.chunks(PART / 4).collect();
    let started = Instant::now();
    threads.run(parts.len(), &|i| {
        black_box(isa.run(ReadAll { bytes: parts[i] }));
    });
    memory.len() as f64 / started.elapsed().as_secs_f64()
}

/// Multiply-adds a second of int8 dot products, on all workers.
pub fn int8_rate(isa: Isa, threads: &Threads) -> f64 {
    rate(threads, 4 * LANES, &|| isa.run(PeakInt8))
}

/// Multiply-adds a second of f32, on all workers.
pub fn f32_rate(isa: Isa, threads: &Threads) -> f64 {
    rate(threads, LANES, &|| isa.run(PeakF32))
}

fn rate(threads: &Threads, per_operation: usize, work: &(dyn Fn() + Sync)) -> f64 {
    let tasks = 8 * threads.count();
    let started = Instant::now();
    threads.run(tasks, &|_| work());
    (tasks * OPERATIONS * per_operation) as f64 / started.elapsed().as_secs_f64()
}
