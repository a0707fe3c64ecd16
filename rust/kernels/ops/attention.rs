//! Fused grouped-query attention over fixed chunks of positions.
//!
//! Positions are cut into chunks of [`CHUNK`] by position alone. Each chunk gives, per query head,
//! the largest score, the sum of the exponentials and the weighted sum of V; chunks are merged in
//! order (the online softmax of Milakov and Gimelshein 2018, as in FlashAttention, Dao et al. 2022).
//! A score is a dot product in 16 lanes; V is accumulated position by position. So it does not
//! matter who computes which chunk, or in how many contiguous runs the rows are lent.

use super::pieces::{load_piece, pieces, store_piece};
use super::softmax::softmax;

pub use super::softmax::CHUNK;
use crate::kernels::isa::lanes::{Element, Kernel, LANES, Lanes};
use crate::kernels::tiles::Tiles;
use half::f16;
use std::ops::Range;

/// How far ahead rows are asked for, into the second-level cache: the first has too few places for
/// lines on their way to hide the memory's latency.
const PREFETCH: usize = 6144;
/// The largest head that the kernels hold in their fixed scratch.
pub const MAX_HEAD_DIM: usize = 256;

/// Keys and values of one KV head at contiguous positions: that of row `r` is at `r * stride`.
#[derive(Clone, Copy)]
pub struct KvRun<'a, T> {
    pub k: &'a [T],
    pub v: &'a [T],
}

/// All keys and values of one KV head: its positions, cut into runs of equal length.
#[derive(Clone, Copy)]
pub struct KvHead<'a, T> {
    /// In the order of positions.
    pub runs: &'a [KvRun<'a, T>],
    /// Positions of every run but the last, which may have fewer.
    pub run_rows: usize,
    /// Values between the rows of a run.
    pub stride: usize,
    /// Positions in all.
    pub rows: usize,
}

/// A KV head of one or the other dtype.
#[derive(Clone, Copy)]
pub enum LentHead<'a> {
    F32(KvHead<'a, f32>),
    F16(KvHead<'a, f16>),
}

/// Contiguous positions, checked to be there.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Span<T> {
    pub k: *const T, // row r at r * stride: [head_dim]
    pub v: *const T, // the same
    pub stride: usize,
    pub rows: usize,
}

impl<'a, T> KvHead<'a, T> {
    /// The contiguous positions from `position` on, `head_dim` values each, at most up to `end`.
    #[inline(always)]
    pub(in crate::kernels) fn span(&self, position: usize, end: usize, head_dim: usize) -> Span<T> {
        assert!(position < end && end <= self.rows); // no text: what it shows would be kept in memory
        let (run, inside) = (position / self.run_rows, position % self.run_rows);
        let rows = (self.run_rows - inside).min(end - position);
        let (run, stride) = (&self.runs[run], self.stride);
        let (start, values) = (inside * stride, (rows - 1) * stride + head_dim);
        let (k, v) = (&run.k[start..start + values], &run.v[start..start + values]);
        Span { k: k.as_ptr(), v: v.as_ptr(), stride, rows }
    }
}

/// What a chunk yields for one query head: `head_dim` weighted sums of V, the largest score, the sum
/// of the exponentials.
pub const fn partial_len(head_dim: usize) -> usize {
    head_dim + 2
}

/// One chunk (or the part of it that a query may see), for the query heads of one KV head.
pub struct AttentionChunk<'a, T> {
    pub q: &'a [f32], // [heads, head_dim]
    pub head_dim: usize,
    pub kv: KvHead<'a, T>,
    pub positions: Range<usize>,
    pub scale: f32,
    pub partials: &'a mut [f32], // [heads, head_dim + 2]
}

