//! Attention for many queries of one sequence, blocked so that keys and values are read once per
//! block of queries.
//!
//! Bit for bit what `AttentionRow` does for each query alone. The keys of a chunk are transposed into
//! scratch, so that a vector holds one element of 16 positions; the 16 lanes of a query's dot product
//! then are 16 accumulators one after another, and folding them by halves is plain addition. V is
//! accumulated position by position for several queries at a time.

use super::attention::{AttentionRow, CHUNK, KvHead, LentHead, MergeState, partial_len};
use super::softmax::softmax;
use crate::kernels::Isa;
use crate::kernels::isa::lanes::{Element, Kernel, LANES, Lanes};
use crate::kernels::tiles::{QueryTile, Tiles};
use crate::threads::{Disjoint, Threads};
use half::f16;
use std::ops::Range;

/// The most query vectors (rows x heads of a group) in a block: a multiple of all tile heights, enough
/// that transposing the keys costs little beside them, and few enough for the second-level cache.
const BLOCK_QUERIES: usize = 288;
/// The height of the tile for what whole tiles leave: a chunk of a prompt may have few queries.
const REST: usize = 4;
/// Blocks that a worker should find: a few, so that none ends long after the others.
const BLOCKS_PER_WORKER: usize = 4;

/// The tree in which 16 lanes are folded by halves: ((0 + 8) + (4 + 12)) + ((2 + 10) + (6 + 14)), and
/// the same of the odd lanes.
const FOLD_ORDER: [[[usize; 4]; 2]; 2] = [[[0, 8, 4, 12], [2, 10, 6, 14]], [[1, 9, 5, 13], [3, 11, 7, 15]]];

/// The queries of one sequence.
#[derive(Clone, Copy)]
pub struct PrefillQueries<'a> {
    pub q: &'a [f32], // row r at r * stride: [num_attention_heads * head_dim]
    pub stride: usize,
    pub rows: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    /// Rows in the cache before the first query's own: query `r` sees positions `0..=past + r`.
    pub past: usize,
    pub scale: f32,
}

/// Whether there is a tile for this width (that of all released models, and half) and so many query heads
/// of a KV head.
fn has_tile(head_dim: usize, group: usize) -> bool {
    (head_dim == 128 || head_dim == 64) && group <= BLOCK_QUERIES
}

/// f32 words of scratch that each worker needs.
pub fn prefill_scratch_words(head_dim: usize, group: usize) -> usize {
    if has_tile(head_dim, group) { Buffers::sizes(BLOCK_QUERIES, head_dim).iter().sum() } else { 0 }
}

/// `out[rows, heads * head_dim]`: causal attention of all queries of one sequence; `lent` gives its KV
/// heads, `scratch` holds [`prefill_scratch_words`] for each worker.
pub fn attention_prefill<'a>(
    isa: Isa,
    threads: &Threads,
    queries: PrefillQueries<'_>,
    lent: &(impl Fn(usize) -> LentHead<'a> + Sync),
    scratch: &mut [f32],
    out: &mut [f32],
) {
    let n = queries;
    let group = n.num_attention_heads / n.num_key_value_heads;
    let width = n.num_attention_heads * n.head_dim;
    assert!(n.rows > 0 && n.q.len() >= (n.rows - 1) * n.stride + width && out.len() == n.rows * width);
    if !has_tile(n.head_dim, group) {
        each_query_alone(isa, threads, n, lent, out);
        return;
    }
    let even = n.rows * n.num_key_value_heads / (BLOCKS_PER_WORKER * threads.count());
    let rows_per_block = even.clamp((BLOCK_QUERIES / 6 / group).max(1), BLOCK_QUERIES / group);
    let blocks = n.rows.div_ceil(rows_per_block);
    let words = prefill_scratch_words(n.head_dim, group);
    let out = Disjoint::new(out);
    threads.run_with(scratch, words, blocks * n.num_key_value_heads, &|task, scratch| {
        // The last blocks see the most positions: they go first, so that no worker ends alone.
        let block = blocks - 1 - task / n.num_key_value_heads;
        let kv_head = task % n.num_key_value_heads;
        let rows = block * rows_per_block..n.rows.min((block + 1) * rows_per_block);
        match lent(kv_head) {
            LentHead::F32(kv) => isa.run(Block { queries: n, group, kv_head, rows, kv, out, scratch }),
            LentHead::F16(kv) => isa.run(Block { queries: n, group, kv_head, rows, kv, out, scratch }),
        }
    });
}

