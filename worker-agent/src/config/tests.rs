//! Settings that work, and the line that each wrong one gets.

use clap::Parser;

use super::*;

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
        (&["--labels", "zone"], "--labels \"zone\": must be key=value"),
        (&["--component", "../x"], "--component \"../x\": must be 1 to 253 letters"),
        (&["--max-num-batched-tokens", "8"], "--max-num-batched-tokens \"8\": must be at least --max-num-seqs"),
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
    let error = parse(&["worker", "--name", "p", "--discovery-backend", "file"]).expect_err("no directory");
    assert_eq!(error, "--discovery-backend file needs --discovery-dir");
}
