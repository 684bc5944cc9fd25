//! Fifty answers at a time, and a worker that is killed in the middle of some of them: their texts are what they are without that.

use futures::StreamExt;
use http_body_util::BodyExt;
use integration_tests::chat::read_stream;

use super::disaggregated::{PROMPTS, prompt};
use super::survival::{kill, page};
use super::*;

/// Tokens of each answer.
const TOKENS: u32 = 24;
/// Answers under way at a time.
const AT_ONCE: usize = 16;
/// The one whose worker is killed: others are under way there.
const VICTIM: usize = 9;
/// Tokens of it that its client has by then.
const BEFORE: usize = 4;

/// Who serves a request now.
async fn serving(system: &System, id: &str) -> String {
    let decisions = page(system, Method::GET, &format!("/debug/decisions/{id}"), None).await;
    let decisions: Value = serde_json::from_str(&decisions).expect("JSON");
    let last = decisions["attempts"].as_array().and_then(|attempts| attempts.last());
    let worker = last.and_then(|last| last["outcome"]["worker"].as_str());
    worker.unwrap_or_else(|| panic!("{decisions:#}")).to_owned()
}

/// Text and reason of the end; with `victim` the worker is killed in the middle.
async fn answer(system: &System, number: usize, victim: bool) -> (String, String) {
    let mut body = request(MODEL, &prompt(number), TOKENS);
    body["ignore_eos"] = true.into();
    let begun = system.router.begin(Method::POST, "/v1/chat/completions", Some(&body)).await;
    let (status, worker, mut rest) = begun.expect("begins");
    assert_eq!(status, StatusCode::OK, "prompt {number}");
    let (mut events, mut alive) = (Vec::new(), victim);
    while let Some(frame) = rest.frame().await {
        events.extend_from_slice(&frame.expect("no break").into_data().unwrap_or_default());
        let text = String::from_utf8_lossy(&events);
        let tokens = text.matches("\"content\"").count();
        if alive && tokens >= BEFORE {
            assert!(tokens < TOKENS as usize / 2, "{tokens} tokens came at once: it is too late to kill the worker");
            let id = text.split("\"id\":\"").nth(1).and_then(|rest| rest.split('"').next()).expect("an id");
            kill(system, &serving(system, id).await);
            alive = false;
        }
    }
    let answer = read_stream(std::str::from_utf8(&events).expect("UTF-8"), worker).expect("a whole stream");
    (answer.text, answer.finish_reason)
}

async fn answers(system: &System, victim: Option<usize>) -> Vec<(String, String)> {
    let answer = |number| answer(system, number, victim == Some(number));
    futures::stream::iter(0..PROMPTS).map(answer).buffered(AT_ONCE).collect().await
}

#[tokio::test]
async fn fifty_answers_are_the_same_although_a_worker_is_killed_in_the_middle() {
    let undisturbed = answers(&System::start(1).await, None).await;
    // Workers that do all of a request; and two that decode what a third one prefills.
    for (workers, more) in [(2, &[][..]), (3, &["--prefill-workers", "1"])] {
        let system = System::start_with(workers, more, &[]).await;
        let disturbed = answers(&system, Some(VICTIM)).await;
        for (number, (disturbed, undisturbed)) in disturbed.iter().zip(&undisturbed).enumerate() {
            assert_eq!(disturbed, undisturbed, "{more:?}: prompt {number}");
        }
        let metrics = page(&system, Method::GET, "/metrics", None).await;
        let moved =
            metrics.lines().find_map(|line| line.strip_prefix("armature_router_migrations_total{reason=\"lost\"} "));
        let moved: f64 = moved.and_then(|moved| moved.parse().ok()).unwrap_or(0.0);
        assert!(moved >= 1.0, "{more:?}: {metrics}");
        println!("{more:?}: {moved} answers went on at another worker");
    }
}
