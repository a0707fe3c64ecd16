//! The best kernels that this machine has, on all threads.

use super::backend_trait::Backend;
use super::profiler::Profiler;
use crate::error::Result;
use crate::kernels::Isa;
use crate::threads::Threads;
use std::sync::Arc;

pub struct SimdBackend {
    isa: Isa,
    threads: Threads,
    profiler: Arc<Profiler>,
}

impl SimdBackend {
    pub fn new(isa: Isa, threads: usize) -> Result<Self> {
        Ok(Self { isa, threads: Threads::new(threads)?, profiler: Arc::default() })
    }
}

impl Backend for SimdBackend {
    fn name(&self) -> &'static str {
        "simd"
    }

    fn isa(&self) -> Isa {
        self.isa
    }

    fn threads(&self) -> &Threads {
        &self.threads
    }

    fn profiler(&self) -> &Arc<Profiler> {
        &self.profiler
    }
}