impl<T: Element> Kernel for AttentionChunk<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let width = self.head_dim;
        let heads = self.q.len() / width;
        assert!(self.q.len() == heads * width && (1..=MAX_HEAD_DIM).contains(&width));
        assert!(self.partials.len() == heads * partial_len(width));
        assert!((1..=CHUNK).contains(&self.positions.len()));
        let mut head = 0;
        while head < heads {
            // Two heads share every read of K and V; the widths of all released models are unrolled.
            let q = &self.q[head * width..];
            let partials = &mut self.partials[head * partial_len(width)..];
            let pair = heads - head >= 2;
            let job = Job { q, width, kv: self.kv, positions: self.positions.clone(), scale: self.scale };
            match (width, pair) {
                (128, true) => job.run::<L, 2, 8>(l, partials),
                (128, false) => job.run::<L, 1, 8>(l, partials),
                (64, true) => job.run::<L, 2, 4>(l, partials),
                _ => job.run::<L, 1, 0>(l, partials),
            }
            head += if pair && (width == 128 || width == 64) { 2 } else { 1 };
        }
    }
}

struct Job<'a, T> {
    q: &'a [f32],
    width: usize,
    kv: KvHead<'a, T>,
    positions: Range<usize>,
    scale: f32,
}

impl<T: Element> Job<'_, T> {
    /// `H` query heads; `P` 16-lane pieces in a row, or 0 for any width.
    #[inline(always)]
    fn run<L: Lanes, const H: usize, const P: usize>(&self, l: L, partials: &mut [f32]) {
        let mut scores = [[f32::NEG_INFINITY; CHUNK]; H];
        self.scores::<L, H, P>(l, &mut scores);
        let len = self.positions.len();
        for (h, scores) in scores.iter_mut().enumerate() {
            let partial = &mut partials[h * partial_len(self.width)..][..partial_len(self.width)];
            let (largest, sum) = softmax(l, scores, len);
            partial[self.width] = largest;
            partial[self.width + 1] = sum;
        }
        match (L::Tiles::TWO_HEADS, P) {
            (true, 4 | 8) => self.values::<L, H, P>(l, &scores, partials, 0, 0),
            // Heads share every widening of V: a pair has two pieces at a time in sixteen registers.
            (_, 4 | 8) if H == 2 => {
                for piece in (0..P).step_by(2) {
                    self.values::<L, H, 2>(l, &scores, partials, 0, piece);
                }
            }
            (_, 4 | 8) => {
                for piece in (0..P).step_by(4) {
                    self.values::<L, H, 4>(l, &scores, partials, 0, piece);
                }
            }
            _ => {
                for h in 0..H {
                    for piece in 0..self.width.div_ceil(LANES) {
                        self.values::<L, 1, 1>(l, &scores[h..], partials, h, piece);
                    }
                }
            }
        }
    }

    /// `scores[h][t] = (q_h . k_t) * scale`.
    #[inline(always)]
    fn scores<L: Lanes, const H: usize, const P: usize>(&self, l: L, scores: &mut [[f32; CHUNK]; H]) {
        let scale = l.splat(self.scale);
        let mut position = self.positions.start;
        while position < self.positions.end {
            let span = self.kv.span(position, self.positions.end, self.width);
            let first = position - self.positions.start;
            let mut row = 0;
            while row < span.rows {
                let n = LANES.min(span.rows - row);
                let mut sums = [[l.splat(0.0); LANES]; H];
                for r in 0..n {
                    self.prefetch(l, span, (span.k, span.v), row + r);
                    // SAFETY: row `row + r` of the span holds `width` values (`KvHead::span`).
                    let dots = unsafe { self.dot_row::<L, H, P>(l, span.k.add((row + r) * span.stride)) };
                    for h in 0..H {
                        sums[h][r] = dots[h];
                    }
                }
                for h in 0..H {
                    let dots = l.mul(l.sum_each(&sums[h]), scale);
                    // SAFETY: a chunk's scores hold CHUNK >= first + row + n values.
                    unsafe { store_piece(l, scores[h].as_mut_ptr().add(first + row), dots, n) };
                }
                row += n;
            }
            position += span.rows;
        }
    }

    /// Asks for the row that is PREFETCH bytes after row `r` of a span, or, where the span ends before,
    /// for one of those that are read next: V after K, and the next chunk's K after V.
    #[inline(always)]
    fn prefetch<L: Lanes>(&self, l: L, span: Span<T>, (rows, next): (*const T, *const T), r: usize) {
        let row = self.width * size_of::<T>();
        let ahead = r + PREFETCH / row;
        let (from, at) = if ahead < span.rows { (rows, ahead) } else { (next, ahead - span.rows) };
        let first = from.wrapping_add(at * span.stride).cast::<u8>();
        for line in (0..row).step_by(64) {
            l.prefetch_l2(first.wrapping_add(line));
        }
    }

    /// The 16 lanes of `q_h . k`, element `i` in lane `i mod 16`, for each of the heads.
    ///
    /// # Safety
    /// `k` is valid for reading `width` values.
    #[inline(always)]
    unsafe fn dot_row<L: Lanes, const H: usize, const P: usize>(&self, l: L, k: *const T) -> [L::F; H] {
        let (width, q) = (self.width, self.q.as_ptr());
        let mut acc = [l.splat(0.0); H];
        // SAFETY: `k` holds `width` values, `q` holds H x `width`; P x 16 is `width` or P is 0.
        unsafe {
            if P > 0 {
                for j in 0..P {
                    let k = T::load(l, k.add(j * LANES));
                    for h in 0..H {
                        acc[h] = l.mul_add(l.load(q.add(h * width + j * LANES)), k, acc[h]);
                    }
                }
            } else {
                for (i, n) in pieces(width) {
                    let k = load_piece(l, k.add(i), n);
                    for h in 0..H {
                        acc[h] = l.mul_add(load_piece(l, q.add(h * width + i), n), k, acc[h]);
                    }
                }
            }
        }
        acc
    }

    /// `out[h][piece..piece + P] = sum over t of weights[h][t] * v_t`, t ascending, into `partials`
    /// of heads `head..`.
    #[inline(always)]
    fn values<L: Lanes, const H: usize, const P: usize>(
        &self,
        l: L,
        weights: &[[f32; CHUNK]],
        partials: &mut [f32],
        head: usize,
        piece: usize,
    ) {
        let width = self.width;
        let offset = piece * LANES;
        let last = LANES.min(width - (piece + P - 1) * LANES); // lanes of the last piece
        let mut acc = [[l.splat(0.0); P]; H];
        let mut position = self.positions.start;
        while position < self.positions.end {
            let span = self.kv.span(position, self.positions.end, self.width);
            let first = position - self.positions.start;
            for r in 0..span.rows {
                if piece == 0 {
                    let next = span.k.wrapping_add(span.rows * span.stride);
                    self.prefetch(l, span, (span.v, next), r);
                }
                // SAFETY: row r of the span holds `width` values (`KvHead::span`), of which pieces
                // `piece..piece + P` are read, the last one in part where the width ends in it; a
                // chunk has CHUNK >= first + rows weights.
                unsafe {
                    let v = span.v.add(r * span.stride + offset);
                    for j in 0..P {
                        let n = if j + 1 == P { last } else { LANES };
                        let v = load_piece(l, v.add(j * LANES), n);
                        for h in 0..H {
                            let weight = l.splat(*weights.get_unchecked(h).get_unchecked(first + r));
                            acc[h][j] = l.mul_add(weight, v, acc[h][j]);
                        }
                    }
                }
            }
            position += span.rows;
        }
        for (h, acc) in acc.iter().enumerate() {
            let out = &mut partials[(head + h) * partial_len(width) + offset..];
            for (j, &acc) in acc.iter().enumerate() {
                let n = if j + 1 == P { last } else { LANES };
                // SAFETY: a partial holds `width` values from its start.
                unsafe { store_piece(l, out.as_mut_ptr().add(j * LANES), acc, n) };
            }
        }
    }
}

