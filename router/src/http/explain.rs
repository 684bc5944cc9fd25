//! Why a request went where it did, or would go: as JSON, for people and for `armature explain`.
//!
//! `POST /v1/route/explain` takes the body of a chat or a completion and has no effect; `GET /debug/decisions/{id}` shows past
//! decisions about a request, one for each attempt of each of its choices, as long as the ring of them reaches back. The id is any
//! that the client has seen: that of the answer, or the request's (`x-request-id`).

use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use kv_index::WorkerRank;
use routing::{Candidate, Explanation, Pick, Record, Reported, Terms, WorkerSet};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::body::{self, ResponseBody};
use super::generate::check_content_type;
use super::routes::{Frontend, error_response, json_response};
use crate::backend::{Backend, PrefillChoice};
use crate::openai::Endpoint;
use crate::openai::error::ApiError;
use crate::openai::routing::HeaderHints;
use crate::preprocess::{Prepared, generates};

impl<B: Backend> Frontend<B> {
    /// Where the request in the body would go now.
    pub(super) async fn explain(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        match self.explained(request).await {
            Ok(explanation) => json_response(StatusCode::OK, explanation.to_string()),
            Err(error) => error_response(&error),
        }
    }

    async fn explained(&self, request: Request<Incoming>) -> Result<Value, ApiError> {
        check_content_type(request.headers())?;
        let hints = HeaderHints::read(request.headers())?;
        let (head, incoming) = request.into_parts();
        let mut room = self.admission.room();
        let body = body::read(&head.headers, incoming, &self.config, &mut room).await?;
        let endpoint = endpoint_of(&body);
        if let Some(proxy) = self.backend.proxy() {
            let (key, _room) = self.key(proxy, &body, endpoint, room).await?;
            let (explanation, workers) = proxy.explain(&key, &hints.with(key.hints.clone())?)?;
            return Ok(explanation_json(&explanation, &workers));
        }
        let (served, Prepared { params, prompts, .. }) = self.admit(body, room, endpoint).await?;
        let options = hints.with(params.routing.clone())?;
        let mut generates = generates(prompts, &params, "explain", &served, endpoint)?;
        let explained = self.backend.explain(&generates.swap_remove(0), &options)?;
        let workers = self.backend.workers();
        let mut shown = explanation_json(&explained.answer, &workers);
        shown["prefill"] = explained.prefill.map_or(Value::Null, |choice| prefill_json(&choice, &workers));
        Ok(shown)
    }

    /// The decisions about a request that are still known.
    pub(super) fn decisions(&self, id: &str) -> Response<ResponseBody> {
        let records = self.backend.decisions(id);
        if records.is_empty() {
            let message = format!("no decision about {id:?} is known here (any more)");
            return error_response(&ApiError::unknown_request(message));
        }
        let workers = self.backend.workers();
        let attempts: Vec<Value> = records.iter().map(|record| record_json(record, &workers)).collect();
        json_response(StatusCode::OK, json!({"id": id, "attempts": attempts}).to_string())
    }
}

/// A chat has messages. What is no JSON at all is refused by whoever reads it in earnest.
fn endpoint_of(body: &[u8]) -> Endpoint {
    #[derive(Deserialize)]
    struct Kind {
        messages: Option<IgnoredAny>,
    }
    match serde_json::from_slice(body) {
        Ok(Kind { messages: None }) => Endpoint::Completions,
        _ => Endpoint::Chat,
    }
}

fn record_json(record: &Record, workers: &WorkerSet) -> Value {
    let mut shown = explanation_json(&record.explanation, workers);
    shown["request"] = json!(record.request.id());
    shown["model"] = json!(&*record.model);
    shown["seconds_since_start"] = json!(record.at.as_secs_f64());
    shown["workers_omitted"] = json!(record.omitted);
    shown
}

/// Who computes the prompt, where there are prefill workers.
fn prefill_json(choice: &PrefillChoice, workers: &WorkerSet) -> Value {
    match choice {
        PrefillChoice::Remote(explanation) => explanation_json(explanation, workers),
        PrefillChoice::Local(reason) => json!({"local": reason}),
    }
}

