//! The tiers of KV blocks below a worker's arena: flags, the memory they take, and room on disk.

use crds::quantity::{Amount, Bytes, Resources};
use crds::worker_pool::KvCache;
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Volume, VolumeMount};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Where the disk tier is mounted.
const DIRECTORY: &str = "/kv-cache";
/// Memory for blocks on their way to and from disk: 64 MiB each way, more only where 4 blocks are.
const STAGING_BYTES: u64 = 2 * (64 << 20);
/// What a file system adds to the files, beyond which a pod would be evicted.
const SLACK_BYTES: u64 = 16 << 20;

fn bytes(given: &Option<Bytes>) -> Option<u64> {
    given.as_ref().and_then(Bytes::get)
}

/// The worker's flags.
pub(super) fn args(cache: &KvCache) -> Vec<String> {
    let mut args = Vec::new();
    args.extend(bytes(&cache.host_bytes).map(|bytes| format!("--host-cache-bytes={bytes}")));
    if let Some(bytes) = bytes(&cache.disk_bytes) {
        args.extend([format!("--disk-cache-bytes={bytes}"), format!("--disk-cache-dir={DIRECTORY}")]);
    }
    args.extend(cache.policy.map(|policy| format!("--kv-tier-policy={}", policy.as_str())));
    args
}

/// Room on disk that lives as long as the pod: a container that restarts finds its blocks again, and a pod that goes leaves
/// nothing on its node.
pub(super) fn volume(cache: &KvCache) -> Option<(Volume, VolumeMount)> {
    let size_limit = Quantity((bytes(&cache.disk_bytes)? + SLACK_BYTES).to_string());
    let room = EmptyDirVolumeSource { size_limit: Some(size_limit), ..Default::default() };
    let volume = Volume { name: "kv-cache".into(), empty_dir: Some(room), ..Default::default() };
    let mount = VolumeMount { name: "kv-cache".into(), mount_path: DIRECTORY.into(), ..Default::default() };
    Some((volume, mount))
}

/// The container's resources with the memory of the host tier: the author says what a worker takes without it. Where nothing is
/// said of memory, the tier's is requested, so that a node is chosen that has it.
pub(super) fn resources(mut given: Resources, cache: &KvCache) -> Resources {
    let staging = bytes(&cache.disk_bytes).map_or(0, |_| STAGING_BYTES);
    let more = bytes(&cache.host_bytes).unwrap_or(0) + staging;
    if more == 0 {
        return given;
    }
    let limited = given.limits.contains_key("memory");
    for (amounts, wanted) in [(&mut given.limits, limited), (&mut given.requests, !limited)] {
        let memory = amounts.get("memory").map(Amount::units);
        match memory {
            Some(Some(bytes)) => drop(amounts.insert("memory".into(), Amount::Text((bytes + more).to_string()))),
            // The API server will say what is wrong with it.
            Some(None) => {}
            None if wanted => drop(amounts.insert("memory".into(), Amount::Text(more.to_string()))),
            None => {}
        }
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(host: Option<&str>, disk: Option<&str>) -> KvCache {
        let bytes = |text: &str| Bytes(Amount::Text(text.into()));
        KvCache { host_bytes: host.map(bytes), disk_bytes: disk.map(bytes), policy: None }
    }

    fn memory(limit: Option<&str>, request: Option<&str>, cache: &KvCache) -> (Option<u64>, Option<u64>) {
        let amount = |text: &str| ("memory".to_string(), Amount::Text(text.into()));
        let given = Resources {
            limits: limit.map(amount).into_iter().collect(),
            requests: request.map(amount).into_iter().collect(),
        };
        let raised = resources(given, cache);
        let memory =
            |amounts: &std::collections::BTreeMap<String, Amount>| amounts.get("memory").and_then(Amount::units);
        (memory(&raised.limits), memory(&raised.requests))
    }

    #[test]
    fn memory_is_raised_by_the_host_tier_wherever_it_is_said() {
        const GIB: u64 = 1 << 30;
        let host = cache(Some("2Gi"), None);
        assert_eq!(memory(Some("4Gi"), Some("3Gi"), &host), (Some(6 * GIB), Some(5 * GIB)));
        assert_eq!(memory(Some("4Gi"), None, &host), (Some(6 * GIB), None), "the request follows the limit");
        assert_eq!(memory(None, Some("3Gi"), &host), (None, Some(5 * GIB)));
        assert_eq!(memory(None, None, &host), (None, Some(2 * GIB)));
        assert_eq!(memory(Some("4Gi"), None, &KvCache::default()), (Some(4 * GIB), None));
        let disk = cache(None, Some("10G"));
        assert_eq!(memory(Some("4Gi"), None, &disk), (Some(4 * GIB + STAGING_BYTES), None));
    }

    #[test]
    fn a_disk_has_a_place_of_its_own() {
        assert!(volume(&cache(Some("2Gi"), None)).is_none());
        let disk = cache(None, Some("10M"));
        let (volume, mount) = volume(&disk).expect("a volume");
        let limit = volume.empty_dir.and_then(|room| room.size_limit).expect("a limit");
        assert_eq!((limit.0.as_str(), mount.mount_path.as_str()), ("26777216", "/kv-cache"));
        assert_eq!(args(&disk), ["--disk-cache-bytes=10000000", "--disk-cache-dir=/kv-cache"]);
    }
}
