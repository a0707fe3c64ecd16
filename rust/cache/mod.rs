//! KV caches: the zero-copy one, the paged one, and the copying one they are measured against.

mod basic;
mod concat;
mod kv_cache;
mod paged;
mod prefix;
mod view;

pub use basic::{BasicKvCache, KV_HEADROOM_ROWS, LayerKvState};
pub use concat::ConcatKvCache;
pub use kv_cache::{KvCache, KvShape};
pub use paged::{BlockPool, PagedKvCache};
pub use prefix::PrefixTree;
pub use view::{KvView, Lent};
