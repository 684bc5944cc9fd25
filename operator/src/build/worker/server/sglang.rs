//! SGLang beside a worker. From its documented arguments: not tested with the real engine.
//!
//! One that computes prompts listens on all addresses, its API included: the servers that decode meet it at its bootstrap port,
//! which is at the host of its API.

use crds::worker_pool::{Role, Server, WorkerPoolSpec};

use super::arguments::{is_set, last};
use super::{Dialect, EVENT_PORT, Model, REPLAY_PORT, Recipe, kv_events, pod_ip};

pub(super) const DIALECT: Dialect = Dialect {
    name: "SGLang",
    container: "sglang",
    command: &["python3", "-m", "sglang.launch_server"],
    // Those that would part SGLang from its worker, or hide what it was told.
    refused: &[
        "admin-api-key",
        "api-key",
        "config",
        "data-parallel-size",
        "disaggregation-bootstrap-port",
        "disaggregation-mode",
        "dp",
        "dp-size",
        "download-dir",
        "fastapi-root-path",
        "grpc-mode",
        "host",
        "kv-events-config",
        "model",
        "model-path",
        "nnodes",
        "node-rank",
        "port",
        "served-model-name",
        "smg-grpc-mode",
        "ssl-ca-certs",
        "ssl-certfile",
        "ssl-keyfile",
        "tokenizer-worker-num",
    ],
    refused_variable: None,
    kv: &[
        "attention-backend",
        "dtype",
        "json-model-override-args",
        "kv-cache-dtype",
        "model-impl",
        "page-size",
        "quantization",
        "revision",
    ],
    api_port: 30000,
};

/// Port at which servers that decode meet one that computes prompts.
const BOOTSTRAP_PORT: i32 = 8998;
/// Tokens per KV block where the author does not say: its own default makes every token a block.
const PAGE_SIZE: u32 = 32;

pub(super) fn recipe(spec: &WorkerPoolSpec, server: &Server, model: &Model, name: &str) -> Recipe {
    let port = DIALECT.api_port;
    let mut args = vec![format!("--model-path={}", model.repository)];
    args.extend(model.revision());
    let host = if spec.role == Role::Prefill { "0.0.0.0" } else { "127.0.0.1" };
    args.extend([
        format!("--served-model-name={name}"),
        format!("--host={host}"),
        format!("--port={port}"),
        format!("--page-size={PAGE_SIZE}"),
        format!("--kv-events-config={}", kv_events(false)),
    ]);
    if spec.role != Role::Aggregated {
        args.extend([
            format!("--disaggregation-mode={}", spec.role.as_str()),
            "--disaggregation-transfer-backend=nixl".into(),
            format!("--disaggregation-bootstrap-port={BOOTSTRAP_PORT}"),
        ]);
    }
    let mut worker_args = vec![
        "--engine=sglang".into(),
        format!("--engine-url=http://127.0.0.1:{port}"),
        format!("--model-path={}", model.directory),
        format!("--engine-kv-events=tcp://*:{EVENT_PORT};replay=tcp://127.0.0.1:{REPLAY_PORT}"),
    ];
    worker_args.extend(last(&server.args, "max-running-requests").map(|most| format!("--engine-max-num-seqs={most}")));
    // -1 turns chunks off.
    let chunk = last(&server.args, "chunked-prefill-size").filter(|size| !size.starts_with('-'));
    worker_args.extend(chunk.map(|most| format!("--engine-max-num-batched-tokens={most}")));
    worker_args.extend(is_set(&server.args, "enable-priority-scheduling").then(|| "--engine-priority".into()));
    Recipe {
        args,
        worker_args,
        variables: vec![pod_ip("SGLANG_HOST_IP")],
        port: (spec.role == Role::Prefill).then_some(("bootstrap", BOOTSTRAP_PORT)),
        options: None,
    }
}
