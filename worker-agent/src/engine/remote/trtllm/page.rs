//! What `/metrics` of `trtllm-serve` says: a list of the iterations since it was asked last, of which the newest counts.

use serde::Deserialize;

use super::super::dialect::Busy;

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Iteration {
    iter: Option<u64>,
    num_active_requests: f64,
    num_queued_requests: f64,
    kv_cache_stats: Option<KvCache>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KvCache {
    max_num_blocks: f64,
    used_num_blocks: f64,
}

/// How busy it is. Without iterations since the last question it is idle, or was started without statistics.
pub(super) fn load(page: &str) -> Busy {
    let iterations: Vec<Iteration> = serde_json::from_str(page).unwrap_or_default();
    let Some(last) = iterations.into_iter().next_back() else { return Busy::default() };
    let cache = last.kv_cache_stats.unwrap_or_default();
    Busy {
        running: last.num_active_requests.max(0.0) as usize,
        waiting: last.num_queued_requests.max(0.0) as usize,
        kv_usage: if cache.max_num_blocks > 0.0 { cache.used_num_blocks / cache.max_num_blocks } else { 0.0 },
        moves: last.iter,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_iteration_counts() {
        let page = r#"[{"iter":1,"numActiveRequests":9},{"cpuMemUsage":0,"iter":2,"numActiveRequests":3,
            "numQueuedRequests":2,"kvCacheStats":{"maxNumBlocks":200,"usedNumBlocks":50,"tokensPerBlock":32}}]"#;
        assert_eq!(load(page), Busy { running: 3, waiting: 2, kv_usage: 0.25, moves: Some(2) });
        for nothing in ["[]", "", "{}", "[{}]", "[1]"] {
            assert_eq!(load(nothing), Busy::default(), "{nothing}");
        }
    }
}
