//! Matmul with Q8_0 weights: `y = x W^T`, weights and activations in quant blocks of 32 values along `k`.
//!
//! A block's dot product is an exact integer; it is added by one fused multiply-add with the product of
//! the two scales, blocks ascending. Vectors run across output rows, never across `k`, so neither the lane
//! count nor the tile matters to a result.
//!
//! Weights are packed in panels of 16 output rows:
//!
//! ```text
//! quants  [panel][block][8][16][4]  u8   value + 128: one load of 64 bytes is 16 rows x 4 values of k,
//!                                        which one int8 dot product instruction takes
//! scales  [panel][block][16]        f16
//!
//! panel 0, block 0:   row 0       row 1             row 15
//!                   | k 0 1 2 3 | k 0 1 2 3 | ... | k 0 1 2 3 |    64 bytes
//!                   | k 4 5 6 7 | k 4 5 6 7 | ... | k 4 5 6 7 |
//!                     ...                                          8 of them
//! ```
//!
//! The instructions multiply unsigned by signed bytes: the weights are the unsigned side, and what 128 adds
//! too much is taken off by the activations' corrections, from which a block's dot products start.

use super::pieces::{load_piece, pieces};
use super::quantize::{QUANT_BLOCK, quantized_words};
use crate::kernels::Isa;
use crate::kernels::isa::lanes::{Kernel, LANES, Lanes};
use crate::kernels::split::{Destination, OutputTiles, Tile, for_each_tile};
use crate::kernels::tiles::{self, RowTile, Tiles};
use crate::threads::Threads;
use half::f16;

/// Bytes of the quants of one block of a panel.
pub const PANEL_BLOCK_BYTES: usize = QUANT_BLOCK * LANES;

/// The product `x[m, k] W^T`, with Q8_0 weights packed `[ceil(n / 16)][blocks][8][16][4]` and scales
/// `[ceil(n / 16)][blocks][16]`.
pub fn matmul_q8_0(
    isa: Isa,
    threads: &Threads,
    x: &[f32], // [m, quantized_words(blocks)]
    (quants, scales): (&[u8], &[f16]),
    (blocks, n): (usize, usize),
    out: Destination<'_>,
) {
    let (words, panels) = (quantized_words(blocks), n.div_ceil(LANES));
    let m = x.len() / words;
    assert!(x.len() == m * words && quants.len() == panels * blocks * PANEL_BLOCK_BYTES);
    assert_eq!(scales.len(), panels * blocks * LANES);
    for_each_tile(threads, (m, n), blocks * PANEL_BLOCK_BYTES, out, |out, tile| {
        isa.run(MatmulQ8_0 { x, quants, scales, blocks, out, tile });
    });
}

/// One task's tile of the product.
pub(in crate::kernels) struct MatmulQ8_0<'a> {
    pub x: &'a [f32],      // [m, quantized_words(blocks)]
    pub quants: &'a [u8],  // [ceil(n / 16)][blocks][8][16][4], value + 128
    pub scales: &'a [f16], // [ceil(n / 16)][blocks][16]
    pub blocks: usize,
    pub out: OutputTiles<'a>,
    pub tile: Tile,
}

impl MatmulQ8_0<'_> {
    /// `MR` rows of activations by `NR` panels, all of `k`.
    #[inline(always)]
    fn micro_tile<L: Lanes, const MR: usize, const NR: usize, const PREFETCH: bool>(
        &self,
        l: L,
        row: usize,
        panel: usize,
    ) {
        let blocks = self.blocks;
        let mut out = [[l.splat(0.0); NR]; MR];
        for m in 0..MR {
            for p in 0..NR {
                self.out.prefetch(l, row + m, panel + p);
            }
        }
        // SAFETY: `run` checked that the tile's rows and panels are inside all arrays; the task owns
        // the tile of the output.
        unsafe {
            let words = quantized_words(blocks);
            let x = self.x.as_ptr().add(row * words);
            let (a, a_scales) = (x.cast::<i8>(), x.add(blocks * QUANT_BLOCK / 4));
            let corrections = a_scales.add(blocks).cast::<i32>();
            let w = self.quants.as_ptr().add(panel * blocks * PANEL_BLOCK_BYTES);
            let w_scales = self.scales.as_ptr().add(panel * blocks * LANES);
            for b in 0..blocks {
                let mut dots = [[l.dot_start(0); NR]; MR];
                for (m, dots) in dots.iter_mut().enumerate() {
                    *dots = [l.dot_start(*corrections.add(m * words + b)); NR];
                }
                for j in 0..QUANT_BLOCK / 4 {
                    for p in 0..NR {
                        let w = w.add((p * blocks + b) * PANEL_BLOCK_BYTES + j * 4 * LANES);
                        if PREFETCH {
                            l.prefetch_l2(w.wrapping_add(tiles::Q8_0_PREFETCH_L2));
                            l.prefetch(w.wrapping_add(tiles::Q8_0_PREFETCH_L1));
                        }
                        let w = l.load_q8_0(w);
                        for (m, dots) in dots.iter_mut().enumerate() {
                            let a = a.add(m * words * 4 + b * QUANT_BLOCK + j * 4);
                            dots[p] = l.dot_q8_0(dots[p], w, a);
                        }
                    }
                }
                for p in 0..NR {
                    let scale = l.load_f16(w_scales.add((p * blocks + b) * LANES));
                    for m in 0..MR {
                        let scale = l.mul(scale, l.splat(*a_scales.add(m * words + b)));
                        out[m][p] = l.mul_add(l.to_f32(dots[m][p]), scale, out[m][p]);
                    }
                }
            }
            for (m, out) in out.iter().enumerate() {
                for (p, &out) in out.iter().enumerate() {
                    self.out.store(l, row + m, panel + p, out);
                }
            }
        }
    }
}

