//! How many rows of prompts a step takes, so that it stays under a time goal: learned from the steps
//! before.
//!
//! A step takes the time of its decode steps alone, and for each row of a prompt a time that grows with
//! its depth, `a + b x depth`, by least squares over the recent steps. How a prompt is cut never changes a
//! bit of the result, so a guess that is wrong costs time alone.

use crate::model::PREFILL_ROWS;
use std::time::Duration;

/// What a step of the past counts for, a step later.
const KEPT: f64 = 0.95;
/// Rows of the first chunk, when nothing is known.
const FIRST: usize = 64;
/// The least rows of a chunk: fewer cost almost as much.
const LEAST: usize = 8;
/// Chunks are whole numbers of so many rows: with two heads of a group, of the least tile of attention.
const GRAIN: usize = 2;

/// What a step may take, in goals, when decode steps alone take much of one.
const STRETCHED: f64 = 1.6;
/// What a step of prompts alone may take, in goals.
const ALONE: f64 = 4.0;

#[derive(Default)]
pub struct Pace {
    /// Seconds of a pass of decode steps alone.
    decode: f64,
    /// Weighted sums over steps of x x, x z, z z, x t, z t, with x rows, z rows x depth, t seconds.
    sums: [f64; 5],
}

impl Pace {
    /// A pass of decode steps alone took so long.
    pub fn saw_decode(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        self.decode = if self.decode == 0.0 { seconds } else { 0.8 * self.decode + 0.2 * seconds };
    }

    /// A pass with chunks of prompts, `(first position, rows)` each, and with decode steps or without.
    pub fn saw_prefill(&mut self, chunks: &[(usize, usize)], decodes: bool, took: Duration) {
        let x: f64 = chunks.iter().map(|&(_, rows)| rows as f64).sum();
        let z: f64 = chunks.iter().map(|&(past, rows)| work(past, rows)).sum();
        let rest = if decodes { self.decode } else { 0.0 };
        let t = (took.as_secs_f64() - rest).max(0.0);
        for (sum, value) in self.sums.iter_mut().zip([x * x, x * z, z * z, x * t, z * t]) {
            *sum = *sum * KEPT + value;
        }
    }

    /// Rows from position `past` on that keep a step under `goal`, at most [`PREFILL_ROWS`] and at least a
    /// few, so that every prompt comes to its end.
    ///
    /// Where decode steps alone take more than a quarter of the goal, prompts get three times as much as
    /// they: up to [`STRETCHED`] goals, or prompts would take many times what they take alone. Where nobody
    /// decodes, nobody's stream waits, and a longer step serves prompts better.
    pub fn rows(&self, past: usize, decodes: bool, goal: Duration) -> usize {
        let Some((a, b)) = self.costs() else {
            return FIRST;
        };
        let goal = goal.as_secs_f64();
        let left = match decodes {
            true => (goal - self.decode).max(3.0 * self.decode).min(STRETCHED * goal - self.decode),
            false => ALONE * goal,
        };
        let fits = |rows: usize| a * rows as f64 + b * work(past, rows) <= left;
        let (mut least, mut most) = (LEAST / GRAIN, PREFILL_ROWS / GRAIN);
        while least < most {
            let middle = (least + most).div_ceil(2);
            if fits(middle * GRAIN) { least = middle } else { most = middle - 1 }
        }
        least * GRAIN
    }

    /// Seconds of a row, and of a row for each position before it; neither is below 0.
    fn costs(&self) -> Option<(f64, f64)> {
        let [xx, xz, zz, xt, zt] = self.sums;
        if xx == 0.0 {
            return None;
        }
        let determinant = xx * zz - xz * xz;
        if determinant > 1e-6 * xx * zz {
            let a = (xt * zz - zt * xz) / determinant;
            let b = (zt * xx - xt * xz) / determinant;
            if a >= 0.0 && b >= 0.0 {
                return Some((a, b));
            }
        }
        Some((xt / xx, 0.0))
    }
}

/// The sum of the positions of `rows` rows from `past` on.
fn work(past: usize, rows: usize) -> f64 {
    rows as f64 * (past as f64 + rows as f64 / 2.0)
}
