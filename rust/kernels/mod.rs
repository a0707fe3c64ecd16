//! The kernels: safe to call, chosen at run time.
//!
//! [`Isa`] holds the instruction set that was found (or forced) and runs any [`Kernel`] on it. The
//! kernels themselves are in `ops`, written once over 16 lanes; the instruction sets in `isa` are those
//! lanes; `tiles` holds the choices of tile and prefetch, `split` shares a matmul out to threads.
#![allow(unsafe_code)] // intrinsics and unchecked rows: each block says why it is sound
#![allow(clippy::needless_range_loop)] // one index runs over registers and memory together

mod isa;
mod ops;
mod split;
mod tiles;

pub use isa::lanes::{Element, Kernel, LANES, Lanes};
pub use ops::*;
pub use split::Destination;

use isa::portable;
#[cfg(target_arch = "x86_64")]
use isa::{avx2, avx512};

use crate::error::{Error, Result};

/// An instruction set that this CPU and operating system run.
#[derive(Clone, Copy)]
pub struct Isa(Found);

#[derive(Clone, Copy)]
enum Found {
    Portable(portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2<false>),
    #[cfg(target_arch = "x86_64")]
    AvxVnni(avx2::Avx2<true>),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
}

/// The environment variable that forces an instruction set.
pub const ISA_VARIABLE: &str = "QWEN_RS_ISA";

impl Isa {
    pub const PORTABLE: Self = Self(Found::Portable(portable::Portable));

    /// All that this machine runs, the best one first.
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            found.extend(avx512::Avx512::detect().map(|l| Self(Found::Avx512(l))));
            found.extend(avx2::Avx2::<true>::detect().map(|l| Self(Found::AvxVnni(l))));
            found.extend(avx2::Avx2::<false>::detect().map(|l| Self(Found::Avx2(l))));
        }
        found.push(Self::PORTABLE);
        found
    }

    /// The one that `QWEN_RS_ISA` names, or else the best.
    pub fn from_environment() -> Result<Self> {
        let available = Self::available();
        let forced = std::env::var_os(ISA_VARIABLE).map(|name| name.to_string_lossy().into_owned());
        match forced {
            Some(name) if !name.is_empty() => {
                let found = available.iter().find(|isa| isa.name() == name);
                found.copied().ok_or_else(|| {
                    let names: Vec<_> = available.iter().map(Self::name).collect();
                    Error::argument(format!("{ISA_VARIABLE}={name}: this machine runs {}", names.join(", ")))
                })
            }
            _ => Ok(available[0]),
        }
    }

    /// The name that forces it: `avx512` (with VNNI), `avx2-vnni` (AVX2, FMA, F16C and AVX-VNNI), `avx2`
    /// (the same without AVX-VNNI) or `portable`.
    pub fn name(&self) -> &'static str {
        match self.0 {
            Found::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Found::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Found::AvxVnni(_) => "avx2-vnni",
            #[cfg(target_arch = "x86_64")]
            Found::Avx512(_) => "avx512",
        }
    }

    /// Runs a kernel on this instruction set.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Found::Portable(l) => kernel.run(l),
            #[cfg(target_arch = "x86_64")]
            Found::Avx2(l) => l.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Found::AvxVnni(l) => l.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Found::Avx512(l) => l.run(kernel),
        }
    }
}

impl std::fmt::Debug for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
