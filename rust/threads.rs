//! How rows and heads are split over workers.
//!
//! A decode step hands work over about 150 times, with 50 to 200 microseconds of work each, so a
//! hand-over must cost well under a microsecond and allocate nothing. Tasks are claimed one by one
//! from a counter: a worker that the operating system holds back is waited for no longer than the
//! task it is in. Which worker runs a task never matters to a result.
#![allow(unsafe_code)] // a job on the caller's stack is lent to the workers while `run` lasts

use crate::error::{Error, Result};
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle worker looks for work before it sleeps: longer than what lies between two
/// decode steps, short enough that an idle process burns no core.
const SPIN: Duration = Duration::from_micros(400);
/// The most workers that can be asked for.
pub const MAX_THREADS: usize = 1024;

/// A fixed set of workers; the caller of [`Threads::run`] is one of them.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One job at a time; other callers wait their turn.
    turn: Mutex<()>,
    /// A forked child has no workers: it runs its jobs alone.
    process: u32,
}

type Job = *const (dyn Fn(usize, usize) + Sync);

struct Shared {
    /// `epoch << 17 | OPEN | number of workers inside the job`. A worker enters only while the job
    /// is open; the caller closes it and waits until all have left before the job goes away.
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    tasks: AtomicUsize,
    next: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    asleep: Vec<AtomicBool>,
}

const OPEN: u64 = 1 << 16;
const INSIDE: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 17;

// SAFETY: `job` is written by the one caller that holds the turn, while no worker is inside.
unsafe impl Sync for Shared {}
// SAFETY: the job it points to is `Sync`.
unsafe impl Send for Shared {}

impl Threads {
    /// `count` workers, the caller included.
    pub fn new(count: usize) -> Result<Self> {
        if !(1..=MAX_THREADS).contains(&count) {
            return Err(Error::argument(format!("threads must be 1 to {MAX_THREADS}, not {count}")));
        }
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            tasks: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: (1..count).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut threads =
            Self { shared, workers: Vec::new(), turn: Mutex::new(()), process: std::process::id() };
        let (ready, started) = std::sync::mpsc::channel();
        for index in 0..count - 1 {
            let (shared, ready) = (threads.shared.clone(), ready.clone());
            let work = move || {
                let _ = ready.send(()); // the receiver waits below
                drop(ready);
                shared.work(index);
            };
            let worker = std::thread::Builder::new()
                .name(format!("qwen-rs-{}", index + 1))
                .spawn(work)
                .map_err(|source| {
                    let what =
                        format!("{count} worker threads were wanted, and no more than {} start", index + 1);
                    Error::System { what, source }
                })?;
            threads.workers.push(worker);
        }
        drop(ready);
        // A thread's own start allocates: that is over when all have reported.
        started.iter().for_each(drop);
        Ok(threads)
    }

