//! What accelerators this process sees: for its metrics, and for whoever reads its registration.

use std::sync::OnceLock;

use device::Description;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use protocol::metadata::DeviceCard;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabels {
    device: String,
    name: String,
    uuid: String,
}

/// The accelerators; looked for once in a process. A driver that does not work is logged, and counts as none.
pub(crate) fn inventory() -> &'static [Description] {
    static FOUND: OnceLock<Vec<Description>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let found = device::cuda::inventory().unwrap_or_else(|error| {
            tracing::warn!(%error, "accelerators are not seen");
            Vec::new()
        });
        for Description { ordinal, name, memory_bytes, .. } in &found {
            tracing::info!(device = ordinal, name, memory_gib = memory_bytes >> 30, "accelerator");
        }
        found
    })
}

/// Makes them part of a worker's metrics.
pub(crate) fn register(devices: &[Description], registry: &mut Registry) {
    let memory = Family::<DeviceLabels, Gauge>::default();
    for device in devices {
        let labels =
            DeviceLabels { device: device.ordinal.to_string(), name: device.name.clone(), uuid: device.uuid.clone() };
        memory.get_or_create(&labels).set(device.memory_bytes as i64);
    }
    registry.register("device_memory_bytes", "Memory of an accelerator that the worker sees", memory);
}

/// As a registration has them.
pub(crate) fn cards(devices: &[Description]) -> Vec<DeviceCard> {
    let card = |device: &Description| DeviceCard {
        name: device.name.clone(),
        uuid: device.uuid.clone(),
        memory_bytes: device.memory_bytes,
        capability: format!("{}.{}", device.capability.0, device.capability.1),
    };
    devices.iter().map(card).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_accelerator_is_told_in_metrics_and_registration() {
        let devices = [Description {
            ordinal: 1,
            name: "NVIDIA H200".into(),
            uuid: "00ff".into(),
            memory_bytes: 150_754_820_096,
            capability: (9, 0),
        }];
        let mut registry = Registry::with_prefix("armature_worker");
        register(&devices, &mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("a String takes any text");
        let line = r#"armature_worker_device_memory_bytes{device="1",name="NVIDIA H200",uuid="00ff"} 150754820096"#;
        assert!(text.contains(line), "{text}");
        assert_eq!(
            serde_json::to_value(cards(&devices)).expect("serializable"),
            serde_json::json!([{"name": "NVIDIA H200", "uuid": "00ff", "memory_bytes": 150_754_820_096_u64, "capability": "9.0"}])
        );
    }
}
