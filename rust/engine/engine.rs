//! `Engine`: what comes in, and a step.

use super::clock::Clock;
use super::pace::Pace;
use super::request::{Event, Logprob, Outcome, Request};
use super::running::Running;
pub use super::schedule::Limits;
use super::schedule::Schedule;
use super::store::{Held, Store};
use crate::error::{Error, Result};
use crate::model::{Interrupt, Logits, Model, Sequence};
use crate::sampler::log_probabilities;
use crate::tensor::zeros;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Sequences that share a model's passes.
pub struct Engine {
    model: Arc<Model>,
    limits: Limits,
    clock: Box<dyn Clock>,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    /// Somebody is to be cancelled: a pass of prompts alone stops for it.
    cancelling: AtomicBool,
    /// Rows that a sequence may have at most.
    most_rows: usize,
    /// As of the last step: nobody waits for a pass to read them.
    told: Mutex<Counters>,
    core: Mutex<Core>,
}

#[derive(Default)]
struct Inbox {
    next: u64,
    submitted: Vec<Running>,
    cancelled: Vec<u64>,
    allowed: Vec<(u64, Vec<u32>)>,
    woken: bool,
}

struct Core {
    schedule: Schedule,
    store: Store,
    pace: Pace,
    counters: Counters,
    logits: Vec<f32>,
    /// The last pass was stopped for one that was cancelled.
    stopped: bool,
}

