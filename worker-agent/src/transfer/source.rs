//! `disaggregated_params`: where a prompt's blocks are, as one worker writes it and another reads it. Routers pass it on.

use std::time::Duration;

use kv_hashing::SequenceHash;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use super::TransferError;
use crate::engine::builtin::exchange::KvLayout;

/// One way in which blocks are fetched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// How: [`super::KvTransport::backend`].
    pub backend: String,
    /// From where, as that transport writes it.
    pub address: String,
}

/// Where the blocks of a prompt are fetched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The ways; not every worker can go each of them.
    pub offers: Vec<Offer>,
    /// The worker's life that holds the blocks.
    pub boot_epoch: String,
    /// Revision of that worker's pod template.
    pub revision: String,
    /// What keeps the blocks there.
    #[serde(with = "hex")]
    pub lease: u64,
    /// How long that lasts from its last progress, in milliseconds.
    pub lease_ms: u64,
    /// What the blocks are.
    pub layout: KvLayout,
    /// The prompt's full blocks, in order.
    #[serde(with = "hashes")]
    pub blocks: Vec<SequenceHash>,
}

impl Source {
    /// Reads what [`Self::to_json`] has written.
    pub fn parse(json: &str) -> Result<Self, TransferError> {
        serde_json::from_str(json).map_err(|error| TransferError::Params(error.to_string()))
    }

    /// The lease alone; none where the parameters are of another engine.
    pub fn lease_of(json: &str) -> Option<u64> {
        #[derive(Deserialize)]
        struct Leased {
            #[serde(with = "hex")]
            lease: u64,
        }
        serde_json::from_str::<Leased>(json).ok().map(|leased| leased.lease)
    }

    /// How long the lease lasts without progress.
    pub fn lifetime(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }

    /// Where a transport fetches, if it can.
    pub fn address(&self, backend: &str) -> Option<&str> {
        self.offers.iter().find(|offer| offer.backend == backend).map(|offer| offer.address.as_str())
    }

    /// As a router carries it.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings and numbers are JSON")
    }
}

/// A number as 16 hex digits: JSON numbers hold 53 bits.
mod hex {
    use super::*;

    pub(super) fn serialize<S: Serializer>(value: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{value:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        u64::from_str_radix(&String::deserialize(from)?, 16).map_err(D::Error::custom)
    }
}

mod hashes {
    use super::*;

    pub(super) fn serialize<S: Serializer>(hashes: &[SequenceHash], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(hashes.iter().map(|hash| format!("{:016x}", hash.0)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<SequenceHash>, D::Error> {
        let digits = Vec::<String>::deserialize(from)?;
        let hash = |digits: String| u64::from_str_radix(&digits, 16).map(SequenceHash).map_err(D::Error::custom);
        digits.into_iter().map(hash).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::builtin::arena::KvShape;

    #[test]
    fn survives_json_and_refuses_what_is_something_else() {
        let shape = KvShape { layers: 2, kv_heads: 1, head_dim: 16, block_size: 16 };
        let source = Source {
            offers: vec![
                Offer { backend: "shm".into(), address: "1f".into() },
                Offer { backend: "tcp".into(), address: "10.0.0.7:9002".into() },
            ],
            boot_epoch: "uid/1/x".into(),
            revision: String::new(),
            lease: u64::MAX - 1,
            lease_ms: 30_000,
            layout: KvLayout { format: 1, model: 1 << 60, shape },
            blocks: vec![SequenceHash(0), SequenceHash(u64::MAX)],
        };
        let json = source.to_json();
        assert!(json.contains(r#""lease":"fffffffffffffffe""#) && json.contains(r#""block_size":16"#), "{json}");
        assert_eq!(Source::parse(&json).expect("valid"), source);
        assert_eq!(Source::lease_of(&json), Some(u64::MAX - 1));
        assert_eq!((source.address("tcp"), source.address("nixl")), (Some("10.0.0.7:9002"), None));
        assert_eq!(Source::lease_of(r#"{"do_remote_prefill":true}"#), None);
        for other in ["", "{}", "[]", r#"{"backend":"nixl"}"#, &json.replace("ffff", "xyzw")] {
            assert!(matches!(Source::parse(other), Err(TransferError::Params(_))), "{other}");
        }
    }
}
