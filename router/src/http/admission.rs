//! Bounds on requests that no worker has yet: memory for their bodies and what is made of them, and tokenizing on
//! blocking threads.
//!
//! Both are taken without waiting: a router that has no room says so at once, and the client tries another one or
//! again. Room is taken for what is here, never for what a client says it will send; a part of it is for small bodies
//! alone, so that large ones cannot keep everybody out.

use std::sync::Arc;

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::FrontendConfig;
use super::generate::INLINE_BYTES;
use super::metrics::FrontendMetrics;
use crate::memory;
use crate::openai::error::ApiError;
use crate::openai::parse::count_values;

/// Permits count this many bytes each: a semaphore's range is smaller than a memory's.
const UNIT: usize = 1 << 10;

/// The part of the room that is kept for small bodies: one of so many.
const SMALL_SHARE: usize = 8;

/// Memory that a value or a name of a body takes at most while the request is read and rendered: 72 bytes as JSON, about as
/// much again in a map's table or a vector's spare room, and the template's copy of both.
const VALUE_BYTES: usize = 256;

/// Requests that took more units leave enough freed memory behind for it to be worth giving back.
const LARGE_UNITS: usize = (4 << 20) / UNIT;

/// What there is room for.
pub(super) struct Admission {
    bytes: Arc<Semaphore>,
    small: Arc<Semaphore>,
    /// All of `bytes`, and of `small`.
    units: (usize, usize),
    /// Most values and names of one body.
    values: usize,
    jobs: Arc<Semaphore>,
    bytes_gauge: Gauge,
    jobs_gauge: Gauge,
}

impl Admission {
    pub(super) fn new(config: &FrontendConfig, metrics: &FrontendMetrics) -> Arc<Admission> {
        let units = config.preprocess_bytes.div_ceil(UNIT).min(u32::MAX as usize).min(Semaphore::MAX_PERMITS);
        let small = units / SMALL_SHARE;
        Arc::new(Admission {
            bytes: Arc::new(Semaphore::new(units - small)),
            small: Arc::new(Semaphore::new(small)),
            units: (units - small, small),
            values: config.max_json_values,
            jobs: Arc::new(Semaphore::new(config.preprocess_jobs.min(Semaphore::MAX_PERMITS))),
            bytes_gauge: metrics.preprocessing_bytes.clone(),
            jobs_gauge: metrics.preprocessing_jobs.clone(),
        })
    }

    /// Room for a body of which nothing has arrived.
    pub(super) fn room(self: &Arc<Self>) -> Room {
        Room { admission: self.clone(), permit: None }
    }

    /// Room for one job on a blocking thread.
    pub(super) fn job(&self) -> Result<Job, ApiError> {
        match self.jobs.clone().try_acquire_owned() {
            Ok(permit) => {
                self.jobs_gauge.inc();
                Ok(Job { _permit: permit, gauge: self.jobs_gauge.clone() })
            }
            Err(_) => Err(ApiError::busy("the router tokenizes as many requests as it may")),
        }
    }
}