/// What an engine has done, and what it holds now.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    pub steps: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    pub preemptions: u64,
    /// Time in passes.
    pub busy: Duration,
    pub running: usize,
    pub waiting: usize,
    /// Blocks of the pool: in all, free, and kept for others while nobody holds them.
    pub blocks: usize,
    pub free_blocks: usize,
    pub cached_blocks: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    pub fn new(model: Arc<Model>, store: Store, limits: Limits, clock: Box<dyn Clock>) -> Result<Self> {
        if limits.max_num_seqs == 0 {
            return Err(Error::argument("max_num_seqs must be at least 1"));
        }
        let most_rows = store.most_rows();
        let core = Core {
            schedule: Schedule::default(),
            store,
            pace: Pace::default(),
            counters: Counters::default(),
            logits: Vec::new(),
            stopped: false,
        };
        Ok(Self {
            model,
            limits,
            clock,
            inbox: Mutex::default(),
            arrived: Condvar::new(),
            cancelling: AtomicBool::new(false),
            most_rows,
            told: Mutex::new(core.counters()),
            core: Mutex::new(core),
        })
    }

    /// Puts a request into the queue; its events carry the number that this returns.
    ///
    /// # Errors
    /// `Argument` for one that cannot be run; `Cache`, with both numbers, for one that could never fit.
    pub fn submit(&self, request: Request) -> Result<u64> {
        let config = self.model.config();
        request.check(config.vocab_size, config.max_position_embeddings)?;
        let rows = request.prompt.len() + request.max_tokens - 1; // the last token is never run
        if rows > self.most_rows {
            let most = self.most_rows;
            return Err(Error::cache(format!(
                "the request needs room for {rows} tokens, and the KV cache has {most}"
            )));
        }
        let isa = self.model.backend().isa;
        let mut running = Running::new(0, request, isa, self.clock.now())?;
        let mut inbox = lock(&self.inbox);
        running.id = inbox.next;
        inbox.next += 1;
        let id = running.id;
        inbox.submitted.push(running);
        self.arrived.notify_all();
        Ok(id)
    }

    /// Ends a sequence: no event of it comes after the next step. One that has ended may be named too.
    pub fn cancel(&self, id: u64) {
        let mut inbox = lock(&self.inbox);
        inbox.cancelled.push(id);
        self.cancelling.store(true, Ordering::Release);
        drop(inbox);
        self.arrived.notify_all();
    }

    /// Which tokens the next one of a constrained sequence is chosen from, a bit each.
    pub fn allow(&self, id: u64, tokens: Vec<u32>) {
        lock(&self.inbox).allowed.push((id, tokens));
        self.arrived.notify_all();
    }

    /// Makes a step that waits return.
    pub fn wake(&self) {
        lock(&self.inbox).woken = true;
        self.arrived.notify_all();
    }

    /// What it has done, and what it held after the last step; who runs and waits is as of now.
    pub fn counters(&self) -> Counters {
        let inbox = lock(&self.inbox);
        let told = *lock(&self.told);
        Counters { waiting: told.waiting + inbox.submitted.len(), ..told }
    }

    /// Waits up to `wait` for work, then runs one pass and returns what came of it.
    ///
    /// # Errors
    /// `Interrupted`; all sequences are as before then.
    pub fn step(&self, wait: Duration, interrupt: Interrupt<'_>) -> Result<Vec<Event>> {
        let mut core = lock(&self.core);
        let core = &mut *core;
        let mut chosen = self.receive_and_choose(core);
        if chosen.is_empty() && !wait.is_zero() {
            *lock(&self.told) = core.counters(); // of who was cancelled
            self.wait(wait);
            chosen = self.receive_and_choose(core);
        }
        let events = match chosen.is_empty() {
            true => Ok(Vec::new()),
            false => self.run(core, &chosen, interrupt),
        };
        *lock(&self.told) = core.counters();
        events
    }

    fn receive_and_choose(&self, core: &mut Core) -> Vec<(u64, usize)> {
        self.receive(core);
        core.schedule.admit(&mut core.store, &self.limits);
        let chosen = core.schedule.choose(&mut core.store, &core.pace, &self.limits, self.clock.now());
        let mut told = lock(&self.told);
        (told.running, told.waiting) = (core.schedule.running.len(), core.schedule.waiting.len());
        chosen
    }

    fn wait(&self, wait: Duration) {
        let mut inbox = lock(&self.inbox);
        let nothing = |inbox: &mut Inbox| {
            inbox.submitted.is_empty()
                && inbox.cancelled.is_empty()
                && inbox.allowed.is_empty()
                && !inbox.woken
        };
        inbox = self
            .arrived
            .wait_timeout_while(inbox, wait, nothing)
            .map_or_else(|poisoned| poisoned.into_inner().0, |(inbox, _)| inbox);
        inbox.woken = false;
    }

    /// Takes what came in.
    fn receive(&self, core: &mut Core) {
        let mut inbox = lock(&self.inbox);
        self.cancelling.store(false, Ordering::Release);
        inbox.submitted.drain(..).for_each(|submitted| core.schedule.waiting.push(submitted));
        lock(&self.told).waiting = core.schedule.waiting.len(); // with the inbox: nobody is missed
        let (cancelled, allowed) = (std::mem::take(&mut inbox.cancelled), std::mem::take(&mut inbox.allowed));
        drop(inbox);
        for (id, tokens) in allowed {
            if let Some(sequence) = core.sequence(id) {
                sequence.allowed = Some(tokens);
            }
        }
        for id in cancelled {
            core.retire(id);
        }
    }

    fn run(&self, core: &mut Core, chosen: &[(u64, usize)], interrupt: Interrupt<'_>) -> Result<Vec<Event>> {
        let decodes = core.schedule.running.iter().any(|s| s.decodes() && has(chosen, s.id));
        // A pass of prompts stops for one of them that is cancelled. The next does so only if all are, so
        // that the others come to their ends.
        let again = core.stopped;
        let cancelled = || {
            let inbox = lock(&self.inbox);
            let mut gone = chosen.iter().map(|(id, _)| inbox.cancelled.contains(id));
            if again { gone.all(|gone| gone) } else { gone.any(|gone| gone) }
        };
        let stopped = || interrupt() || (!decodes && self.cancelling.load(Ordering::Acquire) && cancelled());
        let events = self.pass(core, chosen, &stopped);
        core.stopped = matches!(events, Err(Error::Interrupted)) && !interrupt();
        match events {
            Ok(events) => Ok(events),
            Err(Error::Interrupted) if core.stopped => Ok(Vec::new()), // the next step takes out who is cancelled
            Err(Error::Interrupted) => Err(Error::Interrupted),
            Err(error) if chosen.len() == 1 => {
                let id = chosen[0].0;
                core.discard(id);
                Ok(vec![Event { id, outcome: Outcome::Failed(error) }])
            }
            Err(_) => {
                // One of them fails: alone, each gives what it gives in any company.
                let mut events = Vec::new();
                for one in chosen {
                    match self.run(core, &[*one], interrupt) {
                        Ok(more) => events.extend(more),
                        // What the others gave is told; the rest come with the next step.
                        Err(Error::Interrupted) if !events.is_empty() => break,
                        Err(error) => return Err(error),
                    }
                }
                Ok(events)
            }
        }
    }

    /// One pass, and a token for each sequence whose rows are all computed then.
    fn pass(&self, core: &mut Core, chosen: &[(u64, usize)], stopped: Interrupt<'_>) -> Result<Vec<Event>> {
        let started = self.clock.now();
        let vocab = self.model.config().vocab_size;
        let Core { schedule, store, pace, counters, logits, .. } = core;
        let rows_of = |id: u64| chosen.iter().find(|(other, _)| *other == id).map_or(0, |(_, rows)| *rows);
        let mut part: Vec<&mut Running> = schedule.running.iter_mut().filter(|s| has(chosen, s.id)).collect();
        let chunks: Vec<_> =
            part.iter().filter(|s| !s.decodes()).map(|s| (s.rows(), rows_of(s.id))).collect();
        let decodes = chunks.len() < part.len();
        let wanted: Vec<Logits> = part.iter().map(|s| s.wanted(rows_of(s.id))).collect();
        let mut sequences = Vec::with_capacity(part.len());
        for (sequence, &wanted) in part.iter_mut().zip(&wanted) {
            let (rows, past) = (rows_of(sequence.id), sequence.rows());
            let tokens = &sequence.tokens[past..past + rows];
            if let Some(held) = &mut sequence.held {
                held.reserve_prompt(sequence.tokens.len())?;
                sequences.push(Sequence::new(held.cache(), tokens, wanted));
            }
        }
        let values = sequences.iter().map(Sequence::logits_rows).sum::<usize>() * vocab;
        if logits.len() < values {
            *logits = zeros(values)?;
        }
        self.model.forward(&mut sequences, stopped, &mut logits[..values])?;
        let took = self.clock.now().saturating_sub(started);
        drop(sequences);
        match chunks.is_empty() {
            true => pace.saw_decode(took),
            false => pace.saw_prefill(&chunks, decodes, took),
        }
        counters.steps += 1;
        counters.prompt_tokens += chunks.iter().map(|&(_, rows)| rows as u64).sum::<u64>();
        counters.busy += took;
        let mut work = Vec::with_capacity(part.len());
        let mut rest = &logits[..values];
        for (sequence, wanted) in part.iter_mut().zip(wanted) {
            let rows = rows_of(sequence.id);
            let count = match wanted {
                Logits::None => 0,
                Logits::Last => 1,
                Logits::All => rows,
            };
            let (own, others) = rest.split_at(count * vocab);
            rest = others;
            sequence.took += took;
            sequence.keep_full(rows, store);
            work.push(Work { sequence, rows, logits: own, token: None });
        }
        let threads = &self.model.backend().threads;
        threads.for_each_mut(&mut work, |_, work| work.sample(vocab));
        let mut events = Vec::new();
        let mut ended = Vec::new();
        for work in work {
            let (id, before) = (work.sequence.id, events.len());
            work.tell(&mut events);
            for event in &events[before..] {
                match &event.outcome {
                    Outcome::Token { last, .. } => {
                        counters.generated_tokens += 1;
                        if *last {
                            ended.push((id, true));
                        }
                    }
                    Outcome::Failed(_) => ended.push((id, false)),
                    Outcome::PromptLogprobs(_) => {}
                }
            }
        }
        for (id, whole) in ended {
            if whole { core.retire(id) } else { core.discard(id) }
        }
        Ok(events)
    }
}

