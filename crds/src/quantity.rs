//! Amounts of CPU, memory and devices, as Kubernetes writes them.
//!
//! The generated Kubernetes types take strings only; users write `nvidia.com/gpu: 1`, so both are accepted here.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// One amount: `2`, `"500m"`, `"4Gi"`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Amount {
    /// A whole number.
    Int(i64),
    /// With a fraction or a suffix.
    Text(String),
}

impl JsonSchema for Amount {
    fn schema_name() -> Cow<'static, str> {
        "Amount".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": r"^[+-]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
        })
    }
}

impl From<&Amount> for Quantity {
    fn from(amount: &Amount) -> Self {
        match amount {
            Amount::Int(n) => Quantity(n.to_string()),
            Amount::Text(text) => Quantity(text.clone()),
        }
    }
}

impl Amount {
    /// Whole units, rounded up; `None` where the text is no amount or is too large.
    pub fn units(&self) -> Option<u64> {
        let text = match self {
            Self::Int(n) => return u64::try_from(*n).ok(),
            Self::Text(text) => text.as_str(),
        };
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, suffix) = text.split_at(digits);
        let factor = match suffix.strip_prefix(['e', 'E']).map(str::parse::<i32>) {
            Some(Ok(exponent)) => 10f64.powi(exponent),
            _ => SUFFIXES.iter().find(|(name, _)| *name == suffix)?.1,
        };
        let units = number.parse::<f64>().ok()? * factor;
        // Up to 2^53 the product is exact for what people write.
        (units.is_finite() && units < u64::MAX as f64).then_some(units.ceil() as u64)
    }
}

/// Suffixes of Kubernetes quantities.
const SUFFIXES: [(&str, f64); 16] = [
    ("", 1.0),
    ("n", 1e-9),
    ("u", 1e-6),
    ("m", 1e-3),
    ("k", 1e3),
    ("K", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("E", 1e18),
    ("Ki", 1024.0),
    ("Mi", 1_048_576.0),
    ("Gi", 1_073_741_824.0),
    ("Ti", 1_099_511_627_776.0),
    ("Pi", 1_125_899_906_842_624.0),
];

/// A number of bytes: `1000000`, `"4Gi"`, `"500M"`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub Amount);

impl Bytes {
    /// The number; `None` where the API server had not checked it.
    pub fn get(&self) -> Option<u64> {
        self.0.units().filter(|bytes| *bytes > 0)
    }
}

impl JsonSchema for Bytes {
    fn schema_name() -> Cow<'static, str> {
        "Bytes".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": r"^[0-9]+(\.[0-9]+)?([KMGT]i|[kMGT])?$",
        })
    }
}

/// What a container may use and what is set aside for it; the same as in a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Resources {
    /// Upper limits by resource name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, Amount>,
    /// Amounts set aside, by resource name; for what is missing here the limit counts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, Amount>,
}

impl Resources {
    /// The container field; `None` where nothing is set.
    pub fn requirements(&self) -> Option<ResourceRequirements> {
        let quantities = |amounts: &BTreeMap<String, Amount>| {
            (!amounts.is_empty()).then(|| amounts.iter().map(|(name, amount)| (name.clone(), amount.into())).collect())
        };
        let (limits, requests) = (quantities(&self.limits), quantities(&self.requests));
        (limits.is_some() || requests.is_some()).then(|| ResourceRequirements {
            limits,
            requests,
            ..Default::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_kubernetes_reads_them() {
        let units = |text: &str| Amount::Text(text.into()).units();
        let exa = 1_000_000_000_000_000_000;
        let good = [("4Gi", 4 << 30), ("1.5Ki", 1536), ("500M", 500_000_000), ("2e3", 2000), ("1E", exa), ("7", 7)];
        for (text, expected) in good {
            assert_eq!(units(text), Some(expected), "{text}");
        }
        assert_eq!(units("1500m"), Some(2), "rounded up");
        assert_eq!(Amount::Int(5).units(), Some(5));
        for bad in ["", "Gi", "4GiB", "-1", "1e", "4 Gi"] {
            assert_eq!(units(bad), None, "{bad}");
        }
        assert_eq!(Bytes(Amount::Int(0)).get(), None, "nothing is no cache");
    }
}