    /// As many as this process may use (affinity and control groups count).
    pub fn default_count() -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job` with every number below `tasks`, each once, on all workers; returns when all are
    /// done. Allocates nothing. A panic in a task is raised again here, after the others are done.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync)) {
        self.run_on(tasks, &|_, task| job(task));
    }

    /// [`Threads::run`], and `job` is told first which worker calls it, a number below
    /// [`Threads::count`]: a worker runs one task at a time.
    pub fn run_on(&self, tasks: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() || self.process != std::process::id() {
            (0..tasks).for_each(|task| job(0, task));
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.shared;
        // SAFETY: this thread holds the turn and no worker is inside, so nobody reads `job`; the
        // lifetime is given back below: `run` returns only after the last worker has left.
        unsafe {
            let job: &'static (dyn Fn(usize, usize) + Sync) = std::mem::transmute(job);
            *shared.job.get() = Some(job);
        }
        shared.next.store(0, Ordering::Relaxed);
        shared.tasks.store(tasks, Ordering::Relaxed);
        let epoch = shared.state.load(Ordering::Relaxed) / EPOCH + 1;
        shared.state.store((epoch * EPOCH) | OPEN, Ordering::SeqCst);
        for (asleep, worker) in shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        shared.claim(0, job);
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while shared.state.load(Ordering::Acquire) & INSIDE != 0 {
            pause(&mut spins);
        }
        if shared.panicked.swap(false, Ordering::Relaxed) {
            panic!("a task panicked");
        }
    }

    /// Calls `f` with every item, each once, on all workers.
    pub fn for_each_mut<T: Send>(&self, items: &mut [T], f: impl Fn(usize, &mut T) + Sync) {
        let len = items.len();
        let items = Disjoint::new(items);
        self.run(len, &|i| {
            // SAFETY: `run` calls each number once.
            f(i, &mut unsafe { items.part(i..i + 1) }[0]);
        });
    }

    /// Calls `f` with every row of `[rows, width]` and its number, on all workers, `rows_per_task`
    /// rows a task.
    pub fn for_each_row(
        &self,
        out: &mut [f32],
        width: usize,
        rows_per_task: usize,
        f: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let rows = out.len() / width;
        assert_eq!(rows * width, out.len());
        let out = Disjoint::new(out);
        self.run(rows.div_ceil(rows_per_task), &|task| {
            for row in task * rows_per_task..rows.min((task + 1) * rows_per_task) {
                // SAFETY: `run` calls each task once, and its rows are its own.
                f(row, unsafe { out.part(row * width..(row + 1) * width) });
            }
        });
    }

    /// Calls `f` with row `chosen[i]` of `out[_, width]` for every `i`, each once, on all workers.
    ///
    /// # Panics
    /// If the chosen rows do not ascend, or are not in `out`.
    pub fn for_each_chosen_row(
        &self,
        out: &mut [f32],
        width: usize,
        chosen: &[usize],
        f: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        assert!(chosen.is_sorted_by(|a, b| a < b));
        assert!(chosen.last().is_none_or(|&last| last < out.len() / width));
        let out = Disjoint::new(out);
        self.run(chosen.len(), &|i| {
            // SAFETY: rows ascend, so each is one task's own.
            f(i, unsafe { out.part(chosen[i] * width..(chosen[i] + 1) * width) });
        });
    }

    /// [`Threads::run`], and each task is lent `words` of `scratch` that no other task uses meanwhile.
    ///
    /// # Panics
    /// If `scratch` does not hold so many for each worker.
    pub fn run_with(
        &self,
        scratch: &mut [f32],
        words: usize,
        tasks: usize,
        job: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        assert!(scratch.len() >= words * self.count());
        let scratch = Disjoint::new(scratch);
        self.run_on(tasks, &|worker, task| {
            // SAFETY: a worker runs one task at a time, and its number is below the count.
            job(task, unsafe { scratch.part(worker * words..(worker + 1) * words) });
        });
    }
}

/// A slice that tasks use at the same time, each its own part of it.
///
/// It holds the only borrow of the slice, so nobody but the tasks uses it meanwhile; that no two tasks use
/// the same value is what those who ask for a part answer for. A value is then used by one task at a time,
/// on whichever thread, which is what `T: Send` allows.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Disjoint<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Disjoint<'_, T> {}

// SAFETY: as said above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as said above.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// # Safety
    /// While the part is used, nothing else uses a value of it, by [`Disjoint::at`] or another part.
    #[inline(always)]
    pub(crate) unsafe fn part(self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice, which is borrowed for 'a; the caller answers for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Where value `i` is. To use it has the same duty as [`Disjoint::part`], and `i` must be in the slice.
    #[inline(always)]
    pub(crate) fn at(self, i: usize) -> *mut T {
        self.start.wrapping_add(i)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return; // the workers are the parent's
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker never panics: `claim` catches what tasks raise.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn claim(&self, worker: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let tasks = self.tasks.load(Ordering::Relaxed);
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            if catch_unwind(AssertUnwindSafe(|| job(worker, task))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
        }
    }

    fn work(&self, index: usize) {
        let mut done = 0; // the epoch of the last job entered
        loop {
            let Some(state) = self.wait(index, done) else {
                return;
            };
            if self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            done = state / EPOCH;
            // SAFETY: the job was open when this worker entered, so the caller waits for it to leave.
            if let Some(job) = unsafe { *self.job.get() } {
                // SAFETY: as above, the job is alive.
                self.claim(index + 1, unsafe { &*job });
            }
            self.state.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Waits for an open job that this worker has not been in; `None` when the pool ends.
    fn wait(&self, index: usize, done: u64) -> Option<u64> {
        let open = || {
            let state = self.state.load(Ordering::SeqCst);
            (state & OPEN != 0 && state / EPOCH != done).then_some(state)
        };
        let started = Instant::now();
        let mut spins = 0u32;
        loop {
            if let Some(state) = open() {
                return Some(state);
            }
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
            pause(&mut spins);
            if spins.is_multiple_of(64) && started.elapsed() > SPIN {
                self.asleep[index].store(true, Ordering::SeqCst);
                while open().is_none() && !self.stop.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                self.asleep[index].store(false, Ordering::SeqCst);
            }
        }
    }
}

/// Waits a moment; after many in a row it lets other threads have the core.
fn pause(spins: &mut u32) {
    *spins = spins.wrapping_add(1);
    if *spins > 4096 && (*spins).is_multiple_of(16) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}