/// A sequence's part of what a pass gave.
struct Work<'a> {
    sequence: &'a mut Running,
    rows: usize,
    logits: &'a [f32],
    token: Option<Result<(u32, Vec<Logprob>)>>,
}

impl Work<'_> {
    fn sample(&mut self, vocab: usize) {
        let sequence = &mut *self.sequence;
        let past = sequence.rows() - self.rows;
        if sequence.wants_prompt_logprobs()
            && let Some(count) = sequence.request.prompt_logprobs
        {
            for (row, logits) in self.logits.chunks(vocab).enumerate() {
                if let Some(&next) = sequence.request.prompt.get(past + row + 1) {
                    sequence.prompt_logprobs.push(log_probabilities(logits, next, count));
                }
            }
        }
        if sequence.remaining() > 0 || self.logits.is_empty() {
            return;
        }
        let logits = &self.logits[self.logits.len() - vocab..];
        let allowed = sequence.allowed.take();
        let token = sequence.sampler.sample_allowed(logits, allowed.as_deref());
        self.token = Some(token.map(|token| {
            let logprobs = sequence.request.logprobs.map(|count| log_probabilities(logits, token, count));
            (token, logprobs.unwrap_or_default())
        }));
    }

    fn tell(self, events: &mut Vec<Event>) {
        let sequence = self.sequence;
        let id = sequence.id;
        let first = sequence.tokens.len() == sequence.request.prompt.len();
        let outcome = match self.token {
            None => return,
            Some(Err(error)) => Outcome::Failed(error),
            Some(Ok((token, logprobs))) => {
                // Told once: a sequence that is preempted later computes none of them again.
                if first && sequence.request.prompt_logprobs.take().is_some() {
                    let told = std::mem::take(&mut sequence.prompt_logprobs);
                    events.push(Event { id, outcome: Outcome::PromptLogprobs(told) });
                }
                sequence.tokens.push(token);
                let generated = sequence.tokens.len() - sequence.request.prompt.len();
                let last = generated == sequence.request.max_tokens || sequence.request.ends.contains(&token);
                let took = std::mem::take(&mut sequence.took);
                let kv_bytes = sequence.held.as_ref().map_or(0, Held::bytes);
                Outcome::Token { token, logprobs, took, cached: sequence.cached, kv_bytes, last }
            }
        };
        events.push(Event { id, outcome });
    }
}

