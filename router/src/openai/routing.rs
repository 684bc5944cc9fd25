//! What a request says about its routing: `nvext` in the body, under Dynamo's names, and headers.
//!
//! Nothing of it changes the answer; it says where the request may run, when its turn is, and by which weights a worker is
//! chosen. Headers and body may both name a worker, if it is the same.

use std::collections::BTreeMap;

use hyper::HeaderMap;
use routing::{CostConfig, CostOverrides};
use serde::Deserialize;

use super::error::ApiError;
use crate::backend::{RouteOptions, RoutingHints};

/// Header that names the instance id of the worker wanted.
pub(super) const WORKER_HEADER: &str = "x-armature-worker";
/// The same, and Dynamo's.
const WORKER_HEADERS: [&str; 2] = [WORKER_HEADER, "x-dynamo-worker-instance-id"];
/// Its data-parallel rank; the first of them that is there counts.
const RANK_HEADERS: [&str; 2] = ["x-armature-dp-rank", "x-dynamo-dp-rank"];
/// Weight among requests that wait.
const PRIORITY_HEADER: &str = "x-dynamo-request-priority";

/// Most labels, and most workers, that a request names.
const MAX_NAMED: usize = 64;
/// Largest priority; what is waited for in seconds is far below.
const MAX_PRIORITY: f64 = 1e9;

/// `nvext`. Other fields of Dynamo's are accepted and have no effect.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct NvExt {
    /// Instance id of the worker wanted.
    pub backend_instance_id: Option<u64>,
    /// The same; of the worker that generates, where another one prefills.
    pub decode_worker_id: Option<u64>,
    /// Data-parallel rank of that worker.
    pub dp_rank: Option<u32>,
    /// What the client knows of the request.
    pub agent_hints: Option<AgentHints>,
    /// Weights of the cost, in place of the configured ones.
    pub router: Option<RouterWeights>,
    /// Which workers may take it.
    pub routing_constraints: Option<Constraints>,
}

/// `nvext.agent_hints`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct AgentHints {
    /// Higher is served earlier, as the queue's policy weighs it.
    pub priority: Option<f64>,
    /// Higher is served before everything that has less.
    pub strict_priority: Option<i32>,
    /// Length of the answer that is expected, in tokens.
    pub osl: Option<u32>,
}

/// `nvext.router`: named as the settings are, with or without `router_` before.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RouterWeights {
    /// Credit for blocks in device memory.
    #[serde(alias = "router_kv_overlap_score_credit", alias = "kv_overlap_score_credit")]
    pub overlap_score_credit: Option<f64>,
    /// Credit for blocks in host memory.
    #[serde(alias = "router_host_cache_hit_weight")]
    pub host_cache_hit_weight: Option<f64>,
    /// Credit for blocks on disk.
    #[serde(alias = "router_disk_cache_hit_weight")]
    pub disk_cache_hit_weight: Option<f64>,
    /// Credit for blocks of a shared pool.
    pub shared_cache_multiplier: Option<f64>,
    /// Factor on the prompt side.
    #[serde(alias = "router_prefill_load_scale")]
    pub prefill_load_scale: Option<f64>,
    /// Softmax temperature.
    #[serde(alias = "router_temperature")]
    pub temperature: Option<f64>,
}

/// `nvext.routing_constraints`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Constraints {
    /// Labels that the worker must have.
    pub required: BTreeMap<String, String>,
    /// Revision that it must be of.
    pub revision: Option<String>,
    /// Instance ids of workers that must not take it.
    pub excluded_workers: Vec<u64>,
}

/// What a body says, checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BodyHints {
    /// Instance id of the worker wanted, and the field that names it.
    pub worker: Option<(&'static str, u64)>,
    /// The rest.
    pub hints: RoutingHints,
}

impl BodyHints {
    /// Checks `nvext`. `priority` is the request's own, which counts where no hint has one; higher runs first.
    pub fn check(nvext: Option<&NvExt>, priority: i32) -> Result<Self, ApiError> {
        let Some(nvext) = nvext else {
            let hints = RoutingHints { priority: f64::from(priority), ..RoutingHints::default() };
            return Ok(Self { worker: None, hints });
        };
        let worker = match (nvext.backend_instance_id, nvext.decode_worker_id) {
            (Some(one), Some(other)) if one != other => {
                let message = "nvext.backend_instance_id and nvext.decode_worker_id name different workers";
                return Err(ApiError::invalid("nvext.decode_worker_id", message));
            }
            (Some(one), _) => Some(("nvext.backend_instance_id", one)),
            (None, other) => other.map(|other| ("nvext.decode_worker_id", other)),
        };
        let agent = nvext.agent_hints.clone().unwrap_or_default();
        let constraints = nvext.routing_constraints.clone().unwrap_or_default();
        for (name, count) in
            [("required", constraints.required.len()), ("excluded_workers", constraints.excluded_workers.len())]
        {
            if count > MAX_NAMED {
                let param = format!("nvext.routing_constraints.{name}");
                return Err(ApiError::invalid(param.clone(), format!("{param} may have at most {MAX_NAMED} entries")));
            }
        }
        let hints = RoutingHints {
            dp_rank: nvext.dp_rank,
            excluded: constraints.excluded_workers,
            labels: constraints.required.into_iter().collect(),
            revision: constraints.revision,
            cost: weights(nvext.router.as_ref())?,
            priority: check_priority(agent.priority.unwrap_or(f64::from(priority)), "nvext.agent_hints.priority")?,
            strict_priority: agent.strict_priority.unwrap_or(0),
            expected_output_tokens: agent.osl.filter(|tokens| *tokens > 0),
        };
        Ok(Self { worker, hints })
    }
}

