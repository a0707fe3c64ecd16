//! Matmul with quantized weights: `y = x W^T`, weights and activations in quant blocks of 32 values along `k`.
//!
//! A block's dot product is an exact integer; it is added by one fused multiply-add with the product of
//! the two scales, blocks ascending. Vectors run across output rows, never across `k`, so neither the lane
//! count nor the tile matters to a result.
//!
//! Weights are packed in panels of 16 output rows:
//!
//! ```text
//! quants  [panel][block][PANEL_BLOCK_BYTES]  u8    as the format has them
//! scales  [panel][block][16]                 f16
//! ```
//!
//! The instructions multiply unsigned by signed bytes: the weights are the unsigned side, value + 128, and what
//! 128 adds too much is taken off by the activations' corrections, from which a block's dot products start.

use super::quantize::{QUANT_BLOCK, quantized_words};
use crate::kernels::Isa;
use crate::kernels::isa::lanes::{Kernel, LANES, Lanes};
use crate::kernels::split::{Destination, OutputTiles, Tile, for_each_tile};
use crate::kernels::tiles::{self, RowTile, Tiles};
use crate::threads::Threads;
use half::f16;
use std::marker::PhantomData;

/// A format of weights in quant blocks of 32 values along `k`, each an int8 times the block's f16 scale.
pub trait QuantFormat: Send + Sync + 'static {
    /// ggml's, in lower case.
    const NAME: &'static str;
    /// Bytes of the quants of one block of a panel.
    const PANEL_BLOCK_BYTES: usize;

    /// Values `[blocks * 32]` to quants and scales `[blocks]`, as ggml does it. A value that is too large makes
    /// the scale infinite.
    fn quantize(isa: Isa, x: &[f32], quants: &mut [i8], scales: &mut [f16]);

    /// The quants of 16 rows, `[16][blocks * 32]`, to those of a panel, `[blocks][PANEL_BLOCK_BYTES]`.
    fn interleave(isa: Isa, quants: &[i8], panel: &mut [u8]);

    /// Quant `i` of row `lane` of one block of a panel.
    fn quant(block: &[u8], lane: usize, i: usize) -> i8;

    /// The quants from `4 j` on of one block of a panel, 4 of each of the 16 rows.
    ///
    /// # Safety
    /// `block` is valid for reading `PANEL_BLOCK_BYTES`; `j < 8`.
    unsafe fn load<L: Lanes>(l: L, block: *const u8, j: usize) -> L::W;
}

/// The product `x[m, k] W^T`, with weights `[ceil(n / 16)][blocks][PANEL_BLOCK_BYTES]` and scales
/// `[ceil(n / 16)][blocks][16]`.
pub fn matmul_int8<Q: QuantFormat>(
    isa: Isa,
    threads: &Threads,
    x: &[f32], // [m, quantized_words(blocks)]
    (quants, scales): (&[u8], &[f16]),
    (blocks, n): (usize, usize),
    out: Destination<'_>,
) {
    let (words, panels) = (quantized_words(blocks), n.div_ceil(LANES));
    let m = x.len() / words;
    assert!(x.len() == m * words && quants.len() == panels * blocks * Q::PANEL_BLOCK_BYTES);
    assert_eq!(scales.len(), panels * blocks * LANES);
    for_each_tile(threads, (m, n), blocks * Q::PANEL_BLOCK_BYTES, out, |out, tile| {
        isa.run(MatmulInt8::<Q> { x, quants, scales, blocks, out, tile, format: PhantomData });
    });
}

/// One task's tile of the product.
pub(in crate::kernels) struct MatmulInt8<'a, Q> {
    pub x: &'a [f32],      // [m, quantized_words(blocks)]
    pub quants: &'a [u8],  // [ceil(n / 16)][blocks][PANEL_BLOCK_BYTES]
    pub scales: &'a [f16], // [ceil(n / 16)][blocks][16]
    pub blocks: usize,
    pub out: OutputTiles<'a>,
    pub tile: Tile,
    pub format: PhantomData<Q>,
}

impl<Q: QuantFormat> MatmulInt8<'_, Q> {
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
            let w = self.quants.as_ptr().add(panel * blocks * Q::PANEL_BLOCK_BYTES);
            let w_scales = self.scales.as_ptr().add(panel * blocks * LANES);
            for b in 0..blocks {
                let mut dots = [[l.dot_start(0); NR]; MR];
                for (m, dots) in dots.iter_mut().enumerate() {
                    *dots = [l.dot_start(*corrections.add(m * words + b)); NR];
                }
                for j in 0..QUANT_BLOCK / 4 {
                    for p in 0..NR {
                        let block = w.add((p * blocks + b) * Q::PANEL_BLOCK_BYTES);
                        if PREFETCH {
                            let w = block.add(j * Q::PANEL_BLOCK_BYTES / (QUANT_BLOCK / 4));
                            l.prefetch_l2(w.wrapping_add(tiles::INT8_PREFETCH_L2));
                            l.prefetch(w.wrapping_add(tiles::INT8_PREFETCH_L1));
                        }
                        let w = Q::load(l, block, j);
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

impl<L: Lanes, Q: QuantFormat> RowTile for (L, &MatmulInt8<'_, Q>) {
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

impl<Q: QuantFormat> Kernel for MatmulInt8<'_, Q> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let blocks = self.blocks;
        assert!(self.tile.rows.end * quantized_words(blocks) <= self.x.len());
        assert!(self.tile.panels.end * blocks * Q::PANEL_BLOCK_BYTES <= self.quants.len());
        assert!(self.tile.panels.end * blocks * LANES <= self.scales.len());
        let (mut row, end) = (self.tile.rows.start, self.tile.rows.end);
        while row < end {
            row += L::Tiles::int8(&(l, &self), row, end - row);
        }
    }
}

/// The scales of 16 rows, `[16][blocks]`, to those of a panel, `[blocks][16]`.
pub fn interleave_scales(scales: &[f16], panel: &mut [f16]) {
    let blocks = scales.len() / LANES;
    for (b, out) in panel.chunks_exact_mut(LANES).enumerate() {
        for (i, out) in out.iter_mut().enumerate() {
            *out = scales[i * blocks + b];
        }
    }
}

/// Row `lane` of a panel, back to f32: what an embedding look-up reads.
pub fn dequantize_packed_row<Q: QuantFormat>(quants: &[u8], scales: &[f16], lane: usize, out: &mut [f32]) {
    for (k, y) in out.iter_mut().enumerate() {
        let (b, i) = (k / QUANT_BLOCK, k % QUANT_BLOCK);
        let q = Q::quant(&quants[b * Q::PANEL_BLOCK_BYTES..], lane, i);
        *y = f32::from(q) * scales[b * LANES + lane].to_f32();
    }
}
