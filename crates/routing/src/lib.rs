//! Where a request should run: a snapshot of workers, the load booked on them, and a choice with its reasons.
//!
//! Pure: the caller brings the snapshot, the overlaps, the time and the randomness. `worker` is the snapshot, `load` what is
//! running (on behalf of other routers too), `filter` who could serve, `cost` the formula, `select` the decision, `record` past
//! decisions, `queue` the order of those who wait, `disaggregation` what runs in two parts.
#![forbid(unsafe_code)]

pub mod cost;
pub mod disaggregation;
pub mod filter;
pub mod load;
pub mod queue;
pub mod record;
pub mod select;
pub mod setting;
pub mod worker;

pub use cost::{CostConfig, CostOverrides, Credits, Terms};
pub use disaggregation::{ConditionalDisagg, Splittable, Whole};
pub use filter::{BusyThresholds, Exclusion, Refusal, Request, Target};
pub use load::{
    ActiveLoad, Applied, BookingId, BookingState, LoadConfig, NewBooking, Prompt, RankView, ReplicaChange,
    ReplicaEvent, Reported, RouterId,
};
pub use queue::{Full, QueuePolicy, Ticket, WaitQueue, Waiting};
pub use record::{DecisionLog, Record, RequestNames};
pub use select::{Candidate, Decision, Explanation, Mode, Pick, Selector, SelectorConfig};
pub use setting::SettingError;
pub use worker::{KvFormat, Role, Roles, Worker, WorkerSet};
