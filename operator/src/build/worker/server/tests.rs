//! What workers are told of the servers beside them, and what servers may not be told.

use serde_json::{Value, json};

use super::*;

/// An engine with these arguments.
fn engine(name: &str, args: &[&str]) -> Engine {
    let mut server = json!({"image": "engine:1", "args": args});
    if name == "tensorrtLlm" {
        server["kvBlocks"] = 1000.into();
        server["contextLength"] = 4096.into();
    }
    serde_json::from_value(json!({ name: server })).expect("valid")
}

/// A pool of it.
fn spec(name: &str, args: &[&str]) -> WorkerPoolSpec {
    let model = json!({"name": "m", "source": "hf://org/name@v2"});
    let spec = json!({"deployment": "chat", "pool": "w", "model": model, "engine": engine(name, args)});
    serde_json::from_value(spec).expect("valid")
}

/// What its worker is told of `args`, beyond what it is told of none.
fn told(name: &str, args: &[&str]) -> Vec<String> {
    let flags = |args: &[&str]| {
        let spec = spec(name, args);
        let kind = spec.worker.engine.as_ref().and_then(Kind::of).expect("a server");
        Beside::new(kind, &spec, &Source::Hub("org/name@v2".into())).expect("a directory").worker_args()
    };
    flags(args).split_off(flags(&[]).len())
}

fn checked(name: &str, args: &[&str], env: &str) -> Result<(), Invalid> {
    let env: Value = json!([{"name": env, "value": "x"}]);
    let pool = serde_json::from_value(json!({ "env": env })).expect("valid");
    Kind::of(&engine(name, args)).expect("a server").check(&pool)
}

#[test]
fn workers_are_told_what_their_servers_were_told() {
    assert_eq!(told("vllm", &["--max-model-len=8192", "--max-num-seqs-x=1"]), Vec::<String>::new());
    assert_eq!(
        told("vllm", &["--max-num-seqs=8", "--max-num-batched-tokens", "512", "--max-num-seqs", "64"]),
        ["--vllm-max-num-seqs=64", "--vllm-max-num-batched-tokens=512"]
    );
    assert_eq!(told("vllm", &["--scheduling_policy=priority"]), ["--vllm-priority"]);
    assert_eq!(
        told("sglang", &["--max-running-requests=8", "--chunked-prefill-size", "4096", "--enable-priority-scheduling"]),
        ["--engine-max-num-seqs=8", "--engine-max-num-batched-tokens=4096", "--engine-priority"]
    );
    assert_eq!(told("sglang", &["--chunked-prefill-size=-1"]), Vec::<String>::new());
    assert_eq!(
        told("tensorrtLlm", &["--max_batch_size", "16", "--max_num_tokens=2048"]),
        ["--engine-max-num-seqs=16", "--engine-max-num-batched-tokens=2048"]
    );
}

#[test]
fn what_would_part_a_server_from_its_worker_is_refused() {
    for name in ["vllm", "sglang", "tensorrtLlm"] {
        assert_eq!(checked(name, &["--max-model-len=8192", "--block_size", "64"], "HF_TOKEN"), Ok(()));
        let refused = checked(name, &["--port=1"], "HF_TOKEN").expect_err("the worker would not find it");
        assert!(refused.to_string().starts_with("port of "), "{refused}");
    }
    for (engine, arg, argument) in [
        ("vllm", "--served_model_name", "served-model-name"),
        ("vllm", "-dp", "dp"),
        ("sglang", "--disaggregation-mode", "disaggregation-mode"),
        ("tensorrtLlm", "--extra_llm_api_options", "extra-llm-api-options"),
    ] {
        let refused = checked(engine, &[arg, "2"], "HF_TOKEN").expect_err("it is the operator's");
        assert!(refused.to_string().starts_with(&format!("{argument} of ")), "{refused}");
    }
    assert!(checked("vllm", &[], "VLLM_API_KEY").is_err());
    let option =
        json!({"tensorrtLlm": {"image": "trt:1", "kvBlocks": 1, "contextLength": 1, "options": {"max_seq_len": 2}}});
    let engine = serde_json::from_value(option).expect("valid");
    assert!(Kind::of(&engine).expect("a server").check(&WorkerTemplate::default()).is_err());
}

#[test]
fn servers_exchange_kv_only_if_it_is_the_same() {
    let kind = |name, args: &[&str]| Kind::of(&engine(name, args)).expect("a server").kv_kind();
    for (name, same, other) in [
        ("vllm", "--max-num-seqs=8", "--kv_cache_dtype=fp8"),
        ("sglang", "--max-running-requests=8", "--page-size=64"),
        ("tensorrtLlm", "--max_batch_size=8", "--backend=trt"),
    ] {
        assert_eq!(kind(name, &[same]), kind(name, &[]), "{name}");
        assert_ne!(kind(name, &[other]), kind(name, &[]), "{name}");
    }
}
