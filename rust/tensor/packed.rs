//! Weights as the kernels read them: 16 output rows interleaved, all in one huge-page arena.

use crate::error::{Error, Result};
use crate::kernels::finite::AllFinite;
use crate::kernels::gated::{gated_float, gated_q8_0};
use crate::kernels::matmul_float::{ROW_PADDING, matmul_float};
use crate::kernels::matmul_q8_0::{InterleaveRows, PANEL_BLOCK_BYTES, dequantize_packed_row, matmul_q8_0};
use crate::kernels::norm::RmsNorm;
use crate::kernels::quantize::{
    QUANT_BLOCK, QuantizeActivations, QuantizeNormed, QuantizeWeights, quantized_words,
};
use crate::kernels::{Destination, Isa, LANES};
use crate::threads::Threads;
use half::{bf16, f16};
use memmap2::MmapMut;
use std::ops::Range;

/// How weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDtype {
    Q8_0,
    Bf16,
    F32,
}

impl WeightDtype {
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "q8_0" => Ok(Self::Q8_0),
            "bf16" => Ok(Self::Bf16),
            "f32" => Ok(Self::F32),
            _ => Err(Error::argument(format!("dtype must be q8_0, bf16 or f32, not {name:?}"))),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "q8_0",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// f32 words of a row of `k` activations as a matmul with these weights reads it.
    pub fn activation_words(self, k: usize) -> usize {
        match self {
            Self::Q8_0 => quantized_words(k.div_ceil(QUANT_BLOCK)),
            Self::Bf16 | Self::F32 => k + ROW_PADDING,
        }
    }

    /// One row of activations `[k]`, as a matmul with these weights reads it.
    pub fn write_activations(self, isa: Isa, x: &[f32], out: &mut [f32]) {
        match self {
            Self::Q8_0 => isa.run(QuantizeActivations { x, out }),
            Self::Bf16 | Self::F32 => out[..x.len()].copy_from_slice(x),
        }
    }

    /// The same of the row's RMSNorm.
    pub fn write_normed(self, isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        match self {
            Self::Q8_0 => isa.run(QuantizeNormed { x, weight, out, eps }),
            Self::Bf16 | Self::F32 => isa.run(RmsNorm { x, weight, out: &mut out[..x.len()], eps }),
        }
    }

    /// Bytes of `[n, k]` weights once packed.
    pub fn packed_bytes(self, n: usize, k: usize) -> usize {
        let rows = n.next_multiple_of(LANES);
        match self {
            Self::Q8_0 => {
                aligned(rows * k.next_multiple_of(QUANT_BLOCK)) + aligned(rows * k.div_ceil(QUANT_BLOCK) * 2)
            }
            Self::Bf16 => aligned(rows * k * 2),
            Self::F32 => aligned(rows * k * 4),
        }
    }
}

const ALIGN: usize = 64;
const HUGE_PAGE: usize = if cfg!(miri) { 4096 } else { 2 << 20 }; // all that is mapped costs Miri time

fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

/// One block of memory for all weights, on 2 MiB boundaries and advised for huge pages: a decode
/// step reads all of it, and small pages cost a third of the bandwidth.
pub struct Arena {
    map: MmapMut,
    used: usize,
    end: usize,
}

impl Arena {
    /// Room for `bytes`.
    ///
    /// # Errors
    /// `Memory` if it cannot be had.
    pub fn new(bytes: usize) -> Result<Self> {
        let map = MmapMut::map_anon(bytes.saturating_add(HUGE_PAGE)).map_err(|_| Error::Memory(bytes))?;
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage); // only advice: a kernel may have none
        let used = map.as_ptr().align_offset(HUGE_PAGE);
        Ok(Self { map, used, end: used + bytes })
    }

    fn take(&mut self, bytes: usize) -> Range<usize> {
        let start = self.used;
        self.used += aligned(bytes);
        assert!(self.used <= self.end, "the arena was made too small");
        start..start + bytes
    }

    /// Bytes it was made for.
    pub fn bytes(&self) -> usize {
        self.end - self.map.as_ptr().align_offset(HUGE_PAGE)
    }

    /// The share of them that is taken, 0 to 1.
    pub fn used_share(&self) -> f64 {
        self.contents().len() as f64 / self.bytes().max(1) as f64
    }

    /// All that was taken: what a decode step reads.
    pub fn contents(&self) -> &[u8] {
        &self.map[self.map.as_ptr().align_offset(HUGE_PAGE)..self.used]
    }

    fn slice<T: bytemuck::Pod>(&self, range: &Range<usize>) -> &[T] {
        bytemuck::cast_slice(&self.map[range.clone()])
    }
}

