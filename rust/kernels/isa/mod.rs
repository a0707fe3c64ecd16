//! Instruction sets: sixteen lanes, and one file for each set that runs them.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
pub(super) mod lanes;
pub(super) mod portable;
