//! Real routers and workers beside pairs of servers that are played: what one half of a request says reaches the other half,
//! and the client's answer is whole.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures::future::join_all;
use hyper::Method;
use integration_tests::byte_model;
use integration_tests::chat::{message, request};
use integration_tests::engine::{Asked, Make, Server};
use integration_tests::system::{Beside, System};
use integration_tests::wait::until;
use serde_json::{Value, json};

#[path = "engines/sglang.rs"]
mod sglang;
#[path = "engines/trtllm.rs"]
mod trtllm;

/// The name under which the servers serve their model.
const MODEL: &str = "m";
/// Tokens that clients ask for.
const TOKENS: u32 = 4;
/// Requests at a time.
const AT_ONCE: usize = 4;
/// Until something that happens at once is seen, on a machine that is busy with other things.
const SOON: Duration = Duration::from_secs(20);

/// Two servers, each with a worker, and a router.
struct Pair {
    prefill: Server,
    decode: Server,
    system: System,
    _model: tempfile::TempDir,
}

impl Pair {
    async fn start(prefill: Make, decode: Make) -> Self {
        let model = byte_model::directory();
        let (prefill, decode) = (Server::start(prefill).await, Server::start(decode).await);
        let beside = |server: &Server, role| {
            let url = format!("http://{}", server.address);
            let flags = server.make().flags().iter().copied().chain(["--engine-url", &url]);
            Beside { role, model: model.path(), flags: flags.map(str::to_owned).collect() }
        };
        let system = System::start(&[beside(&prefill, "prefill"), beside(&decode, "decode")]).await;
        Self { prefill, decode, system, _model: model }
    }

    /// Prompts that were handed over, and prompts that were computed although another server had their KV.
    async fn counts(&self) -> (f64, f64) {
        let remote = self.system.metric("armature_router_prefills_total{reason=\"remote\"}").await;
        (remote, self.system.agent_metric(1, "armature_worker_engine_kv_fallbacks_total").await)
    }
}

/// A prompt of several blocks that no other one begins as.
fn body(number: usize) -> Value {
    request(MODEL, &[message("user", &format!("{number} is the number of this story. ").repeat(5))], TOKENS)
}

/// Text as the tokens that it is.
fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The prompt of a request, as servers are asked with it.
fn prompt_of(body: &Value) -> String {
    Value::from(tokens(body["messages"][0]["content"].as_str().expect("text"))).to_string()
}

/// The next requests to a server, by their prompts.
async fn asked(server: &mut Server, prompt: &str, count: usize) -> HashMap<String, Asked> {
    let mut found = HashMap::new();
    for _ in 0..count {
        let asked = server.asked().await;
        let twin = found.insert(asked.body[prompt].to_string(), asked);
        assert!(twin.is_none(), "a prompt is computed once");
    }
    found
}
