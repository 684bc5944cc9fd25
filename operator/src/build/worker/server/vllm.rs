//! vLLM beside a worker.

use crds::worker_pool::{Role, Server, WorkerPoolSpec};

use super::arguments::{last, set};
use super::{Dialect, EVENT_PORT, Model, REPLAY_PORT, Recipe, kv_events, pod_ip, variable};

pub(super) const DIALECT: Dialect = Dialect {
    name: "vLLM",
    container: "vllm",
    command: &["vllm", "serve"],
    // Those that would part vLLM from its worker, or hide what it was told.
    refused: &[
        "api-key",
        "api-server-count",
        "config",
        "data-parallel-size",
        "download-dir",
        "dp",
        "headless",
        "host",
        "kv-events-config",
        "port",
        "root-path",
        "served-model-name",
        "ssl-ca-certs",
        "ssl-certfile",
        "ssl-keyfile",
        "uds",
        "asc",
    ],
    refused_variable: Some("VLLM_API_KEY"),
    kv: &["dtype", "kv-cache-dtype", "quantization", "hf-overrides", "attention-backend", "model-impl", "revision"],
    api_port: 8000,
};

/// Port at which vLLM servers of other pods ask how KV is fetched from this one.
const NIXL_PORT: i32 = 5600;
/// Arguments that the worker must know too, since vLLM does not tell.
const SHARED: [&str; 2] = ["max-num-seqs", "max-num-batched-tokens"];

pub(super) fn recipe(spec: &WorkerPoolSpec, server: &Server, model: &Model, name: &str) -> Recipe {
    let port = DIALECT.api_port;
    let mut args = vec![model.repository.clone()];
    args.extend(model.revision());
    args.extend([
        format!("--served-model-name={name}"),
        "--host=127.0.0.1".into(),
        format!("--port={port}"),
        "--enable-prefix-caching".into(),
        "--enable-prompt-tokens-details".into(),
        format!("--kv-events-config={}", kv_events(true)),
    ]);
    let kv_role = match spec.role {
        Role::Aggregated => None,
        Role::Prefill => Some("kv_producer"),
        Role::Decode => Some("kv_consumer"),
    };
    args.extend(
        kv_role.map(|role| format!(r#"--kv-transfer-config={{"kv_connector":"NixlConnector","kv_role":"{role}"}}"#)),
    );
    let mut worker_args = vec![
        "--engine=vllm".into(),
        format!("--vllm-url=http://127.0.0.1:{port}"),
        format!("--model-path={}", model.directory),
        format!("--vllm-kv-events=tcp://*:{EVENT_PORT};replay=tcp://127.0.0.1:{REPLAY_PORT}"),
    ];
    worker_args.extend(set(&server.args, &SHARED).into_iter().map(|told| format!("--vllm-{told}")));
    if last(&server.args, "scheduling-policy") == Some("priority") {
        worker_args.push("--vllm-priority".into());
    }
    Recipe {
        args,
        worker_args,
        variables: vec![
            pod_ip("VLLM_NIXL_SIDE_CHANNEL_HOST"),
            variable("VLLM_NIXL_SIDE_CHANNEL_PORT", &NIXL_PORT.to_string()),
        ],
        port: (spec.role != Role::Aggregated).then_some(("nixl", NIXL_PORT)),
        options: None,
    }
}
