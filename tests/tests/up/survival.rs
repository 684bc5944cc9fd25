//! A worker that is killed in the middle of an answer: the client reads what it would have read anyway.

use http_body_util::BodyExt;
use integration_tests::chat::read_stream;
use serde_json::json;

use super::*;

/// Tokens of the answer: a second or more of work, so that its worker can be killed long before the last one.
const TOKENS: u32 = 192;
/// Tokens that the client of a stream has when the worker is killed.
const BEFORE: usize = 8;

fn body(stream: bool) -> Value {
    let mut body = request(MODEL, &story(1), TOKENS);
    body["ignore_eos"] = true.into();
    if !stream {
        let body = body.as_object_mut().expect("an object");
        body.remove("stream_options");
        body.insert("stream".into(), false.into());
    }
    body
}

async fn undisturbed(system: &System) -> Answer {
    let sent = system.router.send(Method::POST, "/v1/chat/completions", Some(&body(true))).await;
    let (status, worker, bytes) = sent.expect("answers");
    assert_eq!(status, StatusCode::OK);
    read_stream(std::str::from_utf8(&bytes).expect("UTF-8"), worker).expect("a whole stream")
}

/// Kills the worker process of this name.
pub(super) fn kill(system: &System, name: &str) {
    let named = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).split('\0').any(|argument| argument == name)
    };
    let pid = system.armature.children().expect("has workers").into_iter().find(named).expect("one of its workers");
    signal_process(pid, Signal::KILL).expect("killed");
}

pub(super) async fn page(system: &System, method: Method, path: &str, body: Option<&Value>) -> String {
    let (status, _, bytes) = system.router.send(method, path, body).await.expect("answers");
    assert_eq!(status, StatusCode::OK, "{path}");
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Asserts that the answer was begun on one worker and ended on the other.
async fn assert_moved(system: &System, id: &str, from: &str) {
    let decisions = page(system, Method::GET, &format!("/debug/decisions/{id}"), None).await;
    let decisions: Value = serde_json::from_str(&decisions).expect("JSON");
    let attempts = decisions["attempts"].as_array().expect("attempts");
    let [first, second] = &attempts[..] else { panic!("{decisions:#}") };
    assert_ne!(first["outcome"]["worker_id"], second["outcome"]["worker_id"], "{decisions:#}");
    assert_ne!(second["outcome"]["worker"], from, "{decisions:#}");
    let metrics = page(system, Method::GET, "/metrics", None).await;
    assert!(metrics.contains("armature_router_migrations_total{reason=\"lost\"} 1\n"), "{metrics}");
}

#[tokio::test]
async fn a_stream_whose_worker_is_killed_goes_on_with_the_same_text() {
    let system = System::start(2).await;
    let whole = undisturbed(&system).await;
    let begun = system.router.begin(Method::POST, "/v1/chat/completions", Some(&body(true))).await;
    let (status, worker, mut rest) = begun.expect("begins");
    assert_eq!(status, StatusCode::OK);
    let (mut events, mut killed) = (Vec::new(), false);
    while let Some(frame) = rest.frame().await {
        events.extend_from_slice(&frame.expect("no break").into_data().unwrap_or_default());
        let tokens = String::from_utf8_lossy(&events).matches("\"content\"").count();
        if !killed && tokens >= BEFORE {
            assert!(tokens < TOKENS as usize / 2, "{tokens} tokens came at once: it is too late to kill the worker");
            kill(&system, &worker);
            killed = true;
        }
    }
    let events = String::from_utf8(events).expect("UTF-8");
    let answer = read_stream(&events, worker.clone()).expect("a whole stream");
    assert_eq!((&answer.text, &answer.finish_reason), (&whole.text, &whole.finish_reason));
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(answer.usage[count], whole.usage[count], "{count}");
    }
    assert_eq!(events.matches("\"role\"").count(), 1, "one beginning: {events}");
    let id = events.split("\"id\":\"").nth(1).and_then(|rest| rest.split('"').next()).expect("an id");
    assert_moved(&system, id, &worker).await;
}

#[tokio::test]
async fn a_whole_answer_whose_worker_is_killed_is_the_same() {
    let system = System::start(2).await;
    let whole = undisturbed(&system).await;
    let prompt_blocks = whole.usage["prompt_tokens"].as_u64().expect("a number").div_ceil(16);
    let router = system.router.clone();
    let asked = body(false);
    let running = tokio::spawn(async move { router.send(Method::POST, "/v1/chat/completions", Some(&asked)).await });
    let worker = until("an answer under way", Duration::from_secs(20), || async {
        let explained = page(&system, Method::POST, "/v1/route/explain", Some(&body(false))).await;
        let explained: Value = serde_json::from_str(&explained).expect("JSON");
        // The router books blocks as the answer fills them.
        let answers = |row: &&Value| row["load"]["active_blocks"].as_u64() > Some(prompt_blocks);
        let busy = explained["workers"].as_array().into_iter().flatten().find(answers);
        busy.and_then(|row| row["worker"].as_str()).map(str::to_owned).ok_or_else(|| format!("{explained:#}"))
    })
    .await;
    kill(&system, &worker);
    let (status, _, answer) = running.await.expect("no panic").expect("answers");
    let answer: Value = serde_json::from_slice(&answer).expect("JSON");
    assert_eq!(status, StatusCode::OK, "{answer:#}");
    assert_eq!(answer["choices"][0]["message"]["content"], json!(whole.text));
    assert_eq!(answer["choices"][0]["finish_reason"], json!(whole.finish_reason));
    assert_eq!(answer["usage"]["completion_tokens"], json!(TOKENS));
    assert_eq!(answer["usage"]["prompt_tokens"], whole.usage["prompt_tokens"]);
    assert_moved(&system, answer["id"].as_str().expect("an id"), &worker).await;
}
