//! TensorRT-LLM beside a worker. From its documented arguments: not tested with the real engine.
//!
//! Most of what it is told stands in a file of options. That is an annotation of the pod, which appears as a file there: it
//! changes with the pod's revision, and there is no other object to keep in step.

use crds::worker_pool::{Role, TensorRtLlm, WorkerPoolSpec};
use serde_json::{Map, Value, json};

use super::arguments::last;
use super::{Dialect, Model, OPTIONS_DIRECTORY, OPTIONS_FILE, Recipe};

pub(super) const DIALECT: Dialect = Dialect {
    name: "TensorRT-LLM",
    container: "tensorrt-llm",
    command: &["trtllm-serve"],
    // Those that would part the server from its worker, or hide what it was told.
    refused: &[
        "config",
        "config-file",
        "disagg-cluster-uri",
        "extra-llm-api-options",
        "host",
        "max-seq-len",
        "metadata-server-config-file",
        "port",
        "server-role",
    ],
    refused_variable: None,
    kv: &["backend", "revision"],
    api_port: 8000,
};

/// Tokens per KV block where the author does not say: its own default.
const BLOCK_SIZE: u32 = 32;
/// KV events that it keeps until its worker asks for them, which is several times in a second.
const EVENT_BUFFER: u32 = 16384;
/// Options that the fields beside them, or the operator, say.
const REFUSED_OPTIONS: [&[&str]; 4] = [
    &["max_seq_len"],
    &["disagg_cluster"],
    &["kv_cache_config", "max_tokens"],
    &["kv_cache_config", "tokens_per_block"],
];
/// Options that change what the bytes of a KV block are.
const KV_OPTIONS: [&[&str]; 5] =
    [&["dtype"], &["attn_backend"], &["quant_config"], &["kv_cache_config", "dtype"], &["backend"]];

/// What stands at this path.
fn at<'a>(options: &'a Map<String, Value>, path: &[&str]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    rest.iter().try_fold(options.get(*first)?, |value, key| value.get(key))
}

/// The first of the author's options that is not his to set.
pub(super) fn refused(engine: &TensorRtLlm) -> Option<String> {
    // Anything but an object in its place would take away what the operator says inside of it.
    if engine.options.get("kv_cache_config").is_some_and(|config| !config.is_object()) {
        return Some("options.kv_cache_config".into());
    }
    let path = REFUSED_OPTIONS.into_iter().find(|path| at(&engine.options, path).is_some())?;
    Some(format!("options.{}", path.join(".")))
}

/// What the KV is, beyond what arguments say.
pub(super) fn kv_kind(engine: &TensorRtLlm) -> Vec<String> {
    let said = KV_OPTIONS.iter().filter_map(|path| Some(format!("{}={}", path.join("."), at(&engine.options, path)?)));
    std::iter::once(format!("tokens_per_block={}", block_size(engine))).chain(said).collect()
}

fn block_size(engine: &TensorRtLlm) -> u32 {
    engine.block_size.unwrap_or(BLOCK_SIZE)
}

/// The file's content: JSON is YAML.
fn options(role: Role, engine: &TensorRtLlm) -> Value {
    let mut options = json!({
        "enable_iter_perf_stats": true,
        "max_seq_len": engine.context_length,
        "kv_cache_config": {
            "enable_block_reuse": true,
            "event_buffer_max_size": EVENT_BUFFER,
            "max_tokens": u64::from(engine.kv_blocks) * u64::from(block_size(engine)),
            "tokens_per_block": block_size(engine),
        },
    });
    if role != Role::Aggregated {
        options["cache_transceiver_config"] = json!({"backend": "DEFAULT"});
    }
    if role == Role::Prefill {
        // Servers that schedule one step ahead refuse to do a prompt only.
        options["disable_overlap_scheduler"] = true.into();
    }
    merge(&mut options, &Value::Object(engine.options.clone()));
    options
}