/// Units: everything in blocks of the KV cache, but for tokens and requests, which say so.
fn explanation_json(explanation: &Explanation, workers: &WorkerSet) -> Value {
    let (cost, size) = (&explanation.cost, explanation.block_size.get());
    let least = explanation.candidates.iter().map(|row| row.cost).fold(f64::INFINITY, f64::min);
    let chosen = explanation.outcome.as_ref().ok().map(|decision| decision.rank);
    let reported = |rank: WorkerRank| {
        let at = explanation.reports.binary_search_by_key(&rank, |(rank, _)| *rank).ok()?;
        Some(explanation.reports[at].1)
    };
    let rows = explanation.rows().map(|(row, terms)| {
        let mut shown = named(row.rank, workers);
        shown["verdict"] = verdict(row, chosen);
        shown["tie"] = json!(row.exclusion.is_none() && row.cost <= least);
        shown["overlap"] = json!({"device": row.overlap.device, "host": row.overlap.host, "disk": row.overlap.disk,
            "shared": row.overlap.shared, "shared_beyond": row.shared_beyond});
        shown["load"] = json!({"active_blocks": row.load.active_blocks, "prefill_tokens": row.load.prefill_tokens,
            "requests": row.load.requests, "unbooked_requests": row.unbooked_requests});
        shown["reported"] = reported(row.rank).map_or(Value::Null, |reported| reported_json(&reported));
        shown["terms"] = terms.map_or(Value::Null, |terms| terms_json(&terms));
        shown
    });
    let outcome = match &explanation.outcome {
        Ok(decision) => {
            let mut shown = named(decision.rank, workers);
            shown["cost"] = json!(decision.terms.cost);
            shown["eligible"] = json!(decision.eligible);
            shown["pick"] = pick_json(&decision.pick, workers);
            shown
        }
        Err(refusal) => json!({"refusal": refusal.to_string()}),
    };
    json!({
        "mode": explanation.mode.as_str(),
        "prompt_tokens": explanation.prompt_tokens,
        "block_size": size,
        "weights": {
            "overlap_score_credit": cost.overlap_score_credit,
            "host_cache_hit_weight": cost.host_cache_hit_weight,
            "disk_cache_hit_weight": cost.disk_cache_hit_weight,
            "shared_cache_multiplier": cost.shared_cache_multiplier,
            "prefill_load_scale": cost.prefill_load_scale,
            "temperature": cost.temperature,
        },
        "outcome": outcome,
        "workers": rows.collect::<Vec<_>>(),
    })
}

fn named(rank: WorkerRank, workers: &WorkerSet) -> Value {
    let name = workers.get(rank).map(|worker| &*worker.name);
    json!({"worker": name, "worker_id": rank.worker.0, "dp_rank": rank.dp_rank})
}

fn verdict(row: &Candidate, chosen: Option<WorkerRank>) -> Value {
    match row.exclusion {
        Some(exclusion) => json!(format!("excluded: {exclusion}")),
        None if chosen == Some(row.rank) => json!("chosen"),
        None => json!("eligible"),
    }
}

/// What the worker last said itself; what it does not say is null.
fn reported_json(reported: &Reported) -> Value {
    json!({"active_blocks": reported.active_blocks, "prefill_tokens": reported.prefill_tokens,
        "kv_used_blocks": reported.kv_used_blocks, "running_requests": reported.running_requests,
        "waiting_requests": reported.waiting_requests})
}

fn terms_json(terms: &Terms) -> Value {
    json!({
        "prefill_blocks": terms.prefill_blocks,
        "credits": {"device": terms.credits.device, "host": terms.credits.host, "disk": terms.credits.disk,
            "shared": terms.credits.shared},
        "adjusted_prefill_blocks": terms.adjusted_prefill_blocks,
        "decode_blocks": terms.decode_blocks,
        "cost": terms.cost,
    })
}

fn pick_json(pick: &Pick, workers: &WorkerSet) -> Value {
    match pick {
        Pick::Lowest { ties } => json!({"how": "lowest cost", "ties": ties}),
        Pick::Softmax { temperature, draw, probability } => {
            json!({"how": "softmax", "temperature": temperature, "draw": draw, "probability": probability})
        }
        Pick::Turn => json!({"how": "its turn"}),
        Pick::Dice => json!({"how": "random"}),
        Pick::TwoChoices { other } => json!({"how": "fewer requests of two", "other": named(*other, workers)}),
        Pick::FewestRequests { ties } => json!({"how": "fewest requests", "ties": ties}),
        Pick::Named => json!({"how": "named by the request"}),
    }
}
