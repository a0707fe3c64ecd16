//! Which beginnings of sequences are in blocks already: a tree keyed by the tokens themselves (after
//! SGLang's RadixAttention, Zheng et al. 2023, with edges of one block).
//!
//! Tokens are compared, not hashed, so nothing can collide. A block is immutable once it is full; the last
//! one of a sequence that has ended may be a part of one, and is a leaf. A sequence that begins like a block
//! and goes on otherwise shares it all the same: its first write copies the block (`PagedKvCache`).

use super::paged::{Block, BlockPool, PagedKvCache};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

/// Blocks that sequences left behind, by their tokens.
pub struct PrefixTree {
    block_rows: usize,
    nodes: Vec<Node>,
    unused: Vec<usize>,
    /// A root for every salt: sequences of two salts share nothing.
    roots: BTreeMap<Box<str>, usize>,
    /// `(last use, node)` of every leaf.
    leaves: BTreeSet<(u64, usize)>,
    now: u64,
}

struct Node {
    /// None for a root.
    block: Option<Arc<Block>>,
    /// The key by which the parent knows it: at most `block_rows` tokens, fewer only in a leaf.
    tokens: Box<[u32]>,
    parent: usize,
    children: BTreeMap<Box<[u32]>, usize>,
    last_use: u64,
}

impl PrefixTree {
    pub fn new(pool: &BlockPool) -> Self {
        Self {
            block_rows: pool.block_rows(),
            nodes: Vec::new(),
            unused: Vec::new(),
            roots: BTreeMap::new(),
            leaves: BTreeSet::new(),
            now: 0,
        }
    }

    /// Blocks that it holds.
    pub fn blocks(&self) -> usize {
        self.nodes.len() - self.unused.len() - self.roots.len()
    }

    /// Blocks that [`PrefixTree::evict`] can give back: nobody but the tree holds them.
    pub fn evictable(&self) -> usize {
        // A sequence that holds a block holds all before it, so what is free to go is whole branches.
        self.nodes.iter().filter(|node| node.block.as_ref().is_some_and(idle)).count()
    }

    /// How many of the first tokens are here.
    pub fn longest(&self, salt: &str, tokens: &[u32]) -> usize {
        self.walk(salt, tokens).iter().map(|&(_, rows)| rows).sum()
    }

    /// A cache on `pool` that begins with as many of the first tokens as are here.
    pub fn begin(&mut self, pool: &Arc<BlockPool>, salt: &str, tokens: &[u32]) -> PagedKvCache {
        let path = self.walk(salt, tokens);
        let rows = path.iter().map(|&(_, rows)| rows).sum();
        let blocks = path.iter().filter_map(|&(node, _)| self.nodes[node].block.clone()).collect();
        for (node, _) in path {
            self.touch(node);
        }
        PagedKvCache::starting_with(pool.clone(), blocks, rows)
    }

    /// Keeps the blocks of a cache, which holds `tokens`: the full ones, and with `last` the one that is
    /// not full too, which must not grow any more. A block that is here already takes the place of the
    /// cache's own, which holds the same bits.
    pub fn keep(&mut self, salt: &str, tokens: &[u32], cache: &mut PagedKvCache, last: bool) {
        let full = tokens.len() / self.block_rows * self.block_rows;
        let tokens = if last { tokens } else { &tokens[..full] };
        let mut at = match self.roots.get(salt) {
            Some(&root) => root,
            None if tokens.is_empty() => return,
            None => {
                let root = self.add(None, Box::default(), usize::MAX);
                self.roots.insert(salt.into(), root);
                root
            }
        };
        for (key, block) in tokens.chunks(self.block_rows).zip(cache.blocks_mut()) {
            if let Some(&child) = self.nodes[at].children.get(key) {
                if let Some(known) = &self.nodes[child].block {
                    *block = known.clone();
                }
                at = child;
                self.touch(at);
                continue;
            }
            let (before, after) = self.neighbours(at, key);
            if let Some((longer, child)) = after
                && longer.starts_with(key)
            {
                self.touch(child); // all of these rows are in a longer one
                return;
            }
            // Of siblings none begins another, so one at most is what the new one says, and less.
            let shorter = before.filter(|(shorter, _)| key.starts_with(shorter)).map(|(_, child)| child);
            at = self.add(Some(block.clone()), key.into(), at);
            if let Some(shorter) = shorter {
                self.remove(shorter);
            }
        }
    }