/// What `over` says wins; objects are merged.
fn merge(into: &mut Value, over: &Value) {
    match (into, over) {
        (Value::Object(into), Value::Object(over)) => {
            for (key, value) in over {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, over) => *into = over.clone(),
    }
}

pub(super) fn recipe(spec: &WorkerPoolSpec, engine: &TensorRtLlm, model: &Model) -> Recipe {
    let port = DIALECT.api_port;
    let args = std::iter::once(model.repository.clone()).chain(model.revision());
    let args = args.chain([
        "--host=127.0.0.1".into(),
        format!("--port={port}"),
        format!("--extra_llm_api_options={OPTIONS_DIRECTORY}/{OPTIONS_FILE}"),
    ]);
    let mut worker_args = vec![
        "--engine=tensorrt-llm".into(),
        format!("--engine-url=http://127.0.0.1:{port}"),
        format!("--model-path={}", model.directory),
        format!("--engine-block-size={}", block_size(engine)),
        format!("--engine-kv-blocks={}", engine.kv_blocks),
        format!("--engine-context-length={}", engine.context_length),
    ];
    // The file wins over arguments.
    for (option, flag) in [("max_batch_size", "max-num-seqs"), ("max_num_tokens", "max-num-batched-tokens")] {
        let in_file = engine.options.get(option).and_then(Value::as_u64).map(|most| most.to_string());
        let most = in_file.or_else(|| last(&engine.server.args, &option.replace('_', "-")).map(str::to_owned));
        worker_args.extend(most.map(|most| format!("--engine-{flag}={most}")));
    }
    Recipe {
        args: args.collect(),
        worker_args,
        variables: Vec::new(),
        port: None,
        options: Some(options(spec.role, engine).to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(options: Value) -> TensorRtLlm {
        let engine =
            json!({"image": "trt:1", "kvBlocks": 1000, "contextLength": 4096, "blockSize": 64, "options": options});
        serde_json::from_value(engine).expect("valid")
    }

    #[test]
    fn the_authors_options_are_merged_over_ours() {
        let engine = engine(json!({"kv_cache_config": {"dtype": "fp8", "event_buffer_max_size": 9},
            "cache_transceiver_config": {"backend": "UCX"}, "enable_chunked_prefill": true}));
        assert_eq!(
            options(Role::Decode, &engine),
            json!({
                "enable_iter_perf_stats": true, "max_seq_len": 4096, "enable_chunked_prefill": true,
                "kv_cache_config": {"enable_block_reuse": true, "event_buffer_max_size": 9, "max_tokens": 64000,
                    "tokens_per_block": 64, "dtype": "fp8"},
                "cache_transceiver_config": {"backend": "UCX"},
            })
        );
    }

    #[test]
    fn one_that_exchanges_no_kv_sets_nothing_up_for_it() {
        assert_eq!(options(Role::Aggregated, &engine(json!({}))).get("cache_transceiver_config"), None);
        for (role, computes_prompts_only) in [(Role::Prefill, json!(true)), (Role::Decode, json!(null))] {
            let options = options(role, &engine(json!({})));
            assert_eq!(options["cache_transceiver_config"], json!({"backend": "DEFAULT"}));
            assert_eq!(options["disable_overlap_scheduler"], computes_prompts_only);
        }
    }

    #[test]
    fn options_that_fields_say_are_refused() {
        for (bad, path) in [
            (json!({"max_seq_len": 1}), "options.max_seq_len"),
            (json!({"kv_cache_config": {"max_tokens": 1}}), "options.kv_cache_config.max_tokens"),
            (json!({"kv_cache_config": {"tokens_per_block": 16}}), "options.kv_cache_config.tokens_per_block"),
            (json!({"disagg_cluster": null}), "options.disagg_cluster"),
            (json!({"kv_cache_config": null}), "options.kv_cache_config"),
        ] {
            assert_eq!(refused(&engine(bad)).as_deref(), Some(path));
        }
        for good in [json!({}), json!({"kv_cache_config": {"dtype": "fp8"}})] {
            assert_eq!(refused(&engine(good)), None);
        }
    }

    #[test]
    fn what_the_bytes_of_a_block_are_is_part_of_its_kind() {
        let kind = |options| kv_kind(&engine(options));
        assert_eq!(kind(json!({"max_batch_size": 8})), kind(json!({})));
        assert_ne!(kind(json!({"kv_cache_config": {"dtype": "fp8"}})), kind(json!({})));
    }
}
