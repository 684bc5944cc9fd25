//! What needs no network: help, version, and complaints about flags, even where every address leads nowhere.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Far below any deadline of a network.
const AT_ONCE: Duration = Duration::from_secs(10);

/// Runs the binary as in a pod whose API server, peers and workers are all out of reach.
fn run(arguments: &[&str]) -> Output {
    let begun = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_armature"))
        .args(arguments)
        // Addresses of a network that is for documentation only.
        .envs([("KUBERNETES_SERVICE_HOST", "192.0.2.1"), ("KUBERNETES_SERVICE_PORT", "443")])
        .envs([("HTTPS_PROXY", "http://192.0.2.1:3128"), ("NATS_SERVER", "nats://192.0.2.1:4222")])
        .output()
        .expect("the binary runs");
    assert!(begun.elapsed() < AT_ONCE, "{arguments:?} took {:?}", begun.elapsed());
    output
}

#[test]
fn help_and_version_are_printed_at_once() {
    for command in ["operator", "router", "worker", "up", "explain"] {
        let output = run(&[command, "--help"]);
        let text = String::from_utf8(output.stdout).expect("text");
        assert!(output.status.success() && text.contains("Usage:"), "{command}: {text}");
    }
    let output = run(&["--version"]);
    assert!(output.status.success() && !output.stdout.is_empty());
}

#[test]
fn settings_that_contradict_each_other_are_refused_at_once() {
    for (arguments, named) in [
        (&["router", "--discovery-backend=file"][..], "--discovery-dir"),
        (&["router", "--workers=http://192.0.2.1:1", "--discovery-dir=d"], "--discovery-dir"),
        (&["router", "--router-prefill-mode=direct"], "--router-prefill-mode"),
        (&["router", "--router-temperature=-1"], "--router-temperature"),
    ] {
        let output = run(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(named), "{arguments:?}: {text}");
    }
}
