//! Instruction sets: sixteen lanes, one file for each set that runs them, and the list of all sets.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(super) mod lanes;
mod portable;

use crate::error::{Error, Result};
use lanes::{InstructionSet, Kernel};

/// An instruction set that this CPU and operating system run.
#[derive(Clone, Copy)]
pub struct Isa(Found);

/// The environment variable that forces an instruction set.
pub const ISA_VARIABLE: &str = "QWEN_RS_ISA";

/// What has an arm for every instruction set.
macro_rules! instruction_sets {
    ($($(#[$on:meta])* $set:ident($lanes:ty),)*) => {
        #[derive(Clone, Copy)]
        enum Found {
            $($(#[$on])* $set($lanes),)*
        }

        impl Isa {
            /// All that this machine runs, the best one first.
            pub fn available() -> Vec<Self> {
                let mut found = Vec::new();
                $($(#[$on])* found.extend(<$lanes>::detect().map(|l| Self(Found::$set(l))));)*
                found
            }

            /// The name that forces it.
            pub fn name(&self) -> &'static str {
                match self.0 {
                    $($(#[$on])* Found::$set(_) => <$lanes>::NAME,)*
                }
            }

            /// Runs a kernel on this instruction set.
            #[inline]
            pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
                match self.0 {
                    $($(#[$on])* Found::$set(l) => l.run(kernel),)*
                }
            }
        }
    };
}

// The best one first.
instruction_sets! {
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    AvxVnni(avx2::Avx2<true>),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2<false>),
    Portable(portable::Portable),
}

impl Isa {
    pub const PORTABLE: Self = Self(Found::Portable(portable::Portable));

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
}

impl std::fmt::Debug for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
