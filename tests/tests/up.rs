//! `armature up` as a person runs it: real processes, real HTTP, real signals.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use hyper::{Method, StatusCode};
use integration_tests::chat::{Answer, Router, message, request, story};
use integration_tests::process::{Armature, Ended, model, runs, signal_process};
use integration_tests::wait::until;
use rustix::process::Signal;
use serde_json::Value;

#[path = "up/disaggregated.rs"]
mod disaggregated;
#[path = "up/killed.rs"]
mod killed;
#[path = "up/late_prefill.rs"]
mod late_prefill;
#[path = "up/survival.rs"]
mod survival;

const MODEL: &str = "smollm2";
/// Loading the model and starting, on a busy machine.
const START: Duration = Duration::from_secs(60);
/// A drain and everything after it.
const END: Duration = Duration::from_secs(20);

/// `armature up` on a free port, ready.
struct System {
    armature: Armature,
    router: Router,
    /// Where each worker's metrics are.
    metrics: Vec<String>,
}

impl System {
    async fn start(workers: u32) -> Self {
        Self::start_with(workers, &[], &[]).await
    }

    async fn start_with(workers: u32, more: &[&str], variables: &[(&str, &Path)]) -> Self {
        let (path, count, workers) = (model(), workers, workers.to_string());
        let model = path.to_str().expect("a plain path");
        let mut arguments = vec![
            "up",
            "--port",
            "0",
            "--model",
            model,
            "--model-name",
            MODEL,
            "--workers",
            &workers,
            "--kv-blocks",
            "512",
        ];
        arguments.extend(more);
        let mut armature = Armature::start_with(&arguments, variables).expect("starts");
        let mut metrics = Vec::new();
        for _ in 0..count {
            let line = armature.line("worker   worker-", START).await.expect("where its metrics are");
            metrics.extend(line.rsplit(' ').next().map(str::to_owned));
        }
        let line = armature.line("try", START).await.expect("ready");
        let base = line.split_whitespace().find(|word| word.starts_with("http://")).expect("a URL in the line");
        let router = Router::new(base.split("/v1").next().expect("not empty"));
        Self { armature, router, metrics }
    }

    async fn ask(&self, question: &str, max_tokens: u32) -> anyhow::Result<Answer> {
        self.router.chat(MODEL, &[message("user", question)], max_tokens).await
    }
}

#[tokio::test]
async fn the_second_turn_goes_where_the_first_one_was_and_reuses_its_blocks() {
    let system = System::start(2).await;
    let router = &system.router;
    // At the same time, so that load spreads them.
    let turn = |number| async move {
        let mut messages = story(number);
        let first = router.chat(MODEL, &messages, 16).await.expect("first turn");
        assert!(!first.text.is_empty() && !first.finish_reason.is_empty(), "{first:?}");
        messages.extend([message("assistant", &first.text), message("user", "And what was the price?")]);
        (first.worker, messages)
    };
    let conversations = [turn(1), turn(2), turn(3), turn(4), turn(5), turn(6)];
    let conversations = futures::future::join_all(conversations).await;
    let workers: BTreeSet<_> = conversations.iter().map(|(worker, _)| worker).collect();
    assert_eq!(workers.len(), 2, "different conversations are spread over both workers: {workers:?}");
    for (worker, messages) in &conversations {
        // The worker's events are on their way while the second turn is sent; a client is rarely that fast.
        let second = until("the second turn on the first one's worker", Duration::from_secs(10), || async {
            let second = router.chat(MODEL, messages, 4).await.map_err(|error| error.to_string())?;
            if second.worker == *worker { Ok(second) } else { Err(format!("{worker} then {}", second.worker)) }
        });
        assert!(second.await.cached_tokens() >= 96, "the story has more than six blocks");
    }
}