/// Rows of a checkpoint's tensor as they are stored, little-endian.
#[derive(Clone, Copy)]
pub struct RowSource<'a> {
    pub bytes: &'a [u8], // [rows, cols]
    pub dtype: safetensors::Dtype,
    pub rows: usize,
    pub cols: usize,
}

impl<'a> RowSource<'a> {
    fn row_bytes(&self, first: usize, count: usize) -> &'a [u8] {
        let width = self.cols * self.dtype.bitsize() / 8;
        &self.bytes[first * width..(first + count) * width]
    }

    /// Row `r`, widened exactly. Only the three float dtypes get here: the loader checks.
    fn widen(&self, r: usize, out: &mut [f32]) {
        let bytes = self.row_bytes(r, 1);
        match self.dtype {
            safetensors::Dtype::F32 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*b);
                }
            }
            safetensors::Dtype::F16 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = f16::from_le_bytes(*b).to_f32();
                }
            }
            _ => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                }
            }
        }
    }

    /// All values, widened.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (r, row) in out.chunks_exact_mut(self.cols).enumerate() {
            self.widen(r, row);
        }
        out
    }
}

enum Layout {
    /// quants `[ceil(n / 16)][blocks][8][16][4]` u8 (value + 128); scales `[ceil(n / 16)][blocks][16]` f16
    Q8_0 {
        quants: Range<usize>,
        scales: Range<usize>,
    },
    /// `[ceil(n / 16)][k][16]`
    Bf16(Range<usize>),
    F32(Range<usize>),
}

/// Weights `[n, k]` of a linear layer; rows beyond `n` are zeros.
pub struct PackedWeight {
    pub n: usize,
    pub k: usize,
    layout: Layout,
}

/// Source bytes packed between two calls of `done`: what a memory map may hold at a time.
const SLAB_BYTES: usize = 8 << 20;

