//! Flags of the tiers below the arena.

use std::path::PathBuf;

use clap::Args;

use super::{Config, ConfigError};
use crate::engine::builtin::tiers::{DiskOptions, Policy, TierOptions};

/// Flags of the tiers.
#[derive(Args, Clone, Debug, Default)]
pub struct TierConfig {
    /// Host memory for KV blocks that the arena has no room for, as 4GiB, 500MB or a number of bytes [default: none]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub host_cache_bytes: Option<u64>,
    /// The same in GB, as Dynamo has it
    #[arg(long, env = "DYN_KVBM_CPU_CACHE_GB", hide = true)]
    pub host_cache_gb: Option<f64>,
    /// Disk for KV blocks that host memory has no room for; they survive a restart. Needs --disk-cache-dir [default: none]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub disk_cache_bytes: Option<u64>,
    /// The same in GB, as Dynamo has it
    #[arg(long, env = "DYN_KVBM_DISK_CACHE_GB", hide = true)]
    pub disk_cache_gb: Option<f64>,
    /// Directory of the disk cache; each worker has one of its name in it, and touches a file there while it lives. A worker with a
    /// new name takes over the one that was left behind last, and what nobody has used for a day is deleted
    #[arg(long, env = "DYN_KVBM_DISK_CACHE_DIR", value_name = "DIR")]
    pub disk_cache_dir: Option<PathBuf>,
    /// Which blocks host memory and disk give up first: the least recently or the least frequently used
    #[arg(long, value_enum, default_value_t)]
    pub kv_tier_policy: Policy,
}

/// Units of a number of bytes.
const UNITS: [(&str, u64); 9] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
];

/// A number of bytes with or without a unit: `4GiB`, `1.5 GB`, `4294967296`; as in Kubernetes `4Gi` and `4G`, too.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim().to_ascii_lowercase());
    let known = UNITS.iter().find(|(name, _)| *name == unit || (!unit.is_empty() && *name == format!("{unit}b")));
    let factor = if unit.is_empty() { Some(1) } else { known.map(|(_, factor)| *factor) };
    let rule = || format!("{text:?} is no number of bytes, such as 4GiB, 500MB or 1000000");
    let factor = factor.ok_or_else(rule)?;
    match number.parse::<u64>() {
        Ok(number) => number.checked_mul(factor).ok_or_else(rule),
        Err(_) => {
            let bytes = number.parse::<f64>().map_err(|_| rule())? * factor as f64;
            (bytes.is_finite() && bytes < u64::MAX as f64).then_some(bytes as u64).ok_or_else(rule)
        }
    }
}

/// One of the two ways to give a size.
fn either(bytes: Option<u64>, flag: &'static str, gb: Option<f64>) -> Result<u64, ConfigError> {
    match (bytes, gb) {
        // What a flag says goes before the environment, as everywhere.
        (Some(bytes), _) => Ok(bytes),
        (None, None) => Ok(0),
        (None, Some(gb)) if (0.0..=1e9).contains(&gb) => Ok((gb * 1e9) as u64),
        (None, Some(gb)) => {
            let rule = "must be a number of GB from 0 to 1000000000";
            Err(ConfigError::Invalid { flag, value: gb.to_string(), rule })
        }
    }
}