/// For the widths that have no tile: query by query, as decode does it.
fn each_query_alone<'a>(
    isa: Isa,
    threads: &Threads,
    n: PrefillQueries<'_>,
    lent: &(impl Fn(usize) -> LentHead<'a> + Sync),
    out: &mut [f32],
) {
    let group_width = n.num_attention_heads / n.num_key_value_heads * n.head_dim;
    threads.for_each_row(out, group_width, 1, |i, out| {
        let (row, kv_head) = (i / n.num_key_value_heads, i % n.num_key_value_heads);
        let q = &n.q[row * n.stride + kv_head * group_width..][..group_width];
        let (head_dim, scale, context) = (n.head_dim, n.scale, n.past + row + 1);
        match lent(kv_head) {
            LentHead::F32(kv) => isa.run(AttentionRow::<f32> { q, head_dim, kv, context, scale, out }),
            LentHead::F16(kv) => isa.run(AttentionRow::<f16> { q, head_dim, kv, context, scale, out }),
        }
    });
}

struct Block<'a, T> {
    queries: PrefillQueries<'a>,
    group: usize,
    kv_head: usize,
    rows: Range<usize>,
    kv: KvHead<'a, T>,
    out: Disjoint<'a, f32>, // [rows, num_attention_heads * head_dim]
    scratch: &'a mut [f32],
}

impl<T: Element> Kernel for Block<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        L::Tiles::prefill_attention((l, self));
    }
}

impl<L: Lanes, T: Element> QueryTile for (L, Block<'_, T>) {
    #[inline(always)]
    fn query_tile<const M: usize, const N: usize>(self) {
        let (l, block) = self;
        match block.queries.head_dim {
            128 => block.attend::<L, 8, M, N>(l),
            _ => block.attend::<L, 4, M, N>(l),
        }
    }
}

/// What a block works in.
struct Buffers<'a> {
    q: &'a mut [f32],        // [queries][head_dim]
    keys: &'a mut [f32],     // [CHUNK / 16][head_dim][16]
    values: &'a mut [f32],   // [head_dim / 16 N][CHUNK][16 N]
    scores: &'a mut [f32],   // [queries][CHUNK]
    partials: &'a mut [f32], // [queries][head_dim + 2]
    sums: &'a mut [f32],     // [queries][head_dim]
}

impl<'a> Buffers<'a> {
    /// f32 words of each, for so many query vectors.
    fn sizes(queries: usize, head_dim: usize) -> [usize; 6] {
        [
            queries * head_dim,
            CHUNK * head_dim,
            CHUNK * head_dim,
            queries * CHUNK,
            queries * partial_len(head_dim),
            queries * head_dim,
        ]
    }

    fn new(scratch: &'a mut [f32], queries: usize, head_dim: usize) -> Self {
        let mut rest = scratch;
        let parts = Self::sizes(queries, head_dim).map(|size| {
            let (part, left) = std::mem::take(&mut rest).split_at_mut(size);
            rest = left;
            part
        });
        let [q, keys, values, scores, partials, sums] = parts;
        Self { q, keys, values, scores, partials, sums }
    }
}

