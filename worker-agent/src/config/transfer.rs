//! Flags of KV transfer between workers.

use std::time::Duration;

use clap::Args;

use super::{Config, ConfigError, DiscoveryBackend};
use crate::transfer::Transports;

/// Flags of KV transfer.
#[derive(Args, Clone, Debug)]
pub struct TransferConfig {
    /// Port that other workers fetch KV blocks from; 0 takes a free one [default: 9002, with file discovery a free one]
    #[arg(long)]
    pub transfer_port: Option<u16>,
    /// Workers exchange KV only with those of the same one [default: --revision]
    #[arg(long)]
    pub kv_revision: Option<String>,
    /// How long a prefill worker keeps a prompt's KV for the worker that goes on, from the last progress, in seconds
    #[arg(long, default_value_t = 30)]
    pub kv_lease_secs: u64,
    /// How KV blocks travel between workers: `auto` takes shared memory within a host, and TCP otherwise; `nixl` needs a build
    /// with NIXL
    #[arg(long, value_enum, default_value_t = Transports::Auto)]
    pub kv_transfer: Transports,
    /// Time for fetching a prompt's KV, in milliseconds, and 100 more for each MiB,
    /// 600000 and half of what the router waits at most; after that it is computed
    #[arg(long, default_value_t = 2000)]
    pub kv_transfer_timeout_ms: u64,
}

/// Checked settings of KV transfer.
#[derive(Clone, Copy, Debug)]
pub struct TransferSettings {
    /// How long a lease lasts from its last progress.
    pub lease: Duration,
    /// Time for a fetch beside that for its bytes.
    pub timeout: Duration,
    /// How blocks travel.
    pub transports: Transports,
}

/// The port where discovery does not need to tell ports.
const PORT: u16 = 9002;
/// Longest lease: an hour.
const SECONDS_MAX: u64 = 3600;
/// Longest time for a fetch, as long as the other worker holds the blocks.
const TIMEOUT_MS_MAX: u64 = 600_000;

impl Config {
    pub(super) fn transfer_port(&self) -> u16 {
        let default = if self.discovery_backend == DiscoveryBackend::File { 0 } else { PORT };
        self.transfer.transfer_port.unwrap_or(default)
    }

    pub(super) fn transfer_settings(&self) -> Result<TransferSettings, ConfigError> {
        let TransferConfig { kv_lease_secs, kv_transfer_timeout_ms, .. } = self.transfer;
        if !(1..=SECONDS_MAX).contains(&kv_lease_secs) {
            let (value, rule) = (kv_lease_secs.to_string(), "must be from 1 to 3600");
            return Err(ConfigError::Invalid { flag: "--kv-lease-secs", value, rule });
        }
        if !(1..=TIMEOUT_MS_MAX).contains(&kv_transfer_timeout_ms) {
            let (value, rule) = (kv_transfer_timeout_ms.to_string(), "must be from 1 to 600000");
            return Err(ConfigError::Invalid { flag: "--kv-transfer-timeout-ms", value, rule });
        }
        let value = self.transfer.kv_transfer.as_str().to_owned();
        let invalid = |rule| ConfigError::Invalid { flag: "--kv-transfer", value, rule };
        self.transfer.kv_transfer.check().map_err(invalid)?;
        Ok(TransferSettings {
            lease: Duration::from_secs(kv_lease_secs),
            timeout: Duration::from_millis(kv_transfer_timeout_ms),
            transports: self.transfer.kv_transfer,
        })
    }
}
