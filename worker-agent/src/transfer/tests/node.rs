//! Workers of a tiny real model with their transfer servers, and a proxy between two of them that does harm.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use protocol::request_plane::{FinishReason, Generate, Stop};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinHandle;

use crate::drain::Drain;
use crate::engine::builtin::llama::Llama;
use crate::engine::builtin::llama::tests::tiny;
use crate::engine::builtin::scheduler::SchedulerConfig;
use crate::engine::builtin::service::BuiltIn;
use crate::engine::builtin::stop::Vocabulary;
use crate::engine::builtin::{Chunk, Forward, Kv};
use crate::engine::{Engine, EngineInfo, EngineOutput};
use crate::transfer::metrics::TransferMetrics;
use crate::transfer::{Options, Source, Transfers, Transports, open, serve};

/// Longest wait for anything that should come.
pub(super) const DEADLINE: Duration = Duration::from_secs(30);

pub(super) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("{what}: nothing within {DEADLINE:?}"))
}

/// Waits until `condition` holds.
pub(super) async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let mut look = tokio::time::interval(Duration::from_millis(2));
    within(what, async {
        while !condition() {
            look.tick().await;
        }
    })
    .await;
}

/// How a node differs from the usual.
#[derive(Clone)]
pub(super) struct Setup {
    pub(super) blocks: usize,
    pub(super) lease: Duration,
    pub(super) timeout: Duration,
    /// Another model of the same shapes.
    pub(super) other_model: bool,
    pub(super) revision: &'static str,
    pub(super) max_waiting: usize,
    pub(super) transports: Transports,
    /// Once it is true, the next step panics.
    pub(super) dies: Option<Arc<AtomicBool>>,
}

impl Default for Setup {
    fn default() -> Self {
        let (lease, timeout) = (Duration::from_secs(60), Duration::from_secs(20));
        Self {
            blocks: 64,
            lease,
            timeout,
            other_model: false,
            revision: "r1",
            max_waiting: 8,
            transports: Transports::Tcp,
            dies: None,
        }
    }
}

/// A model whose steps can be made to fail.
struct Mortal {
    model: Llama,
    dies: Arc<AtomicBool>,
}

impl Forward for Mortal {
    fn vocab(&self) -> usize {
        self.model.vocab()
    }

    fn kv(&self) -> Option<Kv> {
        self.model.kv()
    }

    fn forward(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) {
        assert!(!self.dies.load(Relaxed), "on purpose");
        self.model.forward(chunks, logits);
    }
}

/// A worker without its request plane.
pub(super) struct Node {
    pub(super) engine: Transfers,
    pub(super) metrics: TransferMetrics,
    pub(super) drain: Arc<Drain>,
    pub(super) serving: JoinHandle<()>,
}

impl Node {
    pub(super) async fn start(setup: Setup) -> Self {
        let engine = EngineInfo {
            block_size: kv_hashing::BlockSize::new(16).expect("not zero"),
            total_blocks: setup.blocks,
            max_num_seqs: 4,
            max_num_batched_tokens: 32,
            context_length: 128,
        };
        let config = SchedulerConfig { engine, max_waiting: setup.max_waiting };
        let model = Mortal { model: tiny(setup.blocks, setup.other_model), dies: setup.dies.unwrap_or_default() };
        let engine = BuiltIn::start(model, config, Vocabulary::default()).expect("starts");
        let exchange = engine.exchange().expect("a model has blocks");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let options = Options {
            address: listener.local_addr().expect("bound").to_string(),
            transports: setup.transports,
            boot_epoch: format!("epoch-{:x}", rand::random::<u64>()),
            revision: setup.revision.to_owned(),
            lease: setup.lease,
            timeout: setup.timeout,
        };
        let (metrics, drain) = (TransferMetrics::new(&mut Registry::default()), Arc::new(Drain::default()));
        let (engine, server) =
            open(Arc::new(engine), exchange, options, listener, metrics.clone()).expect("a thread and sockets");
        let serving = tokio::spawn(serve(server, drain.clone()));
        Self { engine, metrics, drain, serving }
    }

    pub(super) fn submit(&self, request: Generate) -> UnboundedReceiver<EngineOutput> {
        self.engine.submit(request).expect("room")
    }

    /// The tokens of a whole answer, and prompt tokens whose KV was reused.
    pub(super) async fn answer(&self, request: Generate) -> (Vec<u32>, usize) {
        whole(&mut self.submit(request)).await
    }

