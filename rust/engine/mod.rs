//! Many sequences at once: requests join and leave a running batch, and each gets the tokens that it
//! gets alone.
//!
//! [`Engine::step`] is all there is to drive: it takes what came in, chooses what each sequence brings to
//! one pass ([`schedule`]), runs it, samples, and returns what happened.

mod clock;
#[allow(clippy::module_inception)] // the struct gives the folder its name
mod engine;
mod pace;
mod request;
mod running;
mod schedule;
mod store;
mod waiting;

pub use clock::{Clock, SystemClock};
pub use engine::{Counters, Engine, Limits};
pub use request::{Event, Logprob, Outcome, Request};
pub use store::Store;
