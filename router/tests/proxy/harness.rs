//! A router from its flags, in front of servers of these tests.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use router::config::Config;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::client::{Answer, Client, PATIENCE, Response};
use crate::server::Server;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    config: Config,
}

/// A running router.
pub struct Router {
    pub address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Router {
    /// In front of `servers`, all of which it knows to be well.
    pub async fn start(servers: &[&Server], flags: &[&str]) -> Self {
        let router = Self::before(servers, flags).await;
        router.until("all servers are well", |metrics| metrics.contains(&routable(servers.len()))).await;
        router
    }

    /// In front of `servers`, whatever their state.
    pub async fn before(servers: &[&Server], flags: &[&str]) -> Self {
        let urls: Vec<String> = servers.iter().map(|server| server.url()).collect();
        Self::before_urls(&urls, flags).await
    }

    /// The same, by URL.
    pub async fn before_urls(urls: &[String], flags: &[&str]) -> Self {
        let config = config(urls, flags);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let stop = CancellationToken::new();
        let running = router::service::run(config, listener, stop.clone());
        let task = tokio::spawn(async move { running.await.expect("it runs") });
        Self { address, stop, task }
    }

    /// Why it does not even start.
    pub async fn fails(urls: &[String], flags: &[&str]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let running = router::service::run(config(urls, flags), listener, CancellationToken::new());
        let ended = tokio::time::timeout(PATIENCE, running).await.expect("it ends in time");
        format!("{:#}", ended.expect_err("it cannot run"))
    }

    /// Ends it, and waits until it has let go of everything.
    pub async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.expect("it ends in time").expect("it does not panic");
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.address).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.client().await.send("GET", path, &[], "").await.whole().await
    }

    pub async fn chat(&self, fields: Value) -> Answer {
        self.client().await.post("/v1/chat/completions", &chat(fields)).await.whole().await
    }

    /// A response that is still coming.
    pub async fn open(&self, fields: Value) -> Response {
        self.client().await.post("/v1/chat/completions", &chat(fields)).await
    }

    /// The same, sent to this worker and no other.
    pub async fn chat_at(&self, worker: &str, fields: &Value) -> Answer {
        let headers = [("x-armature-worker", worker), ("content-type", "application/json")];
        let body = chat(fields.clone()).to_string();
        self.client().await.send("POST", "/v1/chat/completions", &headers, body).await.whole().await
    }

    pub async fn metrics(&self) -> String {
        self.get("/metrics").await.body
    }

    /// Value of a series, labels included in its name.
    pub async fn metric(&self, name: &str) -> f64 {
        value(&self.metrics().await, name)
    }

    /// Waits for something that the metrics show.
    pub async fn until(&self, what: &str, condition: impl Fn(&str) -> bool) {
        let poll = async {
            let mut ticks = tokio::time::interval(Duration::from_millis(10));
            while !condition(&self.metrics().await) {
                ticks.tick().await;
            }
        };
        if tokio::time::timeout(PATIENCE, poll).await.is_err() {
            panic!("waited {PATIENCE:?} in vain until {what}\n{}", self.metrics().await);
        }
    }

    /// Waits until so many servers can be routed to.
    pub async fn until_routable(&self, servers: usize) {
        self.until(&format!("{servers} servers are well"), |metrics| metrics.contains(&routable(servers))).await;
    }
}

fn config(urls: &[String], flags: &[&str]) -> Config {
    let workers = format!("--workers={}", urls.join(","));
    let mut arguments = [&["router", workers.as_str()], flags].concat();
    if !flags.iter().any(|flag| flag.starts_with("--worker-check-interval-secs")) {
        // Changes are to be seen soon.
        arguments.push("--worker-check-interval-secs=0.05");
    }
    Flags::try_parse_from(arguments).unwrap_or_else(|error| panic!("{error}")).config
}

/// Waits for something that servers see.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let poll = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(10));
        while !condition() {
            ticks.tick().await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, poll).await.is_ok(), "waited {PATIENCE:?} in vain until {what}");
}

fn routable(servers: usize) -> String {
    format!("armature_router_workers_routable {servers}\n")
}

pub fn value(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap_or("0");
    line.parse().expect("a number")
}

/// A chat for `tiny`, where `fields` say nothing else.
pub fn chat(mut fields: Value) -> Value {
    let object = fields.as_object_mut().expect("an object");
    object.entry("model").or_insert("tiny".into());
    object.entry("messages").or_insert(json!([{"role": "user", "content": "Hi"}]));
    fields
}

/// One message of this text.
pub fn says(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}