impl Config {
    /// What is kept below the arena.
    pub fn tiers(&self) -> Result<TierOptions, ConfigError> {
        let given = &self.tiers;
        let host_bytes = either(given.host_cache_bytes, "DYN_KVBM_CPU_CACHE_GB", given.host_cache_gb)?;
        let disk_bytes = either(given.disk_cache_bytes, "DYN_KVBM_DISK_CACHE_GB", given.disk_cache_gb)?;
        if self.engine.server().is_some() && host_bytes + disk_bytes > 0 {
            let (flag, value) = ("--host-cache-bytes and --disk-cache-bytes", (host_bytes + disk_bytes).to_string());
            return Err(ConfigError::Invalid {
                flag,
                value,
                rule: "are of the built-in engine; servers beside a worker have arguments of their own",
            });
        }
        let disk = match (disk_bytes, &given.disk_cache_dir) {
            (0, None) => None,
            (0, Some(_)) => {
                return Err(ConfigError::Missing { flag: "--disk-cache-bytes", by: "--disk-cache-dir" });
            }
            (_, None) => return Err(ConfigError::Missing { flag: "--disk-cache-dir", by: "--disk-cache-bytes" }),
            (bytes, Some(parent)) => {
                let revision = self.transfer.kv_revision.as_ref().unwrap_or(&self.revision).clone();
                Some(DiskOptions { dir: parent.join(&self.name), bytes, revision })
            }
        };
        Ok(TierOptions { host_bytes, disk, policy: given.kv_tier_policy })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Worker {
        #[command(flatten)]
        config: Config,
    }

    fn tiers(flags: &[&str]) -> Result<TierOptions, String> {
        let base = ["worker", "--name", "w-0", "--discovery-backend", "file", "--discovery-dir", "d"];
        let worker = Worker::try_parse_from(base.iter().chain(flags)).map_err(|error| error.to_string())?;
        worker.config.settings().map_err(|error| error.to_string())?;
        worker.config.tiers().map_err(|error| error.to_string())
    }

    #[test]
    fn bytes_are_read_as_people_write_them() {
        let good = [
            ("4GiB", 4 << 30),
            ("4gib", 4 << 30),
            ("4Gi", 4 << 30),
            ("1.5 GB", 1_500_000_000),
            ("500M", 500_000_000),
            ("0", 0),
            ("12345", 12_345),
            ("7b", 7),
            ("2TiB", 2 << 40),
        ];
        for (text, bytes) in good {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "4 parsecs", "1e9", "1.2.3GB", "99999999999TiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn nothing_is_kept_unless_somebody_says_so() {
        assert_eq!(tiers(&[]), Ok(TierOptions::default()));
        let host = tiers(&["--host-cache-bytes", "1GiB", "--kv-tier-policy", "lfu"]).expect("valid");
        assert_eq!(host, TierOptions { host_bytes: 1 << 30, disk: None, policy: Policy::Lfu });
    }

    #[test]
    fn workers_share_a_directory_by_name_and_revisions_part_their_blocks() {
        let flags = ["--disk-cache-bytes=10GB", "--disk-cache-dir=/cache", "--revision=a"];
        let disk = tiers(&flags).expect("valid").disk.expect("a disk tier");
        assert_eq!((disk.dir.as_path(), disk.bytes, &*disk.revision), (Path::new("/cache/w-0"), 10_000_000_000, "a"));
        let other = tiers(&[&flags[..], &["--kv-revision=b"]].concat()).expect("valid");
        assert_eq!(other.disk.expect("a disk tier").revision, "b");
    }

    #[test]
    fn half_a_disk_is_refused_naming_both_halves() {
        let bytes = tiers(&["--disk-cache-bytes=10GB"]).expect_err("no directory");
        assert_eq!(bytes, "--disk-cache-bytes needs --disk-cache-dir");
        let dir = tiers(&["--disk-cache-dir=/cache"]).expect_err("no size");
        assert_eq!(dir, "--disk-cache-dir needs --disk-cache-bytes");
        assert!(tiers(&["--host-cache-bytes=lots"]).expect_err("no number").contains("4GiB"));
    }

    #[test]
    fn dynamos_gigabytes_are_understood() {
        let host = tiers(&["--host-cache-gb=1.5"]).expect("valid");
        assert_eq!(host.host_bytes, 1_500_000_000);
        let both = tiers(&["--host-cache-gb=9", "--host-cache-bytes=1GB"]).expect("the flag goes first");
        assert_eq!(both.host_bytes, 1_000_000_000);
        assert!(tiers(&["--host-cache-gb=-1"]).is_err());
    }
}