    /// Gives back the block whose last use is longest ago, of those that nobody holds and nothing
    /// follows. `false`: there is none.
    pub fn evict(&mut self) -> bool {
        let unheld = |&&(_, node): &&(u64, usize)| self.nodes[node].block.as_ref().is_some_and(idle);
        let Some(&(_, node)) = self.leaves.iter().find(unheld) else {
            return false;
        };
        self.remove(node);
        true
    }

    /// `(node, rows)` from the first block on: whole blocks, and at the end a part of one.
    fn walk(&self, salt: &str, tokens: &[u32]) -> Vec<(usize, usize)> {
        let mut path = Vec::new();
        let Some(&root) = self.roots.get(salt) else {
            return path;
        };
        let mut at = root;
        for key in tokens.chunks(self.block_rows) {
            // In their order, those that have most in common with the key stand beside it.
            let (before, after) = self.neighbours(at, key);
            let common = |(tokens, node): (&[u32], usize)| {
                (tokens.iter().zip(key).take_while(|(a, b)| a == b).count(), node)
            };
            let Some((rows, node)) = before.into_iter().chain(after).map(common).max() else {
                break;
            };
            if rows > 0 {
                path.push((node, rows));
            }
            if rows < self.block_rows {
                break;
            }
            at = node;
        }
        path
    }

    /// The children whose keys are at or before `key`, and after it.
    #[allow(clippy::type_complexity)] // the pair is taken apart at once
    fn neighbours(&self, at: usize, key: &[u32]) -> (Option<(&[u32], usize)>, Option<(&[u32], usize)>) {
        let children = &self.nodes[at].children;
        let before = children.range::<[u32], _>((Bound::Unbounded, Bound::Included(key))).next_back();
        let after = children.range::<[u32], _>((Bound::Excluded(key), Bound::Unbounded)).next();
        (before.map(|(key, &node)| (&**key, node)), after.map(|(key, &node)| (&**key, node)))
    }

    fn touch(&mut self, node: usize) {
        self.now += 1;
        let leaf = self.leaves.remove(&(self.nodes[node].last_use, node));
        self.nodes[node].last_use = self.now;
        if leaf {
            self.leaves.insert((self.now, node));
        }
    }

    fn add(&mut self, block: Option<Arc<Block>>, tokens: Box<[u32]>, parent: usize) -> usize {
        self.now += 1;
        let node =
            Node { block, tokens: tokens.clone(), parent, children: BTreeMap::new(), last_use: self.now };
        let index = match self.unused.pop() {
            Some(index) => {
                self.nodes[index] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        if parent != usize::MAX {
            self.leaves.remove(&(self.nodes[parent].last_use, parent));
            self.nodes[parent].children.insert(tokens, index);
            self.leaves.insert((self.now, index));
        }
        index
    }

    /// Takes out a leaf, and its root if that has nothing left.
    fn remove(&mut self, leaf: usize) {
        let node = &mut self.nodes[leaf];
        let (parent, last_use) = (node.parent, node.last_use);
        node.block = None;
        let tokens = std::mem::take(&mut node.tokens);
        self.leaves.remove(&(last_use, leaf));
        self.unused.push(leaf);
        let above = &mut self.nodes[parent];
        above.children.remove(&tokens);
        if !above.children.is_empty() {
            return;
        }
        if above.block.is_some() {
            self.leaves.insert((above.last_use, parent));
        } else {
            self.roots.retain(|_, &mut root| root != parent);
            self.unused.push(parent);
        }
    }
}

fn idle(block: &Arc<Block>) -> bool {
    Arc::strong_count(block) == 1
}
