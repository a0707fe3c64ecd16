//! Who runs: admission, what each sequence brings to the next pass, and who makes room for others.

use super::pace::Pace;
use super::running::Running;
use super::store::Store;
use super::waiting::Waiting;
use crate::model::PREFILL_ROWS;
use std::cmp::Reverse;
use std::time::Duration;

/// How often others may be admitted before a request for which there is no room yet.
const PASSED_AT_MOST: u32 = 16;
/// Of those that wait so many are looked at in a step, however many they are.
const LOOKED_AT: usize = 16;
/// A waiting second counts like so many rows less of a prompt.
const AGEING: f64 = 1024.0;
/// What is left of a chunk's rows goes to another prompt if it is at least so much.
const WORTH_A_CHUNK: usize = 32;

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sequences that run together.
    pub max_num_seqs: usize,
    /// What a step should take at most while others wait for their next token; a chunk of a prompt is as
    /// long as it allows. None: chunks are as long as a pass takes them.
    pub step_goal: Option<Duration>,
}

/// Sequences that wait and that run.
#[derive(Default)]
pub struct Schedule {
    pub waiting: Waiting,
    pub running: Vec<Running>,
    /// Who was preempted last: somebody else is next, if there is anybody.
    last_victim: Option<u64>,
    pub preemptions: u64,
}

impl Schedule {
    /// Lets in those for whom there is room, the preempted first, then by priority and age.
    pub fn admit(&mut self, store: &mut Store, limits: &Limits) {
        let mut at = 0;
        let mut room = None; // counted once for all that are looked at
        while at < LOOKED_AT && self.running.len() < limits.max_num_seqs {
            let Some(next) = self.waiting.iter().nth(at) else {
                return;
            };
            let room_now = *room.get_or_insert_with(|| {
                let others: usize = self.running.iter_mut().map(|s| s.blocks_to_come() + 1).sum();
                store.available().saturating_sub(others)
            });
            // Submission checked that it fits alone.
            if self.running.is_empty() || needed(next, store) <= room_now {
                let id = next.id;
                self.waiting.iter_mut().take(at).for_each(|passed| passed.passed += 1);
                if let Some(mut admitted) = self.waiting.remove(id) {
                    take_up(&mut admitted, store);
                    self.running.push(admitted);
                }
                room = None;
            } else if next.passed < PASSED_AT_MOST && next.preempted == 0 {
                at += 1; // a smaller one may pass
            } else {
                return;
            }
        }
    }

    /// `(sequence, rows)` of the next pass. All decode steps go first, then chunks of prompts.
    pub fn choose(
        &mut self,
        store: &mut Store,
        pace: &Pace,
        limits: &Limits,
        now: Duration,
    ) -> Vec<(u64, usize)> {
        let decodes = |s: &Running| s.decodes() && s.ready() > 0;
        loop {
            let blocks = self.running.iter_mut().filter(|s| decodes(s));
            let blocks: usize = blocks.filter_map(|s| s.held.as_mut()).map(|h| h.blocks_needed(1)).sum();
            if store.make_room(blocks) || !self.preempt(store) {
                break;
            }
        }
        let mut chosen: Vec<_> = self.running.iter().filter(|s| decodes(s)).map(|s| (s.id, 1)).collect();
        let steps = chosen.len();
        let mut prompts: Vec<u64> =
            self.running.iter().filter(|s| !s.decodes() && s.ready() > 0).map(|s| s.id).collect();
        let key = |id: &u64| {
            let sequence = self.of(*id);
            let waited = now.saturating_sub(sequence.submitted).as_secs_f64();
            ((sequence.remaining() as f64 - waited * AGEING) as i64, sequence.rank())
        };
        prompts.sort_by_cached_key(key);
        let mut share = 1.0; // of the step's time that is left for prompts
        let mut taken: Vec<u64> = Vec::new();
        for id in prompts {
            if !self.running.iter().any(|s| s.id == id) {
                continue; // preempted meanwhile
            }
            self.find_more(id, store);
            if self.repeats(id, &taken, store) {
                continue;
            }
            let sequence = self.of(id);
            let most = match limits.step_goal {
                None => PREFILL_ROWS,
                Some(goal) => pace.rows(sequence.rows(), steps > 0, goal),
            };
            let rows = ((most as f64 * share) as usize).min(sequence.ready());
            if rows == 0 || (!taken.is_empty() && rows < sequence.ready().min(WORTH_A_CHUNK)) {
                break;
            }
            if !self.room_for(id, rows, &chosen, store) {
                continue; // and nobody waits for it: the oldest goes on, whoever begins alike
            }
            taken.push(id);
            share -= rows as f64 / most as f64;
            chosen.push((id, rows));
        }
        chosen.retain(|(id, _)| self.running.iter().any(|s| s.id == *id));
        chosen
    }

