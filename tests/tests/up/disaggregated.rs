//! Prefill and decode in different processes: the same answers, by KV that travelled.

use futures::StreamExt;

use super::*;

/// Prompts whose answers are compared.
pub(super) const PROMPTS: usize = 50;
/// Tokens of each answer.
const TOKENS: u32 = 16;
/// Prompts that are answered at a time.
const AT_ONCE: usize = 4;

/// Whether the binary has NIXL, and its library is there.
const WITH_NIXL: bool = cfg!(feature = "nixl");

/// A prompt of several blocks of its own.
pub(super) fn prompt(number: usize) -> Vec<Value> {
    let things = ["a river", "two old friends", "the price of bread", "a letter", "winter", "a small town", "music"];
    let (thing, other) = (things[number % things.len()], things[(number / things.len() + number + 1) % things.len()]);
    let ask =
        format!("Story number {number} is about {thing} and {other}. Say in one sentence how it begins, and why.");
    vec![
        message("system", &format!("You tell story {number}, and nothing else. Keep it short.")),
        message("user", &ask),
    ]
}

async fn answers(system: &System) -> Vec<(String, String)> {
    let ask = |number| async move {
        let answer = system.router.chat(MODEL, &prompt(number), TOKENS).await.expect("an answer");
        (answer.text, answer.finish_reason)
    };
    futures::stream::iter(0..PROMPTS).map(ask).buffered(AT_ONCE).collect().await
}

/// Sum of a metric over all workers of the system.
async fn metric(system: &System, name: &str) -> f64 {
    let mut sum = 0.0;
    for url in &system.metrics {
        let base = url.trim_end_matches("/metrics");
        let (_, _, page) = Router::new(base).send(Method::GET, "/metrics", None).await.expect("metrics");
        let page = String::from_utf8(page.to_vec()).expect("UTF-8");
        let values = page.lines().filter_map(|line| line.strip_prefix(name)?.rsplit(' ').next()?.parse::<f64>().ok());
        sum += values.sum::<f64>();
    }
    sum
}

/// Bytes of KV that workers have handed out and that others have taken, over this transport.
async fn travelled(system: &System, transport: &str) -> (f64, f64) {
    let name = |what| format!("armature_worker_kv_transfer_{what}_bytes_total{{transport=\"{transport}\"}}");
    (metric(system, &name("sent")).await, metric(system, &name("received")).await)
}

#[tokio::test]
async fn fifty_answers_are_the_same_whether_the_kv_travelled_or_not() {
    let whole = answers(&System::start(1).await).await;
    let nixl = WITH_NIXL.then_some(("nixl", "nixl", "tcp"));
    for (flag, taken, other) in
        [("tcp", "tcp", "shm"), ("shm", "shm", "tcp"), ("auto", "shm", "tcp")].into_iter().chain(nixl)
    {
        let halves = System::start_with(3, &["--prefill-workers", "1", "--kv-transfer", flag], &[]).await;
        let split = answers(&halves).await;
        for (number, (split, whole)) in split.iter().zip(&whole).enumerate() {
            assert_eq!(split, whole, "{flag}: prompt {number}");
        }
        let (_, _, page) = halves.router.send(Method::GET, "/metrics", None).await.expect("metrics");
        let page = String::from_utf8(page.to_vec()).expect("UTF-8");
        let remote = format!("armature_router_prefills_total{{reason=\"remote\"}} {PROMPTS}\n");
        assert!(page.contains(&remote), "{page}");
        let (sent, received) = travelled(&halves, taken).await;
        assert!(sent > 1e6 && received > 1e6 && received <= sent, "{flag}: {sent} {received}");
        assert_eq!(travelled(&halves, other).await, (0.0, 0.0), "{flag}");
        assert_eq!(metric(&halves, "armature_worker_kv_transfer_failures_total").await, 0.0);
    }
}

#[tokio::test]
async fn no_request_fails_while_the_prefill_worker_is_killed() {
    for transport in ["tcp", "shm"].into_iter().chain(WITH_NIXL.then_some("nixl")) {
        no_request_fails_while_it_is_killed(transport).await;
    }
}

async fn no_request_fails_while_it_is_killed(transport: &str) {
    let system = System::start_with(3, &["--prefill-workers", "1", "--kv-transfer", transport], &[]).await;
    let ask = |number| {
        let system = &system;
        async move {
            if number == 8 {
                survival::kill(system, "worker-1");
            }
            system.router.chat(MODEL, &prompt(number), TOKENS).await.map(|answer| answer.finish_reason)
        }
    };
    let ends: Vec<_> = futures::stream::iter(0..24).map(ask).buffered(AT_ONCE).collect().await;
    for (number, end) in ends.into_iter().enumerate() {
        assert!(end.is_ok(), "{transport}: prompt {number}: {end:?}");
    }
}
