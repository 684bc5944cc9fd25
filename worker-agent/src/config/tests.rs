//! Settings that work, and the line that each wrong one gets.

use clap::Parser;

use super::*;
use crate::engine::mocker::timing::{Profile, TimingModel};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    config: Config,
}

/// The settings of `worker --name w --discovery-backend file --discovery-dir d` with more flags.
fn with(flags: &[&str]) -> Result<Settings, String> {
    let base = ["worker", "--name", "w", "--discovery-backend", "file", "--discovery-dir", "d"];
    parse(&[&base[..], flags].concat())
}

fn parse(args: &[&str]) -> Result<Settings, String> {
    let cli = Cli::try_parse_from(args).map_err(|error| error.to_string())?;
    cli.config.settings().map_err(|error| error.to_string())
}

#[test]
fn the_defaults_follow_role_and_host() {
    let settings = with(&[]).expect("valid");
    assert_eq!(
        (settings.component.as_str(), settings.bind.request.to_string().as_str()),
        ("backend", "127.0.0.1:9000")
    );
    let settings = with(&["--role", "prefill", "--host", "10.0.0.7", "--labels", "zone=a,gpu=h200"]).expect("valid");
    assert_eq!((settings.component.as_str(), settings.bind.admin.to_string().as_str()), ("prefill", "0.0.0.0:9090"));
    assert_eq!(settings.labels["gpu"], "h200");
    assert_eq!(settings.bind.transfer.port(), 0, "file discovery: several workers share a machine");
    assert_eq!(with(&["--host", "fd00::7"]).expect("valid").bind.request.to_string(), "[::]:9000");
}

