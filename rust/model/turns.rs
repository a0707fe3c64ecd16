//! Whose pass runs: callers of one model take turns, in the order in which they came.
//!
//! The turn is held for a pass, not for a prompt, so that a long prompt stops nobody's stream for longer
//! than that. A caller that waits goes on looking for an interrupt. A signal handler that runs in the
//! middle of a pass, on the thread whose turn it is, may start passes of its own: it works in storage of
//! its own. A forked child has none of the parent's threads, so it has turns of its own too.

use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

/// Asked now and then: `true` stops the pass.
pub type Interrupt<'a> = &'a (dyn Fn() -> bool + Sync);

/// How often a waiting caller looks for an interrupt.
const LOOK: Duration = Duration::from_millis(50);

/// Turns on a `T` that one pass uses at a time.
pub struct Turns<T> {
    process: u32,
    queue: Mutex<Queue>,
    freed: Condvar,
    value: Mutex<T>,
    /// Of a child that was forked from this process.
    child: OnceLock<Box<Self>>,
}

#[derive(Default)]
struct Queue {
    holder: Option<ThreadId>,
    waiting: VecDeque<Ticket>,
    next: u64,
}

struct Ticket {
    number: u64,
    /// Its owner is looking for an interrupt, which may run anything: those behind it need not wait.
    away: bool,
}

/// The turn, until it is dropped.
pub enum Turn<'a, T> {
    Held {
        turns: &'a Turns<T>,
        value: MutexGuard<'a, T>,
    },
    /// Within a pass of the same thread.
    Nested(T),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind these locks is right even if a panic went by.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Default> Turns<T> {
    pub fn new() -> Self {
        Self {
            process: std::process::id(),
            queue: Mutex::default(),
            freed: Condvar::new(),
            value: Mutex::default(),
            child: OnceLock::new(),
        }
    }

    /// Waits for the turn.
    ///
    /// # Errors
    /// `Interrupted`.
    pub fn take(&self, interrupt: Interrupt<'_>) -> Result<Turn<'_, T>> {
        if self.process != std::process::id() {
            // Another thread may have been anywhere when the fork came: nothing here is touched.
            return self.child.get_or_init(|| Box::new(Self::new())).take(interrupt);
        }
        let thread = std::thread::current().id();
        let mut queue = lock(&self.queue);
        if queue.holder == Some(thread) {
            return Ok(Turn::Nested(T::default()));
        }
        let number = queue.next;
        queue.next += 1;
        queue.waiting.push_back(Ticket { number, away: false });
        loop {
            if queue.holder.is_none() && queue.is_first(number) {
                queue.waiting.retain(|ticket| ticket.number != number);
                queue.holder = Some(thread);
                drop(queue);
                return Ok(Turn::Held { turns: self, value: lock(&self.value) });
            }
            let (woken, waited) =
                self.freed.wait_timeout(queue, LOOK).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            if waited.timed_out() {
                queue.set_away(number, true);
                drop(queue);
                self.freed.notify_all();
                let stop = interrupt();
                queue = lock(&self.queue);
                queue.set_away(number, false);
                if stop {
                    queue.waiting.retain(|ticket| ticket.number != number);
                    drop(queue);
                    self.freed.notify_all();
                    return Err(Error::Interrupted);
                }
            }
        }
    }
}

impl Queue {
    fn is_first(&self, number: u64) -> bool {
        self.waiting.iter().find(|ticket| !ticket.away).is_some_and(|first| first.number == number)
    }

    fn set_away(&mut self, number: u64, away: bool) {
        self.waiting.iter_mut().filter(|ticket| ticket.number == number).for_each(|t| t.away = away);
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        if let Turn::Held { turns, .. } = self {
            // `value` is unlocked a moment later: whoever is next waits for it there.
            lock(&turns.queue).holder = None;
            turns.freed.notify_all();
        }
    }
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Turn::Held { value, .. } => value,
            Turn::Nested(value) => value,
        }
    }
}

impl<T> DerefMut for Turn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Turn::Held { value, .. } => value,
            Turn::Nested(value) => value,
        }
    }
}
