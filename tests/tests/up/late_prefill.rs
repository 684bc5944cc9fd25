//! Decode workers first and prefill workers later, with traffic all the time: no request is worse off than told to try again.

use std::sync::Arc;

use tokio::task::JoinHandle;

use super::*;
use integration_tests::system::free_port;

/// What became of requests so far.
#[derive(Default)]
struct Tally {
    answered: AtomicUsize,
    to_be_tried_again: AtomicUsize,
    others: Mutex<Vec<String>>,
}

/// Asks one short question after the other, until dropped.
struct Traffic(Arc<Tally>, JoinHandle<()>);

impl Traffic {
    fn start(router: &Router) -> Self {
        let (tally, router) = (Arc::<Tally>::default(), router.clone());
        let counts = tally.clone();
        let task = tokio::spawn(async move {
            for number in 0.. {
                counts.count(router.send(Method::POST, "/v1/chat/completions", Some(&question(number))).await);
            }
        });
        Self(tally, task)
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.1.abort();
    }
}

impl Tally {
    fn count(&self, sent: anyhow::Result<(StatusCode, String, hyper::body::Bytes)>) {
        match sent {
            Ok((StatusCode::OK, ..)) => drop(self.answered.fetch_add(1, Relaxed)),
            Ok((StatusCode::SERVICE_UNAVAILABLE, ..)) => drop(self.to_be_tried_again.fetch_add(1, Relaxed)),
            other => self.others.lock().expect("not poisoned").push(format!("{other:?}")),
        }
    }

    /// Waits until so many were answered.
    async fn until_answered(&self, count: usize) {
        until("answers", START, || async {
            let answered = self.answered.load(Relaxed);
            if answered >= count { Ok(()) } else { Err(answered) }
        })
        .await;
    }
}

fn question(number: usize) -> Value {
    let mut body = request(MODEL, &[message("user", &format!("What is {number} times two?"))], 4);
    let fields = body.as_object_mut().expect("an object");
    fields.remove("stream_options");
    fields.insert("stream".into(), false.into());
    body
}

/// One worker process of this role.
fn worker(role: &str, discovery: &Path) -> Armature {
    let (model, discovery) = (model(), discovery.to_str().expect("a plain path"));
    let mut arguments = vec!["worker", "--name", role, "--role", role, "--model-name", MODEL, "--kv-blocks", "512"];
    arguments.extend(["--model", model.to_str().expect("a plain path")]);
    arguments.extend(["--discovery-backend", "file", "--discovery-dir", discovery]);
    arguments.extend(["--port", "0", "--event-port", "0", "--admin-port", "0"]);
    Armature::start(&arguments).expect("starts")
}

#[tokio::test]
async fn while_the_prefill_pool_comes_late_requests_are_answered_or_to_be_tried_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let (port, path) = (free_port().to_string(), folder.path().to_str().expect("a plain path"));
    let mut arguments = vec!["router", "--http-host", "127.0.0.1", "--http-port", &port];
    arguments.extend(["--discovery-backend", "file", "--discovery-dir", path]);
    let _router = Armature::start(&arguments).expect("starts");
    let router = Router::new(&format!("http://127.0.0.1:{port}"));
    until("the router listens", START, || router.send(Method::GET, "/live", None)).await;

    let traffic = Traffic::start(&router);
    let tally = &traffic.0;
    let _decode = worker("decode", folder.path());
    tally.until_answered(3).await;
    let _prefill = worker("prefill", folder.path());
    until("prompts are computed by the prefill worker", START, || async {
        let (_, _, page) = router.send(Method::GET, "/metrics", None).await.map_err(|error| error.to_string())?;
        let page = String::from_utf8_lossy(&page).into_owned();
        let remote = page.lines().any(|line| line.starts_with("armature_router_prefills_total{reason=\"remote\"}"));
        if remote { Ok(()) } else { Err(page) }
    })
    .await;
    tally.until_answered(tally.answered.load(Relaxed) + 3).await;
    let others = tally.others.lock().expect("not poisoned");
    assert!(others.is_empty(), "{others:#?}");
    assert!(tally.to_be_tried_again.load(Relaxed) > 0, "before the first worker came");
}