    /// Computes a prompt for another node: the first token, and how the blocks are fetched.
    pub(super) async fn prefill(&self, prompt: &[u32]) -> (u32, Option<Source>) {
        let mut outputs = self.submit(Generate { prefill_only: true, ..generate(prompt, 16) });
        let first = within("the first token", outputs.recv()).await;
        let Some(EngineOutput::First { token, .. }) = first else { panic!("{first:?}") };
        match within("the end of prefill", outputs.recv()).await {
            Some(EngineOutput::Prefilled(prefilled)) => {
                assert_eq!((prefilled.prompt_tokens, prefilled.completion_tokens), (prompt.len(), 1));
                let source = prefilled.disaggregated_params;
                (token, source.map(|json| Source::parse(&json).expect("valid parameters")))
            }
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn leased(&self) -> (usize, usize) {
        self.engine.exchange().expect("there is one").leased()
    }

    /// Waits until no block is held.
    pub(super) async fn idle(&self) {
        until("all blocks are given back", || self.engine.load().active_blocks == 0).await;
    }
}

pub(super) async fn whole(outputs: &mut UnboundedReceiver<EngineOutput>) -> (Vec<u32>, usize) {
    let mut tokens = Vec::new();
    loop {
        match within("an output", outputs.recv()).await.expect("outputs end with Finished") {
            EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } => tokens.push(token),
            EngineOutput::Finished(finish) => {
                assert_eq!(finish.reason, FinishReason::Length);
                return (tokens, finish.reused_tokens);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Greedy.
pub(super) fn generate(prompt: &[u32], max_tokens: u32) -> Generate {
    let stop = Stop { max_tokens, ..Default::default() };
    Generate { token_ids: prompt.to_vec(), stop: Some(stop), ..Default::default() }
}

/// What a router makes of a prefill's end: the rest of the answer, by another node.
pub(super) fn decode(prompt: &[u32], first: u32, max_tokens: u32, source: &Source) -> Generate {
    let disaggregated_params = source.to_json();
    Generate { generated: 1, disaggregated_params, ..generate(&[prompt, &[first]].concat(), max_tokens) }
}

/// What happens to the bytes that come from the server.
#[derive(Clone, Copy, Debug)]
pub(super) enum Harm {
    /// The connection is reset after so many bytes.
    Cut(usize),
    /// One bit of the byte at this place is flipped.
    Flip(usize),
    /// Nothing comes after so many bytes.
    Stall(usize),
}

/// A proxy before a node.
pub(super) struct Proxy {
    /// Told when a connection stalls.
    pub(super) stalled: Arc<Notify>,
    connections: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Proxy {
    pub(super) async fn before(source: &mut Source, harm: Harm) -> Self {
        let address = &mut source.offers.last_mut().expect("TCP").address;
        let target = std::mem::take(address);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        *address = listener.local_addr().expect("bound").to_string();
        let (stalled, connections) = (Arc::new(Notify::new()), Arc::new(Mutex::new(Vec::new())));
        let (notify, list) = (stalled.clone(), connections.clone());
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&target).await.expect("the node listens");
                list.lock().push(tokio::spawn(relay(client, server, harm, notify.clone())));
            }
        });
        connections.lock().push(accepting);
        Self { stalled, connections }
    }

    /// All connections end at once, as if the node had been killed.
    pub(super) fn kill(&self) {
        self.connections.lock().drain(..).for_each(|connection| connection.abort());
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.kill();
    }
}

async fn relay(client: TcpStream, server: TcpStream, harm: Harm, stalled: Arc<Notify>) {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let up = async { tokio::io::copy(&mut from_client, &mut to_server).await };
    let down = async {
        let mut bytes = [0; 1000];
        let mut passed = 0;
        loop {
            let read = from_server.read(&mut bytes).await.unwrap_or(0);
            if read == 0 {
                break;
            }
            let range = passed..passed + read;
            passed += read;
            match harm {
                Harm::Cut(at) if range.end > at => break,
                Harm::Flip(at) if range.contains(&at) => bytes[at - range.start] ^= 4,
                Harm::Stall(at) if range.end > at => {
                    stalled.notify_one();
                    std::future::pending::<()>().await;
                }
                _ => {}
            }
            if to_client.write_all(&bytes[..read]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        _ = up => {}
        () = down => {}
    }
}