impl<L: Lanes> RowTile for (L, &MatmulQ8_0<'_>) {
    #[inline(always)]
    fn row_tile<const MR: usize, const NR: usize, const PREFETCH: bool>(&self, row: usize) -> usize {
        let &(l, kernel) = self;
        let mut panel = kernel.tile.panels.start;
        while panel + NR <= kernel.tile.panels.end {
            kernel.micro_tile::<L, MR, NR, PREFETCH>(l, row, panel);
            panel += NR;
        }
        while panel < kernel.tile.panels.end {
            kernel.micro_tile::<L, MR, 1, PREFETCH>(l, row, panel);
            panel += 1;
        }
        MR
    }
}

impl Kernel for MatmulQ8_0<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let blocks = self.blocks;
        assert!(self.tile.rows.end * quantized_words(blocks) <= self.x.len());
        assert!(self.tile.panels.end * blocks * PANEL_BLOCK_BYTES <= self.quants.len());
        assert!(self.tile.panels.end * blocks * LANES <= self.scales.len());
        let (mut row, end) = (self.tile.rows.start, self.tile.rows.end);
        while row < end {
            row += L::Tiles::q8_0(&(l, &self), row, end - row);
        }
    }
}

/// 16 quantized rows to the packed layout of a panel.
pub struct InterleaveRows<'a> {
    pub quants: &'a [i8],          // [16][blocks * 32]
    pub scales: &'a [f16],         // [16][blocks]
    pub out: &'a mut [u8],         // [blocks][8][16][4], value + 128
    pub out_scales: &'a mut [f16], // [blocks][16]
}

impl Kernel for InterleaveRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let blocks = self.scales.len() / LANES;
        let words = blocks * QUANT_BLOCK / 4; // of 4 values, in a row
        assert!(self.quants.len() == words * 4 * LANES && self.out.len() == self.quants.len());
        assert!(self.out_scales.len() == blocks * LANES);
        // Words of 4 values are moved as f32 lanes, which moves bits as they are.
        let (rows, out) = (self.quants.as_ptr().cast::<f32>(), self.out.as_mut_ptr().cast::<f32>());
        for (first, count) in pieces(words) {
            let mut tile = [l.splat(0.0); LANES];
            // SAFETY: first + count <= words; rows and out hold 16 x words.
            unsafe {
                for (i, tile) in tile.iter_mut().enumerate() {
                    *tile = load_piece(l, rows.add(i * words + first), count);
                }
                for (i, &column) in l.transpose(&tile).iter().take(count).enumerate() {
                    l.store(out.add((first + i) * LANES), column);
                }
            }
        }
        self.out.iter_mut().for_each(|q| *q ^= 0x80); // signed to value + 128
        for (b, out) in self.out_scales.chunks_exact_mut(LANES).enumerate() {
            for (i, out) in out.iter_mut().enumerate() {
                *out = self.scales[i * blocks + b];
            }
        }
    }
}

/// Row `lane` of a panel, back to f32: what an embedding look-up reads.
pub fn dequantize_packed_row(quants: &[u8], scales: &[f16], lane: usize, out: &mut [f32]) {
    for (i, _) in pieces(out.len()) {
        let end = out.len().min(i + LANES);
        for (k, y) in (i..end).zip(&mut out[i..end]) {
            let (b, j) = (k / QUANT_BLOCK, k % QUANT_BLOCK);
            let q = quants[b * PANEL_BLOCK_BYTES + (j / 4) * 4 * LANES + lane * 4 + j % 4];
            *y = (i32::from(q) - 128) as f32 * scales[b * LANES + lane].to_f32();
        }
    }
}
