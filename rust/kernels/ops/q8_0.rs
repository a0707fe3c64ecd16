//! The format Q8_0: 32 int8 with a scale of max|x| / 127.
//!
//! ```text
//! quants of a panel  [block][8][16][4]  u8   value + 128: one load of 64 bytes is 16 rows x 4 values of k,
//!                                            which one int8 dot product instruction takes
//!
//! block 0:   row 0       row 1             row 15
//!          | k 0 1 2 3 | k 0 1 2 3 | ... | k 0 1 2 3 |    64 bytes
//!          | k 4 5 6 7 | k 4 5 6 7 | ... | k 4 5 6 7 |
//!            ...                                          8 of them
//! ```

use super::matmul_int8::QuantFormat;
use super::pieces::{load_piece, pieces};
use super::quantize::{QUANT_BLOCK, QuantizeWeights};
use crate::kernels::Isa;
use crate::kernels::isa::lanes::{Kernel, LANES, Lanes};
use half::f16;

pub struct Q8_0;

impl QuantFormat for Q8_0 {
    const NAME: &'static str = "q8_0";
    const PANEL_BLOCK_BYTES: usize = QUANT_BLOCK * LANES;

    fn quantize(isa: Isa, x: &[f32], quants: &mut [i8], scales: &mut [f16]) {
        isa.run(QuantizeWeights { x, quants, scales });
    }

    fn interleave(isa: Isa, quants: &[i8], panel: &mut [u8]) {
        isa.run(InterleaveRows { quants, out: panel });
    }

    #[inline(always)]
    fn quant(block: &[u8], lane: usize, i: usize) -> i8 {
        (block[i / 4 * 4 * LANES + lane * 4 + i % 4] ^ 0x80) as i8
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, block: *const u8, j: usize) -> L::W {
        // SAFETY: a block has 8 x 64 bytes, and j < 8.
        unsafe { l.load_q8_0(block.add(j * 4 * LANES)) }
    }
}

/// 16 quantized rows to the packed layout of a panel.
pub struct InterleaveRows<'a> {
    pub quants: &'a [i8],  // [16][blocks * 32]
    pub out: &'a mut [u8], // [blocks][8][16][4], value + 128
}

impl Kernel for InterleaveRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let words = self.out.len() / (4 * LANES); // of 4 values, in a row
        assert!(self.quants.len() == words * 4 * LANES && self.out.len() == self.quants.len());
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
    }
}
