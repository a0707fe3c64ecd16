//! Where the sequences of an engine keep their keys and values: in caches of their own, or in blocks of
//! one pool, in which what sequences leave behind is found again.

use crate::cache::{BlockPool, KvCache, PagedKvCache, PrefixTree};
use crate::error::Result;
use std::sync::Arc;

/// What the caches of an engine come from.
pub enum Store {
    /// A new one for each sequence.
    Own(Box<dyn Fn() -> Box<dyn KvCache> + Send>),
    Shared {
        pool: Arc<BlockPool>,
        tree: PrefixTree,
    },
}

/// The cache of a sequence.
pub enum Held {
    Own(Box<dyn KvCache>),
    Paged(PagedKvCache),
}

impl Held {
    pub fn cache(&mut self) -> &mut dyn KvCache {
        match self {
            Self::Own(cache) => &mut **cache,
            Self::Paged(cache) => cache,
        }
    }

    /// Room for all of a prompt, in a cache of its own that is empty: it is copied there once, whatever
    /// chunks it comes in.
    pub fn reserve_prompt(&mut self, rows: usize) -> Result<()> {
        match self {
            Self::Own(cache) if cache.seq_len() == 0 => cache.reserve(rows),
            _ => Ok(()),
        }
    }

    pub fn rows(&self) -> usize {
        match self {
            Self::Own(cache) => cache.seq_len(),
            Self::Paged(cache) => cache.seq_len(),
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Self::Own(cache) => cache.kv_bytes(),
            Self::Paged(cache) => cache.kv_bytes(),
        }
    }

    /// Blocks that `rows` more rows take.
    pub fn blocks_needed(&mut self, rows: usize) -> usize {
        match self {
            Self::Own(_) => 0,
            Self::Paged(cache) => cache.blocks_needed(rows),
        }
    }
}

impl Store {
    pub fn shared(pool: Arc<BlockPool>) -> Self {
        Self::Shared { tree: PrefixTree::new(&pool), pool }
    }

    /// Rows that a sequence may have at most: one block of the pool stays, for the copy of one that it
    /// shares.
    pub fn most_rows(&self) -> usize {
        match self {
            Self::Own(_) => usize::MAX,
            Self::Shared { pool, .. } => (pool.capacity() - 1) * pool.block_rows(),
        }
    }

    /// A cache that begins with as many of `tokens` as are there, not all of them: the last one's logits
    /// are wanted.
    pub fn begin(&mut self, salt: &str, tokens: &[u32]) -> Held {
        match self {
            Self::Own(new) => Held::Own(new()),
            Self::Shared { pool, tree } => {
                Held::Paged(tree.begin(pool, salt, &tokens[..tokens.len().saturating_sub(1)]))
            }
        }
    }

    /// As many of `tokens` as [`Store::begin`] would find.
    pub fn longest(&self, salt: &str, tokens: &[u32]) -> usize {
        match self {
            Self::Own(_) => 0,
            Self::Shared { tree, .. } => tree.longest(salt, &tokens[..tokens.len().saturating_sub(1)]),
        }
    }

    /// Blocks of the first `rows` rows of a sequence that would begin with `found` of them.
    pub fn blocks(&self, rows: usize, found: usize) -> usize {
        match self {
            Self::Own(_) => 0,
            Self::Shared { pool, .. } => rows.div_ceil(pool.block_rows()) - found / pool.block_rows(),
        }
    }

    /// Keeps what a sequence has computed of `tokens` for others; with `last` it has ended.
    pub fn keep(&mut self, salt: &str, tokens: &[u32], held: &mut Held, last: bool) {
        if let (Self::Shared { tree, .. }, Held::Paged(cache)) = (self, held) {
            let rows = cache.seq_len();
            tree.keep(salt, &tokens[..rows], cache, last);
        }
    }

    /// Blocks that are free, or are once others are given back.
    pub fn available(&self) -> usize {
        match self {
            Self::Own(_) => usize::MAX,
            Self::Shared { pool, tree } => pool.free_blocks() + tree.evictable(),
        }
    }

    /// Gives back what was used longest ago until so many blocks are free. `false`: they cannot be had.
    pub fn make_room(&mut self, blocks: usize) -> bool {
        let Self::Shared { pool, tree } = self else {
            return true;
        };
        while pool.free_blocks() < blocks {
            if !tree.evict() {
                return false;
            }
        }
        true
    }

    /// `(blocks in all, free, kept for others and held by nobody else)`.
    pub fn usage(&self) -> (usize, usize, usize) {
        match self {
            Self::Own(_) => (0, 0, 0),
            Self::Shared { pool, tree } => (pool.capacity(), pool.free_blocks(), tree.evictable()),
        }
    }

    /// Rows of a block.
    pub fn block_rows(&self) -> Option<usize> {
        match self {
            Self::Own(_) => None,
            Self::Shared { pool, .. } => Some(pool.block_rows()),
        }
    }
}