#[tokio::test]
async fn a_decision_is_explained_before_and_after_it_was_made() {
    let system = System::start(2).await;
    let mut body = request(MODEL, &story(1), 4);
    body["stream"] = false.into();
    body.as_object_mut().expect("an object").remove("stream_options");
    let asked = async |method, path: &str, body: Option<&Value>| {
        let (status, _, text) = system.router.send(method, path, body).await.expect("answers");
        (status, serde_json::from_slice::<Value>(&text).expect("JSON"))
    };
    let explained = async || {
        let (status, explanation) = asked(Method::POST, "/v1/route/explain", Some(&body)).await;
        assert_eq!(status, StatusCode::OK, "{explanation:#}");
        explanation
    };
    let before = explained().await;
    assert_eq!(before["workers"].as_array().map(Vec::len), Some(2), "{before:#}");
    assert_eq!(before["outcome"]["pick"]["ties"], 2, "{before:#}");
    // Asking has no effect: nothing is booked.
    assert_eq!(explained().await["workers"][0]["load"], before["workers"][0]["load"]);

    let (status, answer) = asked(Method::POST, "/v1/chat/completions", Some(&body)).await;
    assert_eq!(status, StatusCode::OK, "{answer:#}");
    let id = answer["id"].as_str().expect("has an id");
    let (status, decision) = asked(Method::GET, &format!("/debug/decisions/{id}"), None).await;
    assert_eq!(status, StatusCode::OK, "{decision:#}");
    let chosen = decision["attempts"][0]["outcome"]["worker"].as_str().expect("chosen").to_owned();
    until("the chosen worker's blocks in an explanation", Duration::from_secs(10), || async {
        let after = explained().await;
        let row = after["workers"].as_array().into_iter().flatten().find(|row| row["worker"] == *chosen).cloned();
        let held = row.and_then(|row| row["overlap"]["device"].as_u64()).unwrap_or(0);
        if held >= 6 && after["outcome"]["worker"] == *chosen { Ok(()) } else { Err(format!("{after:#}")) }
    })
    .await;

    for arguments in [&["--decision", id][..], &["--prompt", "Hello there"]] {
        let mut explain = tokio::process::Command::new(integration_tests::process::binary());
        let explain = explain.args(["explain", "--url", system.router.base()]).args(arguments);
        let output = explain.output().await.expect("runs");
        let table = String::from_utf8(output.stdout).expect("text");
        assert!(output.status.success() && table.contains("verdict") && table.contains("chosen"), "{table}");
    }
    let (status, unknown) = asked(Method::GET, "/debug/decisions/nobody", None).await;
    assert_eq!(status, StatusCode::NOT_FOUND, "{unknown:#}");
}

#[tokio::test]
async fn a_killed_worker_is_replaced_while_traffic_goes_on() {
    let system = System::start(2).await;
    let before = system.armature.children().expect("has workers");
    assert_eq!(before.len(), 2);
    signal_process(before[0], Signal::KILL).expect("killed");
    for number in 0..8 {
        let answer =
            system.ask(&format!("Question {number}: what is a lake?"), 4).await.expect("the other worker answers");
        assert_eq!(answer.finish_reason, "length");
    }
    let look = || async {
        let now = system.armature.children().map_err(|error| error.to_string())?;
        if now.len() == 2 && !now.contains(&before[0]) { Ok(()) } else { Err(format!("{now:?}")) }
    };
    until("a new worker process", START, look).await;
    let served_by = Mutex::new(BTreeSet::new());
    let number = AtomicUsize::new(0);
    until("answers from two workers", START, || async {
        let first = number.fetch_add(4, Relaxed);
        let stories: Vec<_> = (first..first + 4).map(story).collect();
        // At the same time, so that load spreads them.
        let answers = futures::future::join_all(stories.iter().map(|story| system.router.chat(MODEL, story, 8))).await;
        let mut served_by = served_by.lock().expect("not poisoned");
        served_by.extend(answers.into_iter().flatten().map(|answer| answer.worker));
        if served_by.len() == 2 { Ok(()) } else { Err(format!("{served_by:?}")) }
    })
    .await;
}

