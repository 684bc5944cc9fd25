//! Bounds on requests that no worker has yet: bytes of their bodies, and tokenizing on blocking threads.
//!
//! Both are taken without waiting: a router that has no room says so at once, and the client tries another one or
//! again.

use std::sync::Arc;

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::FrontendConfig;
use super::metrics::FrontendMetrics;
use crate::openai::error::ApiError;

/// Permits count this many bytes each: a semaphore's range is smaller than a memory's.
const UNIT: usize = 1 << 10;

/// What there is room for.
pub(super) struct Admission {
    bytes: Arc<Semaphore>,
    units: usize,
    jobs: Arc<Semaphore>,
    bytes_gauge: Gauge,
    jobs_gauge: Gauge,
}

impl Admission {
    pub(super) fn new(config: &FrontendConfig, metrics: &FrontendMetrics) -> Admission {
        let units = config.preprocess_bytes.div_ceil(UNIT).min(u32::MAX as usize).min(Semaphore::MAX_PERMITS);
        Admission {
            bytes: Arc::new(Semaphore::new(units)),
            units,
            jobs: Arc::new(Semaphore::new(config.preprocess_jobs.min(Semaphore::MAX_PERMITS))),
            bytes_gauge: metrics.preprocessing_bytes.clone(),
            jobs_gauge: metrics.preprocessing_jobs.clone(),
        }
    }

    /// Room for a body of `len` bytes. One larger than all the room there is takes all of it.
    pub(super) fn body(&self, len: usize) -> Result<Room, ApiError> {
        let units = len.div_ceil(UNIT).min(self.units) as u32;
        let permit = self.bytes.clone().try_acquire_many_owned(units);
        permit
            .map(|permit| Room::new(permit, UNIT, self.bytes_gauge.clone()))
            .map_err(|_| ApiError::busy("the router holds as many bytes of requests as it may"))
    }

    /// Room for one job on a blocking thread.
    pub(super) fn job(&self) -> Result<Room, ApiError> {
        let permit = self.jobs.clone().try_acquire_owned();
        permit
            .map(|permit| Room::new(permit, 1, self.jobs_gauge.clone()))
            .map_err(|_| ApiError::busy("the router tokenizes as many requests as it may"))
    }
}

/// Room taken; dropping it gives it back.
pub(super) struct Room {
    permit: OwnedSemaphorePermit,
    unit: usize,
    gauge: Gauge,
}

impl Room {
    fn new(permit: OwnedSemaphorePermit, unit: usize, gauge: Gauge) -> Room {
        gauge.inc_by((permit.num_permits() * unit) as i64);
        Room { permit, unit, gauge }
    }

    /// Gives back what a body of `len` bytes does not need.
    pub(super) fn shrink(&mut self, len: usize) {
        let spare = self.permit.num_permits().saturating_sub(len.div_ceil(self.unit));
        if let Some(spare) = self.permit.split(spare) {
            self.gauge.dec_by((spare.num_permits() * self.unit) as i64);
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.gauge.dec_by((self.permit.num_permits() * self.unit) as i64);
    }
}