impl<T: Element> Block<'_, T> {
    /// `P` pieces of 16 in a head; tiles of `M` queries by `N` vectors.
    #[inline(always)]
    fn attend<L: Lanes, const P: usize, const M: usize, const N: usize>(self, l: L) {
        const { assert!(P.is_multiple_of(N) && BLOCK_QUERIES.is_multiple_of(M)) };
        let height = |i: usize, count: usize| match count - i {
            left if left >= M => M,
            REST.. => REST,
            _ => 1,
        };
        let n = self.queries;
        let (width, group) = (P * LANES, self.group);
        let count = self.rows.len() * group; // query vectors, [row][head]
        let b = Buffers::new(self.scratch, count, width);
        let column = self.kv_head * group * width;
        for (i, row) in self.rows.clone().enumerate() {
            let q = &n.q[row * n.stride + column..][..group * width];
            b.q[i * group * width..][..group * width].copy_from_slice(q);
        }
        let mut states = [const { MergeState::new() }; BLOCK_QUERIES];
        // Positions that query vector i sees.
        let sees = |i: usize| n.past + self.rows.start + i / group + 1;
        let context = sees(count - 1);
        for start in (0..context).step_by(CHUNK) {
            let end = context.min(start + CHUNK);
            transpose_keys::<L, T>(l, self.kv, start..end, width, b.keys);
            copy_values::<L, T, N>(l, self.kv, start..end, width, b.values);
            let mut visible = [0; BLOCK_QUERIES]; // positions of the chunk that query vector i sees
            for (i, visible) in visible.iter_mut().enumerate().take(count) {
                *visible = sees(i).min(end).saturating_sub(start);
            }
            for first in (0..end - start).step_by(N * LANES) {
                // At the end of the chunk there are fewer vectors: one at a time then.
                let vectors = (end - start - first).div_ceil(LANES).min(N);
                let keys = &b.keys[first * width..(first + vectors * LANES) * width];
                let mut i = 0;
                while i < count {
                    let m = height(i, count);
                    if visible[i + m - 1] > first {
                        let q = &b.q[i * width..(i + m) * width];
                        let out = &mut b.scores[i * CHUNK + first..];
                        match (m, vectors == N) {
                            (1, _) => scores::<L, P, 1, 1>(l, q, keys, n.scale, out),
                            (m, true) if m == M => scores::<L, P, M, N>(l, q, keys, n.scale, out),
                            (m, false) if m == M => scores::<L, P, M, 1>(l, q, keys, n.scale, out),
                            (_, true) => scores::<L, P, REST, N>(l, q, keys, n.scale, out),
                            (_, false) => scores::<L, P, REST, 1>(l, q, keys, n.scale, out),
                        }
                    }
                    i += m;
                }
            }
            for i in 0..count {
                let len = visible[i];
                if len > 0 {
                    let scores = &mut b.scores[i * CHUNK..][..CHUNK];
                    scores[len..len.next_multiple_of(LANES)].fill(f32::NEG_INFINITY);
                    let Ok(scores) = scores.try_into() else { unreachable!("CHUNK scores") };
                    let (largest, sum) = softmax(l, scores, len);
                    b.partials[i * partial_len(width) + width] = largest;
                    b.partials[i * partial_len(width) + width + 1] = sum;
                }
            }
            let mut i = 0;
            while i < count {
                let m = height(i, count);
                if visible[i + m - 1] > 0 {
                    let weights = &b.scores[i * CHUNK..(i + m) * CHUNK];
                    for (part, v) in b.values.chunks_exact(CHUNK * N * LANES).enumerate() {
                        let out = &mut b.partials[i * partial_len(width) + part * N * LANES..];
                        if m == M {
                            let seen = std::array::from_fn(|m| visible[i + m]);
                            values::<L, M, N>(l, v, weights, seen, partial_len(width), out);
                        } else if m == REST {
                            let seen = std::array::from_fn(|m| visible[i + m]);
                            values::<L, REST, N>(l, v, weights, seen, partial_len(width), out);
                        } else {
                            values::<L, 1, N>(l, v, weights, [visible[i]], partial_len(width), out);
                        }
                    }
                }
                i += m;
            }
            for i in 0..count {
                if visible[i] > 0 {
                    let partial = &b.partials[i * partial_len(width)..][..partial_len(width)];
                    states[i].merge(l, partial, &mut b.sums[i * width..(i + 1) * width]);
                }
            }
        }
        for (i, state) in states.into_iter().take(count).enumerate() {
            let sums = &mut b.sums[i * width..(i + 1) * width];
            state.finish(l, sums);
            let row = self.rows.start + i / group;
            let at = row * n.num_attention_heads * width + column + i % group * width;
            // SAFETY: this task alone writes its rows and heads.
            unsafe { self.out.part(at..at + width) }.copy_from_slice(sums);
        }
    }
}

