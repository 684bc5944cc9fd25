//! A thousand workers behind one router, on one machine: mockers of one process, each with its own ports, registration and KV
//! events. What the router must not lose in the crowd: every worker, every answer, and who holds a conversation.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use hyper::Method;
use integration_tests::chat::{Router, story};
use integration_tests::process::{Armature, model};
use integration_tests::system::{free_port, sum};
use integration_tests::wait::until;
use rustix::process::Signal;

const MODEL: &str = "crowd";
const WORKERS: usize = 1000;
const CONVERSATIONS: usize = 400;
/// Conversations at a time.
const AT_ONCE: usize = 32;
/// A thousand registrations and connections, on a busy machine.
const START: Duration = Duration::from_secs(120);
/// Until workers that say goodbye are gone.
const END: Duration = Duration::from_secs(60);

async fn routable(router: &Router, wanted: usize, limit: Duration) {
    until("workers", limit, || async {
        let (_, _, page) = router.send(Method::GET, "/metrics", None).await?;
        let routable = sum(&page, "armature_router_workers_routable");
        if routable == wanted as f64 { Ok(()) } else { anyhow::bail!("{routable} of {wanted} routable") }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_workers_share_the_work_and_keep_their_conversations() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("a plain path");
    let found = ["--discovery-backend", "file", "--discovery-dir", path];
    let quiet = [("RUST_LOG", Path::new("error"))];
    let (port, weights) = (free_port().to_string(), model());
    let listen = ["router", "--http-host", "127.0.0.1", "--http-port", &port];
    let router_process = Armature::start_with(&[&listen[..], &found].concat(), &quiet).expect("starts");
    let (count, weights) = (WORKERS.to_string(), weights.to_str().expect("a plain path"));
    let mockers = [
        "worker",
        "--name",
        "mocker",
        "--engine",
        "mocker",
        "--mocker-workers",
        &count,
        "--mocker-speedup-ratio",
        "0",
        "--model",
        weights,
        "--model-name",
        MODEL,
        "--kv-blocks",
        "256",
    ];
    let workers = Armature::start_with(&[&mockers[..], &found].concat(), &quiet).expect("starts");
    let router = Router::new(&format!("http://127.0.0.1:{port}"));
    routable(&router, WORKERS, START).await;

    let turn = |number: usize| {
        let router = router.clone();
        async move { router.chat(MODEL, &story(number), 4).await }
    };
    let all = || stream::iter(0..CONVERSATIONS).map(turn).buffered(AT_ONCE).try_collect::<Vec<_>>();
    let first = all().await.expect("every conversation gets its answer");
    let used: BTreeSet<_> = first.iter().map(|answer| &answer.worker).collect();
    // Nothing is cached, so each goes to one of those with the least load: all but what runs at the moment are alike.
    assert!(used.len() > CONVERSATIONS / 2, "{} conversations on {} workers", CONVERSATIONS, used.len());

    // Events take a moment: until the index knows of all that was computed.
    let blocks: f64 =
        first.iter().filter_map(|answer| answer.usage["prompt_tokens"].as_u64()).map(|t| (t / 16) as f64).sum();
    until("events of all prompts", END, || async {
        let (_, _, page) = router.send(Method::GET, "/metrics", None).await?;
        let known = sum(&page, "armature_router_index_blocks");
        if known >= blocks { Ok(()) } else { anyhow::bail!("{known} of {blocks} blocks") }
    })
    .await;
    let second = all().await.expect("and once more");
    // Two conversations of one worker at the same moment are a reason to move one of them.
    let back =
        first.iter().zip(&second).filter(|(first, second)| first.worker == second.worker && second.cached_tokens() > 0);
    assert!(back.count() * 10 >= CONVERSATIONS * 9, "conversations come back to the worker that holds them");
    println!(
        "{WORKERS} workers: router {:.0} MB, workers {:.0} MB",
        router_process.resident_mb().expect("it runs"),
        workers.resident_mb().expect("they run")
    );

    workers.signal(Signal::TERM).expect("a signal");
    routable(&router, 0, END).await;
    assert!(workers.ended(END).await.expect("they end").status.success());
}