fn weights(router: Option<&RouterWeights>) -> Result<CostOverrides, ApiError> {
    let router = router.cloned().unwrap_or_default();
    let overrides = CostOverrides {
        overlap_score_credit: router.overlap_score_credit,
        host_cache_hit_weight: router.host_cache_hit_weight,
        disk_cache_hit_weight: router.disk_cache_hit_weight,
        shared_cache_multiplier: router.shared_cache_multiplier,
        prefill_load_scale: router.prefill_load_scale,
        temperature: router.temperature,
    };
    // The ranges do not depend on each other, so it does not matter whose the other values are.
    match overrides.apply(&CostConfig::default()) {
        Ok(_) => Ok(overrides),
        Err(error) => Err(ApiError::invalid(format!("nvext.router.{}", error.name), format!("nvext.router.{error}"))),
    }
}

fn check_priority(priority: f64, param: &'static str) -> Result<f64, ApiError> {
    if priority.abs() <= MAX_PRIORITY {
        return Ok(priority);
    }
    Err(ApiError::invalid(param, format!("{param} must be from {:e} to {MAX_PRIORITY:e}", -MAX_PRIORITY)))
}

/// What the headers say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeaderHints {
    worker: Option<(&'static str, u64)>,
    dp_rank: Option<(&'static str, u32)>,
    priority: Option<f64>,
}

impl HeaderHints {
    /// Reads the headers. Cost: five lookups.
    pub fn read(headers: &HeaderMap) -> Result<Self, ApiError> {
        let mut worker: Option<(&'static str, u64)> = None;
        for name in WORKER_HEADERS {
            let Some(id) = number::<u64>(headers, name, "the instance id of a worker")? else { continue };
            match worker {
                Some((first, other)) if other != id => {
                    return Err(ApiError::invalid(name, format!("{first} and {name} name different workers")));
                }
                _ => worker = Some((name, id)),
            }
        }
        let dp_rank = RANK_HEADERS.into_iter().filter_map(|name| {
            let rank = number(headers, name, "a data-parallel rank").transpose()?;
            Some(rank.map(|rank| (name, rank)))
        });
        let dp_rank = dp_rank.collect::<Result<Vec<_>, _>>()?.into_iter().next();
        let priority: Option<f64> = number(headers, PRIORITY_HEADER, "a number")?;
        let priority = priority.map(|priority| check_priority(priority, PRIORITY_HEADER)).transpose()?;
        Ok(Self { worker, dp_rank, priority })
    }

    /// Puts headers and body together: a header goes before the body, except that they must not name different workers.
    pub fn with(self, body: BodyHints) -> Result<RouteOptions, ApiError> {
        let BodyHints { worker, mut hints } = body;
        if let Some(((header, one), (_, other))) = self.worker.zip(worker)
            && one != other
        {
            return Err(ApiError::invalid(header, format!("{header} and nvext name different workers")));
        }
        hints.dp_rank = self.dp_rank.map(|(_, rank)| rank).or(hints.dp_rank);
        hints.priority = self.priority.unwrap_or(hints.priority);
        let (pinned_by, pinned_worker) = self.worker.or(worker).unzip();
        if hints.dp_rank.is_some() && pinned_worker.is_none() {
            let message = "a dp_rank is one of a worker: name the worker, too";
            return Err(ApiError::invalid(self.dp_rank.map_or("nvext.dp_rank", |(name, _)| name), message));
        }
        Ok(RouteOptions { pinned_worker, pinned_by, hints, ..RouteOptions::default() })
    }
}

fn number<T: std::str::FromStr>(headers: &HeaderMap, name: &'static str, what: &str) -> Result<Option<T>, ApiError> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let parsed = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    parsed.map(Some).ok_or_else(|| ApiError::invalid(name, format!("{name} must be {what}")))
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;
    use serde_json::{Value, json};

    use super::*;

    fn body(nvext: Value) -> Result<BodyHints, ApiError> {
        let nvext: NvExt = serde_json::from_value(nvext).expect("well formed");
        BodyHints::check(Some(&nvext), -3)
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> Result<HeaderHints, ApiError> {
        let pairs = pairs.iter().map(|(name, value)| (name.parse().expect("a name"), HeaderValue::from_static(value)));
        HeaderHints::read(&pairs.collect())
    }

    fn param(result: Result<impl std::fmt::Debug, ApiError>) -> String {
        result.expect_err("invalid").param.expect("a field").into_owned()
    }

    #[test]
    fn all_hints_are_read() {
        let read = body(json!({
            "backend_instance_id": 7, "dp_rank": 1,
            "agent_hints": {"priority": 2.5, "strict_priority": 1, "osl": 200, "latency_sensitivity": 1},
            "router": {"router_temperature": 0.5, "overlap_score_credit": 0.25, "prefill_load_scale": 2},
            "routing_constraints": {"required": {"zone": "a"}, "revision": "r2", "excluded_workers": [9]},
            "annotations": ["token_ids"],
        }));
        let read = read.expect("valid");
        let cost = CostOverrides {
            temperature: Some(0.5),
            overlap_score_credit: Some(0.25),
            prefill_load_scale: Some(2.0),
            ..CostOverrides::default()
        };
        let hints = RoutingHints {
            dp_rank: Some(1),
            excluded: vec![9],
            labels: vec![("zone".into(), "a".into())],
            revision: Some("r2".into()),
            cost,
            priority: 2.5,
            strict_priority: 1,
            expected_output_tokens: Some(200),
        };
        assert_eq!(read, BodyHints { worker: Some(("nvext.backend_instance_id", 7)), hints });
    }

    #[test]
    fn without_hints_the_requests_own_priority_counts() {
        let expected = RoutingHints { priority: -3.0, ..RoutingHints::default() };
        assert_eq!(body(json!({})), Ok(BodyHints { worker: None, hints: expected.clone() }));
        assert_eq!(BodyHints::check(None, -3), Ok(BodyHints { worker: None, hints: expected }));
    }

    #[test]
    fn the_field_at_fault_is_named() {
        assert_eq!(param(body(json!({"backend_instance_id": 1, "decode_worker_id": 2}))), "nvext.decode_worker_id");
        assert_eq!(param(body(json!({"router": {"temperature": -1}}))), "nvext.router.temperature");
        assert_eq!(param(body(json!({"router": {"overlap_score_credit": 1.5}}))), "nvext.router.overlap_score_credit");
        assert_eq!(param(body(json!({"agent_hints": {"priority": 1e300}}))), "nvext.agent_hints.priority");
        let many: Vec<u64> = (0..65).collect();
        let many = json!({"routing_constraints": {"excluded_workers": many}});
        assert_eq!(param(body(many)), "nvext.routing_constraints.excluded_workers");
        for name in
            ["x-armature-worker", "x-dynamo-worker-instance-id", "x-dynamo-dp-rank", "x-dynamo-request-priority"]
        {
            assert_eq!(param(headers(&[(name, "much")])), name);
        }
        assert_eq!(param(headers(&[("x-dynamo-request-priority", "NaN")])), "x-dynamo-request-priority");
    }

    #[test]
    fn a_header_goes_before_the_body_but_they_must_name_one_worker() {
        let same = [("x-armature-worker", "7"), ("x-dynamo-worker-instance-id", " 7 ")];
        let both = headers(&same).expect("valid").with(body(json!({"backend_instance_id": 7})).expect("valid"));
        let both = both.expect("valid");
        assert_eq!((both.pinned_worker, both.pinned_by), (Some(7), Some("x-dynamo-worker-instance-id")));
        let decodes = HeaderHints::default().with(body(json!({"decode_worker_id": 8})).expect("valid")).expect("valid");
        assert_eq!((decodes.pinned_worker, decodes.pinned_by), (Some(8), Some("nvext.decode_worker_id")));
        let differ = [("x-armature-worker", "7"), ("x-dynamo-worker-instance-id", "8")];
        assert_eq!(param(headers(&differ)), "x-dynamo-worker-instance-id");
        let other = body(json!({"decode_worker_id": 8})).expect("valid");
        assert_eq!(param(headers(&same).expect("valid").with(other).map(|_| ())), "x-dynamo-worker-instance-id");
        let ranked = headers(&[("x-dynamo-dp-rank", "2"), ("x-dynamo-request-priority", "4")]).expect("valid");
        let options = ranked.clone().with(body(json!({"backend_instance_id": 5, "dp_rank": 1})).expect("valid"));
        let options = options.expect("valid");
        assert_eq!((options.pinned_worker, options.hints.dp_rank, options.hints.priority), (Some(5), Some(2), 4.0));
        assert_eq!(param(ranked.with(BodyHints::default()).map(|_| ())), "x-dynamo-dp-rank");
        let rank = body(json!({"dp_rank": 1})).expect("valid");
        assert_eq!(param(HeaderHints::default().with(rank).map(|_| ())), "nvext.dp_rank");
    }
}