impl PackedWeight {
    /// Packs the rows of `sources`, one after another, in one pass over them. `done` is called with
    /// every part of a source that is no longer needed, and may end the work.
    ///
    /// # Errors
    /// `Model` if a value is NaN or infinite; the message names the row. What `done` returns.
    pub fn pack(
        arena: &mut Arena,
        sources: &[RowSource<'_>],
        dtype: WeightDtype,
        isa: Isa,
        threads: &Threads,
        done: &dyn Fn(&[u8]) -> Result<()>,
    ) -> Result<Self> {
        let k = sources[0].cols;
        let n = sources.iter().map(|s| s.rows).sum::<usize>();
        let rows = n.next_multiple_of(LANES);
        let layout = match dtype {
            WeightDtype::Q8_0 => Layout::Q8_0 {
                quants: arena.take(rows * k.next_multiple_of(QUANT_BLOCK)),
                scales: arena.take(rows * k.div_ceil(QUANT_BLOCK) * 2),
            },
            WeightDtype::Bf16 => Layout::Bf16(arena.take(rows * k * 2)),
            WeightDtype::F32 => Layout::F32(arena.take(rows * k * 4)),
        };
        let packed = Self { n, k, layout };
        let slab = (SLAB_BYTES / (LANES * k * 4)).max(1) * LANES;
        let mut first = 0;
        while first < n {
            let end = n.min(first + slab);
            packed.pack_rows(arena, sources, first..end, isa, threads)?;
            for (source, part) in parts(sources, first..end) {
                done(source.row_bytes(part.start, part.len()))?;
            }
            first = end;
        }
        Ok(packed)
    }

    /// Packs rows of a slab, which starts at a group.
    fn pack_rows(
        &self,
        arena: &mut Arena,
        sources: &[RowSource<'_>],
        rows: Range<usize>,
        isa: Isa,
        threads: &Threads,
    ) -> Result<()> {
        let k = self.k;
        let groups = rows.start / LANES..rows.end.div_ceil(LANES);
        let fill = |group: usize, width: usize, wide: &mut [f32]| -> Result<()> {
            wide.fill(0.0);
            let range = group * LANES..self.n.min((group + 1) * LANES);
            let mut lane = 0;
            for (source, part) in parts(sources, range.clone()) {
                for r in part {
                    let row = &mut wide[lane * width..][..k];
                    source.widen(r, row);
                    if !isa.run(AllFinite { x: row }) {
                        return Err(Error::model(format!("row {r} holds NaN or infinity")));
                    }
                    lane += 1;
                }
            }
            Ok(())
        };
        let part = |range: &Range<usize>, group_bytes: usize| {
            range.start + groups.start * group_bytes..range.start + groups.end * group_bytes
        };
        match &self.layout {
            Layout::Q8_0 { quants, scales } => {
                let (blocks, width) = (k.div_ceil(QUANT_BLOCK), k.next_multiple_of(QUANT_BLOCK));
                let quants = part(quants, blocks * PANEL_BLOCK_BYTES);
                let scales = part(scales, blocks * LANES * 2);
                let (low, high) = arena.map.split_at_mut(scales.start);
                let quants = low[quants].chunks_exact_mut(blocks * PANEL_BLOCK_BYTES);
                let scales = bytemuck::cast_slice_mut::<u8, f16>(&mut high[..scales.len()]);
                let mut tasks: Vec<_> = quants.zip(scales.chunks_exact_mut(blocks * LANES)).collect();
                for_each_group(threads, groups.start, &mut tasks, |group, (quants, scales), scratch| {
                    scratch.resize(LANES * width);
                    fill(group, width, &mut scratch.wide)?;
                    isa.run(QuantizeWeights {
                        x: &scratch.wide,
                        quants: &mut scratch.quants,
                        scales: &mut scratch.scales,
                    });
                    isa.run(InterleaveRows {
                        quants: &scratch.quants,
                        scales: &scratch.scales,
                        out: quants,
                        out_scales: scales,
                    });
                    Ok(())
                })
            }
            Layout::Bf16(range) => {
                let range = part(range, k * LANES * 2);
                let out = bytemuck::cast_slice_mut::<u8, bf16>(&mut arena.map[range]);
                let mut tasks: Vec<_> = out.chunks_exact_mut(k * LANES).collect();
                for_each_group(threads, groups.start, &mut tasks, |group, out, scratch| {
                    scratch.wide.resize(LANES * k, 0.0);
                    fill(group, k, &mut scratch.wide)?;
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = bf16::from_f32(scratch.wide[i % LANES * k + i / LANES]);
                    }
                    Ok(())
                })
            }
            Layout::F32(range) => {
                let range = part(range, k * LANES * 4);
                let out = bytemuck::cast_slice_mut::<u8, f32>(&mut arena.map[range]);
                let mut tasks: Vec<_> = out.chunks_exact_mut(k * LANES).collect();
                for_each_group(threads, groups.start, &mut tasks, |group, out, scratch| {
                    scratch.wide.resize(LANES * k, 0.0);
                    fill(group, k, &mut scratch.wide)?;
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = scratch.wide[i % LANES * k + i / LANES];
                    }
                    Ok(())
                })
            }
        }
    }

    /// The product `x[m, k] W^T`; `x` is rows of [`WeightDtype::write_activations`].
    pub fn matmul(&self, arena: &Arena, isa: Isa, threads: &Threads, x: &[f32], out: Destination<'_>) {
        let (n, k) = (self.n, self.k);
        match &self.layout {
            Layout::Q8_0 { quants, scales } => {
                let weights = (arena.slice(quants), arena.slice(scales));
                matmul_q8_0(isa, threads, x, weights, (k.div_ceil(QUANT_BLOCK), n), out);
            }
            Layout::Bf16(range) => {
                matmul_float::<bf16>(isa, threads, x, arena.slice(range), (k, n), out);
            }
            Layout::F32(range) => {
                matmul_float::<f32>(isa, threads, x, arena.slice(range), (k, n), out);
            }
        }
    }

