//! What can go wrong, one enum for the crate. `python.rs` maps each kind to one Python exception.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value that the caller gave is not usable (`ValueError`).
    #[error("{0}")]
    Argument(String),
    /// A file cannot be read (`OSError`).
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    /// A checkpoint is wrong (`ModelError`).
    #[error("{0}")]
    Model(String),
    /// A cache has no room (`CacheError`).
    #[error("{0}")]
    Cache(String),
    /// The operating system refuses something that is no file, such as a thread (`OSError`).
    #[error("{what}: {source}")]
    System { what: String, source: std::io::Error },
    /// Memory for weights or working space cannot be had (`MemoryError`).
    #[error("no memory for {0} bytes")]
    Memory(usize),
    /// The caller asked for a stop (Ctrl-C); nothing of the call remains in the caches.
    #[error("interrupted")]
    Interrupted,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn argument(message: impl Into<String>) -> Self {
        Self::Argument(message.into())
    }

    pub fn model(message: impl Into<String>) -> Self {
        Self::Model(message.into())
    }

    pub fn cache(message: impl Into<String>) -> Self {
        Self::Cache(message.into())
    }

    pub fn file(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::File { path: path.into(), source }
    }
}