impl Core {
    fn counters(&self) -> Counters {
        let (blocks, free_blocks, cached_blocks) = self.store.usage();
        Counters {
            preemptions: self.schedule.preemptions,
            running: self.schedule.running.len(),
            waiting: self.schedule.waiting.len(),
            blocks,
            free_blocks,
            cached_blocks,
            ..self.counters
        }
    }

    fn sequence(&mut self, id: u64) -> Option<&mut Running> {
        let Schedule { waiting, running, .. } = &mut self.schedule;
        running.iter_mut().find(|s| s.id == id).or_else(|| waiting.get_mut(id))
    }

    /// Ends a sequence; what it has computed is kept for others.
    fn retire(&mut self, id: u64) {
        if let Some(mut sequence) = self.take_out(id)
            && let Some(held) = &mut sequence.held
        {
            self.store.keep(&sequence.request.salt, &sequence.tokens, held, true);
        }
    }

    /// Ends a sequence that failed.
    fn discard(&mut self, id: u64) {
        self.take_out(id);
    }

    fn take_out(&mut self, id: u64) -> Option<Running> {
        let Schedule { waiting, running, .. } = &mut self.schedule;
        let sequence = match running.iter().position(|s| s.id == id) {
            Some(at) => running.remove(at),
            None => waiting.remove(id)?,
        };
        self.counters.cached_tokens += sequence.cached as u64;
        Some(sequence)
    }
}

fn has(chosen: &[(u64, usize)], id: u64) -> bool {
    chosen.iter().any(|(other, _)| *other == id)
}