    /// `silu(gate x) * (up x)` of rows `x` of [`WeightDtype::write_activations`], written to `out` as such
    /// rows again; both weights are `[n, k]`. `scratch` holds
    /// [`GATED_WORDS`](crate::kernels::gated::GATED_WORDS) for each worker.
    pub fn gated(
        [gate, up]: [&Self; 2],
        arena: &Arena,
        isa: Isa,
        threads: &Threads,
        x: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let (n, k) = (gate.n, gate.k);
        assert!(up.n == n && up.k == k);
        match (&gate.layout, &up.layout) {
            (Layout::Q8_0 { quants, scales }, Layout::Q8_0 { quants: up_quants, scales: up_scales }) => {
                let gate = (arena.slice(quants), arena.slice(scales));
                let up = (arena.slice(up_quants), arena.slice(up_scales));
                gated_q8_0(isa, threads, x, [gate, up], (k.div_ceil(QUANT_BLOCK), n), scratch, out);
            }
            (Layout::Bf16(gate), Layout::Bf16(up)) => {
                let weights = [arena.slice::<bf16>(gate), arena.slice(up)];
                gated_float(isa, threads, x, weights, (k, n), scratch, out);
            }
            (Layout::F32(gate), Layout::F32(up)) => {
                let weights = [arena.slice::<f32>(gate), arena.slice(up)];
                gated_float(isa, threads, x, weights, (k, n), scratch, out);
            }
            _ => unreachable!("a model's weights are packed alike"),
        }
    }

    /// Row `r`, back to f32.
    pub fn row(&self, arena: &Arena, r: usize, out: &mut [f32]) {
        assert!(r < self.n && out.len() == self.k);
        let (group, lane) = (r / LANES, r % LANES);
        match &self.layout {
            Layout::Q8_0 { quants, scales } => {
                let blocks = self.k.div_ceil(QUANT_BLOCK);
                let quants = &arena.slice(quants)[group * blocks * PANEL_BLOCK_BYTES..];
                let scales = &arena.slice(scales)[group * blocks * LANES..];
                dequantize_packed_row(quants, scales, lane, out);
            }
            Layout::Bf16(range) => {
                let rows = &arena.slice::<bf16>(range)[group * self.k * LANES..];
                for (k, out) in out.iter_mut().enumerate() {
                    *out = rows[k * LANES + lane].to_f32();
                }
            }
            Layout::F32(range) => {
                let rows = &arena.slice::<f32>(range)[group * self.k * LANES..];
                for (k, out) in out.iter_mut().enumerate() {
                    *out = rows[k * LANES + lane];
                }
            }
        }
    }
}

/// The parts of `sources`, which stand one below the other, that rows `range` cover.
fn parts<'s, 'a>(
    sources: &'s [RowSource<'a>],
    range: Range<usize>,
) -> impl Iterator<Item = (&'s RowSource<'a>, Range<usize>)> {
    let mut start = 0;
    sources.iter().filter_map(move |source| {
        let here = start..start + source.rows;
        start = here.end;
        let part = range.start.max(here.start)..range.end.min(here.end);
        (!part.is_empty()).then(|| (source, part.start - here.start..part.end - here.start))
    })
}

/// What packing a group needs, made once a task.
#[derive(Default)]
struct Scratch {
    wide: Vec<f32>,   // [16][k]
    quants: Vec<i8>,  // [16][k]
    scales: Vec<f16>, // [16][k / 32]
}

impl Scratch {
    fn resize(&mut self, values: usize) {
        self.wide.resize(values, 0.0);
        self.quants.resize(values, 0);
        self.scales.resize(values / QUANT_BLOCK, f16::ZERO);
    }
}

/// Calls `pack` for every group, on all workers; the first error is returned.
fn for_each_group<T: Send>(
    threads: &Threads,
    first_group: usize,
    groups: &mut [T],
    pack: impl Fn(usize, &mut T, &mut Scratch) -> Result<()> + Sync,
) -> Result<()> {
    const GROUPS: usize = 8;
    let mut tasks: Vec<_> = groups.chunks_mut(GROUPS).map(|groups| (groups, Ok(()))).collect();
    threads.for_each_mut(&mut tasks, |task, (groups, result)| {
        let mut scratch = Scratch::default();
        for (i, group) in groups.iter_mut().enumerate() {
            *result = pack(first_group + task * GROUPS + i, group, &mut scratch);
            if result.is_err() {
                return;
            }
        }
    });
    tasks.into_iter().try_for_each(|(_, result)| result)
}