/// Merges chunks, in order, for one query head.
pub struct MergeChunks<'a> {
    /// `[chunks]` partials of `head_dim + 2` values, `stride` apart.
    pub partials: &'a [f32],
    pub stride: usize,
    pub chunks: usize,
    pub out: &'a mut [f32], // [head_dim]
}

impl Kernel for MergeChunks<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let width = self.out.len();
        let mut state = MergeState::new();
        for c in 0..self.chunks {
            let partial = &self.partials[c * self.stride..][..partial_len(width)];
            state.merge(l, partial, self.out);
        }
        state.finish(l, self.out);
    }
}

/// The running largest score and sum of one query head.
pub(in crate::kernels) struct MergeState {
    largest: f32,
    sum: f32,
    empty: bool,
}

impl MergeState {
    pub(in crate::kernels) const fn new() -> Self {
        Self { largest: f32::NEG_INFINITY, sum: 0.0, empty: true }
    }

    /// `out` is the running weighted sum of V.
    #[inline(always)]
    pub(in crate::kernels) fn merge<L: Lanes>(&mut self, l: L, partial: &[f32], out: &mut [f32]) {
        let width = out.len();
        let (largest, sum) = (partial[width], partial[width + 1]);
        if self.empty {
            *self = Self { largest, sum, empty: false };
            out.copy_from_slice(&partial[..width]);
            return;
        }
        let top = if self.largest > largest { self.largest } else { largest };
        let old = l.exp(l.splat(self.largest - top));
        let new = l.exp(l.splat(largest - top));
        let mut lane = [0f32; LANES];
        for (i, n) in pieces(width) {
            // SAFETY: i + n <= width, which both hold.
            unsafe {
                let p = out.as_mut_ptr().add(i);
                let scaled = l.mul(load_piece(l, p, n), old);
                let fresh = load_piece(l, partial.as_ptr().add(i), n);
                store_piece(l, p, l.mul_add(fresh, new, scaled), n);
            }
        }
        let total = l.mul_add(l.splat(sum), new, l.mul(l.splat(self.sum), old));
        // SAFETY: `lane` holds 16 values.
        unsafe { l.store(lane.as_mut_ptr(), total) };
        self.largest = top;
        self.sum = lane[0];
    }