#[test]
fn each_wrong_value_gets_one_line_that_names_it() {
    for (flags, line) in [
        (&["--block-size", "24"][..], "--block-size \"24\": must be 16, 32 or 64"),
        (&["--kv-blocks", "0"], "--kv-blocks \"0\": must be at least 1"),
        (
            &["--host", "0.0.0.0"],
            "--host \"0.0.0.0\": must be a host or address that routers can connect to, without a port",
        ),
        (
            &["--host", "pod:9000"],
            "--host \"pod:9000\": must be a host or address that routers can connect to, without a port",
        ),
        (&["--event-port", "9000"], "--event-port \"9000\": is another port of this worker already"),
        (&["--transfer-port", "9001"], "--transfer-port \"9001\": is another port of this worker already"),
        (&["--kv-lease-secs", "0"], "--kv-lease-secs \"0\": must be from 1 to 3600"),
        (&["--kv-transfer-timeout-ms", "0"], "--kv-transfer-timeout-ms \"0\": must be from 1 to 600000"),
        (&["--labels", "zone"], "--labels \"zone\": must be key=value"),
        (&["--component", "../x"], "--component \"../x\": must be 1 to 253 letters"),
        (&["--max-num-batched-tokens", "8"], "--max-num-batched-tokens \"8\": must be at least --max-num-seqs"),
        (&["--mocker-speedup-ratio=-1"], "--mocker-speedup-ratio \"-1\": must be 0 or from 0.001 to 1000000"),
        (&["--mocker-kv-token-ns", "NaN"], "--mocker-kv-token-ns \"NaN\": must be from 0 to 1000000000"),
        (&["--mocker-answer-tokens", "0.5"], "--mocker-answer-tokens \"0.5\": must be at least 1"),
        (&["--mocker-workers", "0"], "--mocker-workers \"0\": must be from 1 to 10000"),
        (&["--engine", "vllm"], "--engine vllm needs --model-path"),
        (&["--engine", "tensorrt-llm"], "--engine tensorrt-llm needs --model-path"),
        (&["--model-path", "m"], "--model-path needs --engine vllm"),
        (&["--engine", "mocker", "--device", "cuda"], "--device needs --engine built-in"),
        (
            &["--engine", "vllm", "--model-path", "m", "--vllm-url", "https://a:1"],
            "--engine-url \"https://a:1\": must be http://HOST:PORT",
        ),
        (
            &["--engine", "vllm", "--model-path", "m", "--vllm-block-size", "0"],
            "--engine-block-size \"0\": must be at least 1",
        ),
    ] {
        let error = with(flags).expect_err(line);
        assert!(error.starts_with(line), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn discovery_needs_its_own_settings_and_no_others() {
    let kubernetes = ["worker", "--name", "p", "--discovery-backend", "kubernetes"];
    let more = |flags: &[&'static str]| parse(&[&kubernetes[..], flags].concat());
    assert!(more(&[]).expect_err("no pod").contains("needs POD_UID"));
    let error = more(&["--discovery-dir", "d"]).expect_err("two backends");
    assert_eq!(error, "--discovery-backend kubernetes and --discovery-dir contradict each other; drop one");
    let settings = more(&["--pod-uid", "u", "--pod-namespace", "n"]).expect("valid");
    let pod = Pod { name: "p".into(), namespace: "n".into(), uid: "u".into() };
    assert_eq!(settings.discovery, Discovery::Kubernetes(pod));
    assert_eq!(settings.bind.transfer.port(), 9002, "a pod has its ports for itself");
    let error = parse(&["worker", "--name", "p", "--discovery-backend", "file"]).expect_err("no directory");
    assert_eq!(error, "--discovery-backend file needs --discovery-dir");
}

#[test]
fn mockers_of_one_process_differ_in_name_and_share_no_port() {
    let config = |args: &[&str]| Cli::try_parse_from(args).expect("flags").config;
    let file = ["worker", "--name", "m", "--engine", "mocker", "--discovery-backend", "file", "--discovery-dir", "d"];
    let alone = config(&file).mockers().expect("one");
    assert_eq!((alone.len(), alone[0].name.as_str(), alone[0].port), (1, "m", 9000));
    let three = config(&[&file[..], &["--mocker-workers", "3"]].concat()).mockers().expect("three");
    let names: Vec<_> = three.iter().map(|config| config.name.as_str()).collect();
    assert_eq!(names, ["m-0", "m-1", "m-2"]);
    assert!(three.iter().all(|config| (config.port, config.event_port, config.admin_port) == (0, 0, 0)));
    let pod = config(&["worker", "--name", "m", "--discovery-backend", "kubernetes", "--mocker-workers", "3"]);
    assert_eq!(
        pod.mockers().expect_err("one pod").to_string(),
        "--mocker-workers and --discovery-backend kubernetes contradict each other; drop one"
    );
}

#[test]
fn the_mocker_s_times_are_its_profile_s_unless_given() {
    let options = |args: &[&str]| {
        let base = ["worker", "--name", "m", "--engine", "mocker"];
        Cli::try_parse_from([&base[..], args].concat()).expect("flags").config.mocker.options()
    };
    assert_eq!(options(&[]).timing, Profile::Llama3_8b.timing());
    assert_eq!(options(&["--mocker-profile", "llama-3-70b"]).timing, Profile::Llama3_70b.timing());
    let given = options(&["--mocker-base-ms", "2.5", "--mocker-kv-token-ns", "7"]).timing;
    assert_eq!(given, TimingModel { base_ns: 2.5e6, kv_token_ns: 7.0, ..Profile::Llama3_8b.timing() });
    assert_eq!(options(&["--speedup-ratio", "0"]).speedup_ratio, 0.0);
}

#[test]
fn vllm_is_asked_where_it_is_and_listens_to_only_as_far_as_needed() {
    let settings = |args: &[&str]| {
        let base = ["worker", "--name", "v", "--engine", "vllm", "--model-path", "m"];
        Cli::try_parse_from([&base[..], args].concat()).expect("flags").config.remote_settings().expect("valid")
    };
    let beside = settings(&["--vllm-kv-events", "tcp://*:5557;replay=tcp://127.0.0.1:5558"]);
    assert_eq!((beside.url.as_str(), beside.events_bind.is_loopback()), ("http://127.0.0.1:8000", true));
    assert_eq!(beside.events.expect("given").bound_port(), Some(5557));
    let apart = settings(&["--vllm-url", "http://gpu-7:8000/v1/"]);
    assert_eq!((apart.url.as_str(), apart.events_bind.is_unspecified()), ("http://gpu-7:8000", true));
    let refused = Cli::try_parse_from(["worker", "--name", "v", "--vllm-kv-events", "ipc://x"]);
    assert!(refused.err().expect("no address").to_string().contains("tcp://HOST:PORT"));
}

#[cfg(not(feature = "nixl"))]
#[test]
fn a_build_without_nixl_says_so() {
    let error = with(&["--kv-transfer", "nixl"]).expect_err("there is none");
    assert_eq!(error, "--kv-transfer \"nixl\": needs a build with NIXL (cargo feature `nixl`)");
}
