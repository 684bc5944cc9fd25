//! LoRA adapters of workers with an agent: a request for one goes where it is, and finds its blocks.

use kv_hashing::HashSpace;
use protocol::request_plane::Generate;
use router::backend::{Backend, RouteOptions};
use router::openai::{Endpoint, parse};
use router::preprocess::{generates, prepare};
use routing::Mode;
use serde_json::json;

use crate::harness::*;
use crate::worker::Life;

/// What a completion of this prompt makes workers do.
fn generate(cluster: &Cluster, model: &str, prompt: &[u32]) -> Generate {
    let served = cluster.backend().model(model).expect("it is served");
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 3});
    let request = parse::parse(body.to_string().as_bytes()).expect("well formed");
    let prepared = prepare(&served, &request, Endpoint::Completions, 1).expect("valid");
    let generates = generates(prepared.prompts, &prepared.params, "r", &served, Endpoint::Completions);
    generates.expect("it fits").swap_remove(0)
}

#[tokio::test]
async fn a_request_for_an_adapter_goes_to_workers_that_have_it_and_finds_its_blocks() {
    let cluster = Cluster::start(Mode::Kv).await;
    let poet = |name: &str| Life {
        card: json!({"display_name": "poet", "lora": {"name": "poet", "max_gpu_lora_count": 4}}),
        ..Life::new(name)
    };
    let base = cluster.worker("base").await;
    let (warm, cold) = (cluster.worker_of(poet("warm")).await, cluster.worker_of(poet("cold")).await);
    let tokens = prompt(1, 4);
    warm.store(&tokens);
    base.store(&tokens);
    cluster.until_equal(&base).await;
    cluster.until("its blocks are known", || cluster.indexed(&warm).device == 4).await;

    let request = generate(&cluster, "poet", &tokens);
    assert_eq!((request.model.as_str(), request.lora.as_str()), ("poet", "poet"));
    for _ in 0..3 {
        let routed = cluster.backend().generate(request.clone(), RouteOptions::default()).await.expect("routed");
        assert_eq!((routed.worker_id, routed.overlap_blocks), (warm.life.instance_id, 4));
        drain(routed).await.1.expect("it ends well");
    }
    assert!(warm.requests().iter().all(|sent| sent.lora == "poet"), "the engine is told");
    let pinned = RouteOptions { pinned_worker: Some(cold.life.instance_id), ..RouteOptions::default() };
    let routed = cluster.backend().generate(request, pinned).await.expect("routed");
    assert_eq!(routed.overlap_blocks, 0);

    let plain = generate(&cluster, MODEL, &tokens);
    assert_eq!(plain.lora, "");
    let routed = cluster.backend().generate(plain, RouteOptions::default()).await.expect("routed");
    assert_eq!((routed.worker_id, routed.overlap_blocks), (base.life.instance_id, 4), "the same text, other blocks");
    let of_base = cluster.backend().overlaps("poet", &tokens, HashSpace::default()).expect("a model");
    assert_eq!(of_base.get(rank(&warm)).total(), 0);
}