/// Room taken for one request; dropping it gives it back.
pub(super) struct Room {
    admission: Arc<Admission>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// Makes it room for `bytes` altogether. A request larger than all the room there is takes all of it.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<(), ApiError> {
        let admission = self.admission.clone();
        let units = bytes.div_ceil(UNIT);
        let taken = self.take(&admission.bytes, units.min(admission.units.0))
            || (bytes <= INLINE_BYTES && self.take(&admission.small, units.min(admission.units.1)));
        taken.then_some(()).ok_or_else(|| ApiError::busy("the router holds as many bytes of requests as it may"))
    }

    /// Makes it room for what becomes of `body` when it is read, and refuses one of more values than a body may have. Cost:
    /// 1 ns for each byte outside of strings, until the limit is reached.
    pub(super) fn hold_values(&mut self, body: &[u8]) -> Result<(), ApiError> {
        let limit = self.admission.values;
        let values = count_values(body, limit).ok_or_else(|| ApiError::too_many_values(limit))?;
        if body.len() <= INLINE_BYTES {
            // They are read one at a time on each thread.
            return Ok(());
        }
        self.hold(body.len().saturating_add(values.saturating_mul(VALUE_BYTES)))
    }

    /// Gives back what a body of `bytes` does not need, once it has been read.
    pub(super) fn shrink(&mut self, bytes: usize) {
        let spare = self.units().saturating_sub(bytes.div_ceil(UNIT));
        if let Some(spare) = self.permit.as_mut().and_then(|permit| permit.split(spare)) {
            self.admission.bytes_gauge.dec_by((spare.num_permits() * UNIT) as i64);
            self.returned(spare.num_permits());
        }
    }

    /// Takes what is missing to `units` of `from`; permits of the other semaphore are given back for it.
    fn take(&mut self, from: &Arc<Semaphore>, units: usize) -> bool {
        let before = self.units();
        let same = self.permit.as_ref().is_some_and(|permit| Arc::ptr_eq(permit.semaphore(), from));
        let missing = units.saturating_sub(if same { before } else { 0 });
        if same && missing == 0 {
            return true;
        }
        let Ok(more) = from.clone().try_acquire_many_owned(missing as u32) else { return false };
        match &mut self.permit {
            Some(permit) if same => permit.merge(more),
            slot => *slot = Some(more),
        }
        self.admission.bytes_gauge.inc_by((self.units() as i64 - before as i64) * UNIT as i64);
        true
    }

    fn returned(&self, units: usize) {
        if units > LARGE_UNITS {
            memory::give_back_soon();
        }
    }

    fn units(&self) -> usize {
        self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.admission.bytes_gauge.dec_by((self.units() * UNIT) as i64);
        self.returned(self.units());
    }
}

/// A job on a blocking thread; dropping it makes room for the next one.
pub(super) struct Job {
    _permit: OwnedSemaphorePermit,
    gauge: Gauge,
}

impl Drop for Job {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(preprocess_bytes: usize) -> Arc<Admission> {
        let config = FrontendConfig { preprocess_bytes, max_json_values: 1 << 20, ..FrontendConfig::default() };
        Admission::new(&config, &FrontendMetrics::default())
    }

    #[test]
    fn small_bodies_have_room_that_large_ones_cannot_take() {
        let admission = admission(1 << 20);
        let mut large = admission.room();
        assert!(large.hold(40 << 10).is_ok(), "as much as has arrived");
        assert!(large.hold(8 << 20).is_ok(), "all there is for large ones");
        let (mut small, mut other) = (admission.room(), admission.room());
        assert!(small.hold(INLINE_BYTES).is_ok());
        assert!(other.hold(INLINE_BYTES + 1).is_err());
        assert_eq!(admission.bytes_gauge.get(), (896 << 10) + INLINE_BYTES as i64);
        drop(large);
        assert!(small.hold(INLINE_BYTES + UNIT).is_ok(), "one that grows moves to the other room");
        assert_eq!(admission.small.available_permits(), 128);
        assert_eq!(admission.bytes_gauge.get(), (INLINE_BYTES + UNIT) as i64);
        drop((small, other));
        assert_eq!(admission.bytes_gauge.get(), 0);
    }

    #[test]
    fn the_values_of_a_large_body_take_room_too() {
        let admission = admission(8 << 20);
        let body = |values: usize| format!("[{}0]", "0,".repeat(values - 2));
        let mut room = admission.room();
        assert!(room.hold_values(body(20_000).as_bytes()).is_ok());
        assert_eq!(admission.bytes_gauge.get() as usize, (40_000 - 1 + 20_000 * VALUE_BYTES).next_multiple_of(UNIT));
        assert!(admission.room().hold_values(body(20_000).as_bytes()).is_err(), "two of them do not fit");
        drop(room);
        let error = admission.room().hold_values(body((1 << 20) + 1).as_bytes()).expect_err("too many");
        assert_eq!(error.status.as_u16(), 413);
    }
}
