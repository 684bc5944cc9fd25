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
