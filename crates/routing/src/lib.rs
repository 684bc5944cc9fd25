//! Where a request should run: a snapshot of workers, the load booked on them, and a choice with its reasons.
//!
//! Pure: the caller brings the snapshot, the overlaps and the randomness. `worker` is the snapshot, `load` what is running,
//! `cost` the formula, `select` filter, score and pick.
#![forbid(unsafe_code)]

pub mod cost;
pub mod load;
pub mod select;
pub mod worker;

pub use cost::{CostConfig, CostConfigError, Terms};
pub use load::{ActiveLoad, BookingId, Prompt};
pub use select::{Decision, Exclusion, Mode, Refusal, Request, Scored, Selector, Verdict};
pub use worker::{Worker, WorkerSet};