/// Keys of up to CHUNK positions to `[positions / 16][head_dim][16]`; what fills up the last 16
/// positions is a repeat of the last one, and masked by the caller.
#[inline(always)]
fn transpose_keys<L: Lanes, T: Element>(
    l: L,
    kv: KvHead<'_, T>,
    positions: Range<usize>,
    width: usize,
    out: &mut [f32],
) {
    let (last, end) = (positions.end - 1, positions.end);
    let mut span = kv.span(positions.start, end, width);
    let mut span_start = positions.start;
    assert!(out.len() >= positions.len().next_multiple_of(LANES) * width);
    for (block, first) in positions.step_by(LANES).enumerate() {
        let mut rows = [std::ptr::null::<T>(); LANES];
        for (i, row) in rows.iter_mut().enumerate() {
            let position = last.min(first + i);
            if position >= span_start + span.rows {
                span = kv.span(position, end, width);
                span_start = position;
            }
            *row = span.k.wrapping_add((position - span_start) * span.stride);
        }
        for piece in 0..width / LANES {
            let mut tile = [l.splat(0.0); LANES];
            // SAFETY: each row holds `width` values (`KvHead::span`); `out` holds 16 x width for each 16 positions.
            unsafe {
                for i in 0..LANES {
                    tile[i] = T::load(l, rows[i].add(piece * LANES));
                }
                let columns = l.transpose(&tile);
                let out = out.as_mut_ptr().add((block * width + piece * LANES) * LANES);
                for i in 0..LANES {
                    l.store(out.add(i * LANES), columns[i]);
                }
            }
        }
    }
}

/// `out[m][positions]`, rows CHUNK apart: the scores of `M` queries for the positions of `keys`, `N` x
/// 16 at a time.
#[inline(always)]
fn scores<L: Lanes, const P: usize, const M: usize, const N: usize>(
    l: L,
    q: &[f32],
    keys: &[f32],
    scale: f32,
    out: &mut [f32],
) {
    let width = P * LANES;
    assert!(q.len() >= M * width);
    let scale = l.splat(scale);
    for (block, keys) in keys.chunks_exact(N * width * LANES).enumerate() {
        let out = &mut out[block * N * LANES..];
        assert!(out.len() >= (M - 1) * CHUNK + N * LANES);
        let mut halves = [[[l.splat(0.0); N]; M]; 2];
        for (half, quads) in FOLD_ORDER.iter().enumerate() {
            let mut sums = [[[l.splat(0.0); N]; M]; 2];
            for (sum, &[a, b, c, d]) in sums.iter_mut().zip(quads) {
                // SAFETY: q holds M x width, keys N x width x 16 values.
                unsafe {
                    let (q, keys) = (q.as_ptr(), keys.as_ptr());
                    let ab = add_tiles(
                        l,
                        lane_sums::<L, P, M, N>(l, q, keys, a),
                        lane_sums::<L, P, M, N>(l, q, keys, b),
                    );
                    let cd = add_tiles(
                        l,
                        lane_sums::<L, P, M, N>(l, q, keys, c),
                        lane_sums::<L, P, M, N>(l, q, keys, d),
                    );
                    *sum = add_tiles(l, ab, cd);
                }
            }
            halves[half] = add_tiles(l, sums[0], sums[1]);
        }
        let scores = add_tiles(l, halves[0], halves[1]);
        for m in 0..M {
            for v in 0..N {
                let scores = l.mul(scores[m][v], scale);
                // SAFETY: checked above.
                unsafe { l.store(out.as_mut_ptr().add(m * CHUNK + v * LANES), scores) };
            }
        }
    }
}

/// Lane `lane` of the dot products of `M` queries with `N` x 16 positions.
///
/// # Safety
/// `q` holds `M x 16 P` values, `keys` `N x 16 P x 16`.
#[inline(always)]
unsafe fn lane_sums<L: Lanes, const P: usize, const M: usize, const N: usize>(
    l: L,
    q: *const f32,
    keys: *const f32,
    lane: usize,
) -> [[L::F; N]; M] {
    let width = P * LANES;
    let mut acc = [[l.splat(0.0); N]; M];
    for j in 0..P {
        let at = j * LANES + lane;
        // SAFETY: at < width.
        unsafe {
            let mut k = [l.splat(0.0); N];
            for v in 0..N {
                k[v] = l.load(keys.add((v * width + at) * LANES));
            }
            for m in 0..M {
                let q = l.splat(*q.add(m * width + at));
                for v in 0..N {
                    acc[m][v] = l.mul_add(q, k[v], acc[m][v]);
                }
            }
        }
    }
    acc
}

