//! The portable kernels on one thread.

use super::backend_trait::Backend;
use super::profiler::Profiler;
use crate::error::Result;
use crate::kernels::Isa;
use crate::threads::Threads;
use std::sync::Arc;

pub struct ScalarBackend {
    threads: Threads,
    profiler: Arc<Profiler>,
}

impl ScalarBackend {
    pub fn new() -> Result<Self> {
        Ok(Self { threads: Threads::new(1)?, profiler: Arc::default() })
    }
}

impl Backend for ScalarBackend {
    fn name(&self) -> &'static str {
        "scalar"
    }

    fn isa(&self) -> Isa {
        Isa::PORTABLE
    }

    fn threads(&self) -> &Threads {
        &self.threads
    }

    fn profiler(&self) -> &Arc<Profiler> {
        &self.profiler
    }
}