    #[inline(always)]
    pub(in crate::kernels) fn finish<L: Lanes>(self, l: L, out: &mut [f32]) {
        let inverse = l.splat(1.0 / self.sum);
        for (i, n) in pieces(out.len()) {
            // SAFETY: i + n <= out.len().
            unsafe {
                let p = out.as_mut_ptr().add(i);
                store_piece(l, p, l.mul(load_piece(l, p, n), inverse), n);
            }
        }
    }
}

/// All chunks of one query position, for the query heads of one KV head: what a prefill query does,
/// which is what the decode query at its position does.
pub struct AttentionRow<'a, T> {
    pub q: &'a [f32], // [heads, head_dim]
    pub head_dim: usize,
    pub kv: KvHead<'a, T>,
    /// Positions `0..context` are seen.
    pub context: usize,
    pub scale: f32,
    pub out: &'a mut [f32], // [heads, head_dim]
}

impl<T: Element> Kernel for AttentionRow<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let width = self.head_dim;
        assert!(width <= MAX_HEAD_DIM && self.q.len() == self.out.len());
        let mut partials = [0f32; 2 * partial_len(MAX_HEAD_DIM)];
        // Two heads at a time: what AttentionChunk does anyway, with a scratch of fixed size.
        for (q, out) in self.q.chunks(2 * width).zip(self.out.chunks_mut(2 * width)) {
            let heads = q.len() / width;
            let mut states = [MergeState::new(), MergeState::new()];
            for start in (0..self.context).step_by(CHUNK) {
                let partials = &mut partials[..heads * partial_len(width)];
                AttentionChunk {
                    q,
                    head_dim: width,
                    kv: self.kv,
                    positions: start..self.context.min(start + CHUNK),
                    scale: self.scale,
                    partials,
                }
                .run(l);
                for h in 0..heads {
                    let partial = &partials[h * partial_len(width)..][..partial_len(width)];
                    states[h].merge(l, partial, &mut out[h * width..(h + 1) * width]);
                }
            }
            for (state, out) in states.into_iter().zip(out.chunks_mut(width)) {
                state.finish(l, out);
            }
        }
    }
}