#[tokio::test]
async fn ctrl_c_finishes_running_requests_and_leaves_no_process() {
    let system = System::start(2).await;
    let workers = system.armature.children().expect("has workers");
    let router = system.router.clone();
    let running =
        tokio::spawn(async move { router.chat(MODEL, &[message("user", "Tell me about rivers.")], 48).await });
    until("a running request", Duration::from_secs(20), || async {
        let (_, _, page) =
            system.router.send(Method::GET, "/metrics", None).await.map_err(|error| error.to_string())?;
        let page = String::from_utf8_lossy(&page).into_owned();
        if in_flight(&page) > 0.0 { Ok(()) } else { Err("none in /metrics".to_owned()) }
    })
    .await;
    system.armature.signal(Signal::INT).expect("signalled");
    let answer = running.await.expect("no panic").expect("the request is finished, not cut");
    assert!(!answer.finish_reason.is_empty());
    let Ended { status, stderr } = system.armature.ended(END).await.expect("ends");
    assert!(status.success(), "{status}: {stderr}");
    assert_eq!(workers.iter().filter(|pid| runs(**pid)).count(), 0, "workers are gone");
}

#[tokio::test]
async fn ctrl_c_while_idle_is_no_error() {
    for round in 0..4 {
        let system = System::start(1).await;
        system.armature.signal(Signal::INT).expect("signalled");
        let Ended { status, stderr } = system.armature.ended(END).await.expect("ends");
        assert!(status.success(), "round {round}: {status}: {stderr}");
        assert!(stderr.contains("stopping; Ctrl-C again ends at once"), "round {round}: {stderr}");
    }
    // While it starts, too.
    let path = model();
    let arguments = ["up", "--port", "0", "--model", path.to_str().expect("a plain path"), "--kv-blocks", "512"];
    let mut armature = Armature::start(&arguments).expect("starts");
    armature.line("model", START).await.expect("found the model");
    armature.signal(Signal::INT).expect("signalled");
    let Ended { status, stderr } = armature.ended(END).await.expect("ends");
    assert!(status.success(), "{status}: {stderr}");
}