#[inline(always)]
fn add_tiles<L: Lanes, const M: usize, const N: usize>(
    l: L,
    a: [[L::F; N]; M],
    mut b: [[L::F; N]; M],
) -> [[L::F; N]; M] {
    for m in 0..M {
        for v in 0..N {
            b[m][v] = l.add(a[m][v], b[m][v]);
        }
    }
    b
}

/// Values of up to CHUNK positions to f32, `[width / 16 N][CHUNK][16 N]`: what a tile reads is
/// contiguous, and widened once for all queries of the block.
#[inline(always)]
fn copy_values<L: Lanes, T: Element, const N: usize>(
    l: L,
    kv: KvHead<'_, T>,
    positions: Range<usize>,
    width: usize,
    out: &mut [f32],
) {
    assert!(positions.len() <= CHUNK && out.len() >= CHUNK * width);
    let mut position = positions.start;
    while position < positions.end {
        let span = kv.span(position, positions.end, width);
        for r in 0..span.rows {
            let t = position - positions.start + r;
            for piece in 0..width / LANES {
                // SAFETY: row r of the span holds `width` values (`KvHead::span`); t < CHUNK, and
                // piece / N < width / 16 N.
                unsafe {
                    let v = T::load(l, span.v.add(r * span.stride + piece * LANES));
                    let at = ((piece / N * CHUNK + t) * N + piece % N) * LANES;
                    l.store(out.as_mut_ptr().add(at), v);
                }
            }
        }
        position += span.rows;
    }
}

/// `out[m][16 N]`, rows `stride` apart: the weighted sums of `v`, `[CHUNK][16 N]`, of `M` queries, each
/// over the first `seen[m]` positions of the chunk, ascending.
#[inline(always)]
fn values<L: Lanes, const M: usize, const N: usize>(
    l: L,
    v: &[f32],
    weights: &[f32],
    seen: [usize; M],
    stride: usize,
    out: &mut [f32],
) {
    let together = seen[0]; // the first query sees the fewest
    assert!(weights.len() == M * CHUNK && v.len() == CHUNK * N * LANES);
    assert!(seen.iter().all(|&seen| together <= seen && seen <= CHUNK));
    // Two arrays: what picks a query by a variable has one of its own, so that the accumulators of the loop
    // over all queries stay in registers.
    let mut acc = [[l.splat(0.0); N]; M];
    let mut sums = acc;
    // SAFETY: t < seen[m] <= CHUNK; a query has CHUNK weights, v has CHUNK rows.
    unsafe {
        for t in 0..together {
            let mut row = [l.splat(0.0); N];
            for j in 0..N {
                row[j] = l.load(v.as_ptr().add((t * N + j) * LANES));
            }
            for m in 0..M {
                let weight = l.splat(*weights.get_unchecked(m * CHUNK + t));
                for j in 0..N {
                    acc[m][j] = l.mul_add(weight, row[j], acc[m][j]);
                }
            }
        }
        for m in 0..M {
            for j in 0..N {
                sums[m][j] = acc[m][j];
            }
        }
        // Beyond what the first query sees, each goes on alone. Masking with weights of 0 would change
        // bits: 0 x infinity is NaN, and -0 + 0 is +0.
        for m in 0..M {
            for t in together..seen[m] {
                let weight = l.splat(*weights.get_unchecked(m * CHUNK + t));
                for j in 0..N {
                    let v = l.load(v.as_ptr().add((t * N + j) * LANES));
                    sums[m][j] = l.mul_add(weight, v, sums[m][j]);
                }
            }
        }
    }
    for m in 0..M {
        let out = &mut out[m * stride..][..N * LANES];
        for j in 0..N {
            // SAFETY: the slice holds N x 16 values.
            unsafe { l.store(out.as_mut_ptr().add(j * LANES), sums[m][j]) };
        }
    }
}