    /// Makes room for `rows` rows of a prompt beside what is chosen already; for the oldest of all others
    /// are preempted.
    fn room_for(&mut self, id: u64, rows: usize, chosen: &[(u64, usize)], store: &mut Store) -> bool {
        loop {
            let needed = |s: &mut Running| {
                let rows = if s.id == id {
                    rows
                } else {
                    chosen.iter().find(|(other, _)| *other == s.id).map_or(0, |(_, rows)| *rows)
                };
                s.held.as_mut().map_or(0, |held| held.blocks_needed(rows))
            };
            let blocks: usize = self.running.iter_mut().map(needed).sum();
            if store.make_room(blocks) {
                return true;
            }
            if self.oldest() != Some(id) || !self.preempt(store) {
                return false;
            }
        }
    }

    /// Takes up what others have computed of it since.
    fn find_more(&mut self, id: u64, store: &mut Store) {
        let Some(sequence) = self.running.iter_mut().find(|s| s.id == id) else {
            return;
        };
        if sequence.may_share() && store.longest(&sequence.request.salt, &sequence.tokens) > sequence.rows() {
            take_up(sequence, store);
        }
    }

    /// Whether another prompt, which goes first, is about to compute rows of this one.
    fn repeats(&self, id: u64, first: &[u64], store: &Store) -> bool {
        let (Some(block_rows), sequence) = (store.block_rows(), self.of(id)) else {
            return false;
        };
        let alike = |other: &Running| {
            let common = other.tokens.iter().zip(&sequence.tokens).take_while(|(a, b)| a == b).count();
            let common = common.min(sequence.tokens.len() - 1) / block_rows * block_rows;
            common > sequence.rows() && common > other.rows()
        };
        sequence.may_share()
            && first.iter().any(|&other| {
                let other = self.of(other);
                other.request.salt == sequence.request.salt && alike(other)
            })
    }

    fn oldest(&self) -> Option<u64> {
        self.running.iter().min_by_key(|s| s.rank()).map(|s| s.id)
    }

    /// Sends back to the queue whoever has computed least, which it computes again later; never the oldest,
    /// and not who went last if there is anybody else.
    fn preempt(&mut self, store: &mut Store) -> bool {
        let oldest = self.oldest();
        let last = self.last_victim;
        let victims = self.running.iter().enumerate().filter(|(_, s)| Some(s.id) != oldest);
        let Some((at, _)) = victims.min_by_key(|(_, s)| (Some(s.id) == last, s.rows(), Reverse(s.rank())))
        else {
            return false;
        };
        let mut victim = self.running.remove(at);
        if let Some(mut held) = victim.held.take() {
            store.keep(&victim.request.salt, &victim.tokens, &mut held, false);
        }
        victim.preempted += 1;
        self.last_victim = Some(victim.id);
        self.preemptions += 1;
        self.waiting.push(victim);
        true
    }

    fn of(&self, id: u64) -> &Running {
        let Some(sequence) = self.running.iter().find(|s| s.id == id) else {
            unreachable!("only those that run are asked for");
        };
        sequence
    }
}

/// Blocks that must be there for one that waits, beside what those who run still need and a block for each
/// of them: its tokens and a block more. Who was preempted before needs more, so that it does not soon
/// happen again.
fn needed(next: &Running, store: &Store) -> usize {
    let rows = next.tokens.len();
    let found = if next.may_share() { store.longest(&next.request.salt, &next.tokens) } else { 0 };
    let left = next.request.prompt.len() + next.request.max_tokens - rows;
    let more = if next.preempted == 0 { 0 } else { left.min(64 << next.preempted.min(20)) };
    let own = store.blocks(rows + more, found) + 1;
    // Those blocks of the tree that it would share are not to be given back for it.
    own + store.blocks(found, 0)
}

/// Gives a sequence a cache that begins with what is there of it.
fn take_up(sequence: &mut Running, store: &mut Store) {
    let before = sequence.rows();
    let tokens = if sequence.may_share() { &sequence.tokens[..] } else { &[] };
    let held = store.begin(&sequence.request.salt, tokens);
    if sequence.preempted == 0 {
        sequence.cached += held.rows() - before;
    }
    sequence.prompt_logprobs.clear();
    sequence.held = Some(held);
}
