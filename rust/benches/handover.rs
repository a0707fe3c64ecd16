//! What it costs to hand work over: our workers beside rayon's, in one run, taking turns.
//!
//!     cargo bench --bench handover
//!
//! A decode step of the 0.6B model hands over about 150 times with 50 to 200 microseconds of work
//! each. Here 150 jobs of 16 tasks that spin for 5 microseconds each; what goes beyond the work
//! itself is the cost. It is why `threads.rs` exists.

use qwen_rs::threads::Threads;
use rayon::prelude::*;
use std::time::{Duration, Instant};

const JOBS: usize = 150;
const TASKS: usize = 16;
const WORK: Duration = Duration::from_micros(5);

fn spin(_task: usize) {
    let started = Instant::now();
    while started.elapsed() < WORK {
        std::hint::spin_loop();
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn main() {
    let count = Threads::default_count();
    let ours = Threads::new(count).expect("threads start");
    let rayon = rayon::ThreadPoolBuilder::new().num_threads(count).build().expect("threads start");
    let (mut ours_took, mut rayon_took) = (Vec::new(), Vec::new());
    for _ in 0..51 {
        let started = Instant::now();
        (0..JOBS).for_each(|_| ours.run(TASKS, &spin));
        ours_took.push(started.elapsed());
        let started = Instant::now();
        // The step runs inside the pool, which is the cheapest way to hand over with rayon.
        rayon.install(|| (0..JOBS).for_each(|_| (0..TASKS).into_par_iter().for_each(spin)));
        rayon_took.push(started.elapsed());
    }
    let work = WORK * (TASKS.div_ceil(count) * JOBS) as u32;
    let cost = |took| (median(took).saturating_sub(work) / JOBS as u32).as_nanos();
    println!("{count} threads, cost of a hand-over, medians of 51 runs:");
    println!("  ours  {:>6} ns", cost(ours_took));
    println!("  rayon {:>6} ns", cost(rayon_took));
}