#[tokio::test]
async fn a_second_ctrl_c_ends_at_once_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let system = System::start_with(1, &[], &[("TMPDIR", folder.path())]).await;
    let workers = system.armature.children().expect("has a worker");
    assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 1, "the discovery directory");
    let router = system.router.clone();
    // Longer than this test, unless somebody ends it.
    let mut body = request(MODEL, &[message("user", "Count to 1000.")], 4000);
    body["ignore_eos"] = true.into();
    let running = tokio::spawn(async move { router.send(Method::POST, "/v1/chat/completions", Some(&body)).await });
    let metrics = || async {
        let (_, _, page) =
            system.router.send(Method::GET, "/metrics", None).await.map_err(|error| error.to_string())?;
        Ok::<_, String>(String::from_utf8_lossy(&page).into_owned())
    };
    until("a running request", Duration::from_secs(20), || async {
        if in_flight(&metrics().await?) > 0.0 { Ok(()) } else { Err("none in /metrics".to_owned()) }
    })
    .await;
    system.armature.signal(Signal::INT).expect("signalled");
    until("the drain", Duration::from_secs(10), || async {
        match system.router.send(Method::GET, "/ready", None).await {
            Ok((StatusCode::OK, ..)) => Err("still ready"),
            _ => Ok(()),
        }
    })
    .await;
    system.armature.signal(Signal::INT).expect("signalled");
    let Ended { status, stderr } = system.armature.ended(Duration::from_secs(5)).await.expect("ends at once");
    assert_eq!(status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("draining 1 request; Ctrl-C again ends at once"), "{stderr}");
    // Router and worker end at the same time: the client sees either the one or the other go.
    if let Ok((status, _, body)) = running.await.expect("no panic") {
        let body = String::from_utf8_lossy(&body);
        assert!(status != StatusCode::OK || body.contains("\"error\""), "the request is cut: {body}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 0, "temporary files are gone");
    until("the end of the worker", END, || async {
        if workers.iter().any(|pid| runs(*pid)) { Err(format!("{workers:?} still run")) } else { Ok(()) }
    })
    .await;
}

#[tokio::test]
async fn without_a_cluster_one_line_says_what_to_do() {
    let router: &[&str] = &["router", "--http-port", "0"];
    let operator: &[&str] = &["operator", "--listen", "127.0.0.1:0", "--image", "x"];
    for (arguments, advice) in [(router, "--discovery-backend file"), (operator, "armature up")] {
        let armature = Armature::start_with(arguments, &[("KUBECONFIG", Path::new("/nowhere/config"))]);
        let Ended { status, stderr } = armature.expect("starts").ended(END).await.expect("ends");
        assert_eq!(status.code(), Some(1), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert_eq!(stderr.matches("/nowhere/config").count(), 1, "{stderr}");
        assert!(stderr.contains(advice), "{stderr}");
    }
}

#[tokio::test]
async fn workers_die_with_a_killed_parent() {
    let system = System::start(1).await;
    let workers = system.armature.children().expect("has a worker");
    system.armature.signal(Signal::KILL).expect("killed");
    until("the end of the workers", END, || async {
        if workers.iter().any(|pid| runs(*pid)) { Err(format!("{workers:?} still run")) } else { Ok(()) }
    })
    .await;
}

#[tokio::test]
async fn the_api_answers_beside_chat() {
    let system = System::start(1).await;
    for path in ["/health", "/live", "/ready", "/metrics"] {
        let (status, _, _) = system.router.send(Method::GET, path, None).await.expect("answers");
        assert_eq!(status, StatusCode::OK, "{path}");
    }
    let (_, _, models) = system.router.send(Method::GET, "/v1/models", None).await.expect("answers");
    let models: Value = serde_json::from_slice(&models).expect("JSON");
    assert_eq!(models["data"][0]["id"], MODEL);
    let error = system.router.chat("another", &[message("user", "Hi")], 4).await.expect_err("no such model");
    assert!(error.to_string().contains("404"), "{error}");
}

/// Exit code 2 and exactly one line that names the cause.
async fn refused(arguments: &[&str], cause: &str) {
    let ended = Armature::start(arguments).expect("starts").ended(START).await.expect("ends");
    assert_eq!(ended.status.code(), Some(2), "{arguments:?}: {ended:?}");
    let lines: Vec<_> = ended.stderr.lines().collect();
    assert!(
        lines.len() == 1 && lines[0].starts_with("error: ") && lines[0].contains(cause),
        "{arguments:?}: {:?}",
        ended.stderr
    );
}

#[tokio::test]
async fn settings_that_cannot_work_are_one_line_and_exit_code_2() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let path = model();
    let model = path.to_str().expect("a plain path");
    refused(&["up", "--port", &port, "--model", model], &format!("port {port} on 127.0.0.1 is in use")).await;
    refused(&["up", "--port", "0", "--model", "/nowhere/x.gguf"], "no model file /nowhere/x.gguf").await;
    refused(&["up", "--port", "0", "--model", "ftp://x"], "ftp://x").await;

    let dir = tempfile::tempdir().expect("a folder");
    for (name, bytes) in [
        ("empty.gguf", &b""[..]),
        ("words.gguf", b"this is not a model"),
        ("cut.gguf", &std::fs::read(model).expect("readable")[..5_000_000]),
    ] {
        let broken = dir.path().join(name);
        std::fs::write(&broken, bytes).expect("writable");
        refused(&["up", "--port", "0", "--model", broken.to_str().expect("a plain path")], name).await;
    }
    refused(&["worker", "--name", "w", "--model", model, "--discovery-backend", "file"], "--discovery-dir").await;
    refused(&["router", "--discovery-backend", "file"], "--discovery-dir").await;

    let many = ["--model", model, "--kv-blocks", "100000000"];
    refused(&[&["up", "--port", "0"], &many[..]].concat(), "--kv-blocks 100000000 for each of 2 workers needs").await;
    let discovery = dir.path().to_str().expect("a plain path");
    let worker = ["worker", "--name", "w", "--discovery-backend", "file", "--discovery-dir", discovery];
    refused(&[&worker[..], &many].concat(), "--kv-blocks 100000000 needs").await;
}

/// The sum of the router's gauge of running requests.
fn in_flight(metrics: &str) -> f64 {
    let lines = metrics.lines().filter(|line| !line.starts_with('#') && line.contains("inflight"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
