//! A router, and an agent beside each of some servers, that find each other in a directory.

use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use hyper::{Method, StatusCode};
use serde_json::Value;

use crate::chat::{Router, read_stream};
use crate::process::Armature;
use crate::wait::until;

/// Starting, and loading the model's files.
const START: Duration = Duration::from_secs(60);
/// An answer, on a machine that is busy with other things.
const ANSWER: Duration = Duration::from_secs(120);

/// Ports below those that the system gives to connections: one of these stays free until the process that is told of it listens,
/// which may take a server half a minute.
const PORTS: Range<u32> = 20_000..32_000;

/// A port that is free now; nobody else takes it in this test.
pub fn free_port() -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    // Tests of other processes begin elsewhere.
    let first = std::process::id().wrapping_mul(97);
    let free = std::iter::repeat_with(|| first.wrapping_add(TAKEN.fetch_add(1, Relaxed)) % PORTS.len() as u32)
        .take(PORTS.len())
        .filter_map(|offset| u16::try_from(PORTS.start + offset).ok())
        .find(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok());
    free.expect("a free port")
}

/// A worker beside a server.
pub struct Beside<'a> {
    /// Its role.
    pub role: &'a str,
    /// The directory of its model's files.
    pub model: &'a Path,
    /// What it is told of its server.
    pub flags: Vec<String>,
}

/// The processes; they end when it is dropped.
pub struct System {
    /// The router.
    pub router: Router,
    agents: Vec<Agent>,
    _router: Armature,
    _directory: tempfile::TempDir,
}

struct Agent {
    name: String,
    admin: Router,
    _process: Armature,
}

/// Sum of the samples of a page of metrics whose series begin with this text, up to a brace or a space.
pub fn sum(page: &[u8], series: &str) -> f64 {
    let values = std::str::from_utf8(page).expect("UTF-8").lines().filter_map(|line| {
        let rest = line.strip_prefix(series)?;
        // Not another metric whose name goes on.
        if !series.contains('{') && !rest.starts_with(['{', ' ']) {
            return None;
        }
        rest.rsplit(' ').next()?.parse::<f64>().ok()
    });
    values.sum()
}

async fn metric(of: &Router, series: &str) -> f64 {
    let (_, _, page) = of.send(Method::GET, "/metrics", None).await.expect("metrics");
    sum(&page, series)
}

impl System {
    /// Starts it, and waits until all of the workers can be routed to.
    pub async fn start(workers: &[Beside<'_>]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().to_str().expect("a plain path");
        let quiet = [("RUST_LOG", Path::new("warn"))];
        let port = free_port().to_string();
        let found = ["--discovery-backend", "file", "--discovery-dir", path];
        let listen = ["router", "--http-host", "127.0.0.1", "--http-port", &port];
        let router = Armature::start_with(&[&listen[..], &found].concat(), &quiet).expect("starts");
        let mut agents = Vec::new();
        for Beside { role, model, flags } in workers {
            let (name, admin) = (format!("{role}-{}", agents.len()), free_port().to_string());
            let model = model.to_str().expect("a plain path");
            let own =
                ["worker", "--name", &name, "--role", role, "--port", "0", "--event-port", "0", "--admin-port", &admin];
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            let arguments = [&own[..], &flags, &["--model-path", model], &found].concat();
            let process = Armature::start_with(&arguments, &quiet).expect("starts");
            agents.push(Agent { name, admin: Router::new(&format!("http://127.0.0.1:{admin}")), _process: process });
        }
        let router_url = Router::new(&format!("http://127.0.0.1:{port}"));
        let system = Self { router: router_url, agents, _router: router, _directory: directory };
        until("workers", START, || async {
            let (_, _, page) = system.router.send(Method::GET, "/metrics", None).await?;
            let routable = sum(&page, "armature_router_workers_routable");
            if routable == workers.len() as f64 { Ok(()) } else { anyhow::bail!("{routable}") }
        })
        .await;
        system
    }

    /// Name of an agent.
    pub fn name(&self, agent: usize) -> &str {
        &self.agents[agent].name
    }

    /// Sum of a metric of the router.
    pub async fn metric(&self, series: &str) -> f64 {
        metric(&self.router, series).await
    }

    /// Sum of a metric of an agent.
    pub async fn agent_metric(&self, agent: usize, series: &str) -> f64 {
        metric(&self.agents[agent].admin, series).await
    }

    /// Where a request would go, and why.
    pub async fn explain(&self, body: &Value) -> Value {
        let sent = self.router.send(Method::POST, "/v1/route/explain", Some(body)).await;
        let (status, _, page) = sent.expect("explains");
        assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&page));
        serde_json::from_slice(&page).expect("JSON")
    }

    /// Most blocks of a prompt that a worker is taken to hold.
    pub async fn best_overlap(&self, body: &Value) -> u64 {
        let explained = self.explain(body).await;
        let rows = explained["workers"].as_array().expect("rows");
        rows.iter().filter_map(|row| row["overlap"]["device"].as_u64()).max().unwrap_or(0)
    }

    /// Blocks that the router took the worker to hold when it chose it for a request.
    pub async fn overlap_when_chosen(&self, id: &str) -> u64 {
        let path = format!("/debug/decisions/{id}");
        let (status, _, page) = self.router.send(Method::GET, &path, None).await.expect("answers");
        assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&page));
        let decisions: Value = serde_json::from_slice(&page).expect("JSON");
        let rows = decisions["attempts"][0]["workers"].as_array().expect("rows");
        let chosen = rows.iter().find(|row| row["verdict"] == "chosen").expect("somebody was chosen");
        chosen["overlap"]["device"].as_u64().expect("a number")
    }

    /// Text, usage and id of an answer.
    pub async fn ask(&self, body: &Value) -> (String, Value, String) {
        let sent = self.router.send(Method::POST, "/v1/chat/completions", Some(body));
        let sent = tokio::time::timeout(ANSWER, sent).await.expect("an answer in time");
        let (status, worker, bytes) = sent.expect("answers");
        let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
        assert_eq!(status, StatusCode::OK, "{text}");
        let id = text.split("\"id\":\"").nth(1).and_then(|rest| rest.split('"').next()).expect("an id").to_owned();
        let answer = read_stream(&text, worker).expect("a whole stream");
        (answer.text, answer.usage, id)
    }
}
