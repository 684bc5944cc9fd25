//! The event side of an engine: a publisher as vLLM has one, with its replay socket.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Tokens per block.
pub const BLOCK: usize = 16;

/// A publisher of KV events.
pub struct Engine {
    publisher: PubSocket,
    pub address: String,
    pub replay: String,
    messages: Arc<Mutex<Vec<Bytes>>>,
    replaying: JoinHandle<()>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.replaying.abort();
    }
}

impl Engine {
    pub async fn start() -> Self {
        let mut publisher = PubSocket::new();
        let address = publisher.bind("tcp://127.0.0.1:0").await.expect("a free port").to_string();
        Self::with(publisher, address).await
    }

    /// It connects to the router, which listens at `address`.
    pub async fn connect(address: &str) -> Self {
        let mut publisher = PubSocket::new();
        publisher.connect(address).await.expect("the router listens");
        Self::with(publisher, address.to_owned()).await
    }

    async fn with(publisher: PubSocket, address: String) -> Self {
        let messages = Arc::<Mutex<Vec<Bytes>>>::default();
        let mut socket = RouterSocket::new();
        let replay = socket.bind("tcp://127.0.0.1:0").await.expect("a free port").to_string();
        let replaying = tokio::spawn(replay_for_ever(socket, messages.clone()));
        Self { publisher, address, replay, messages, replaying }
    }

    /// Numbers a batch and keeps it for replay, and does not publish it.
    pub fn lose(&mut self, events: Value) -> (u64, Bytes) {
        let mut messages = self.messages.lock();
        let sequence = messages.len() as u64;
        // The time makes each batch another one.
        let batch = json!([1.0 + sequence as f64, events, 0]);
        let payload = Bytes::from(rmp_serde::to_vec(&batch).expect("serializable"));
        messages.push(payload.clone());
        (sequence, payload)
    }

    pub async fn publish(&mut self, events: Value) {
        let (sequence, payload) = self.lose(events);
        let mut message = ZmqMessage::from("kv-events");
        message.push_back(Bytes::copy_from_slice(&sequence.to_be_bytes()));
        message.push_back(payload);
        self.publisher.send(message).await.expect("it is published");
    }

    /// Numbers from 0 again, as a new process does.
    pub fn restart(&mut self) {
        self.messages.lock().clear();
    }
}

async fn replay_for_ever(mut socket: RouterSocket, messages: Arc<Mutex<Vec<Bytes>>>) {
    while let Ok(request) = socket.recv().await {
        let parts = request.into_vec();
        let [identity, _, start] = &parts[..] else { continue };
        let start = u64::from_be_bytes(start[..].try_into().expect("a number"));
        let messages = messages.lock().clone();
        let kept = messages.into_iter().enumerate().map(|(at, payload)| (at as u64, payload)).skip(start as usize);
        for (sequence, payload) in kept.chain([(u64::MAX, Bytes::new())]) {
            let mut answer = ZmqMessage::from(identity.clone());
            answer.push_back(Bytes::new());
            answer.push_back(Bytes::copy_from_slice(&sequence.to_be_bytes()));
            answer.push_back(payload);
            if socket.send(answer).await.is_err() {
                break;
            }
        }
    }
}

/// Blocks of the tokens of `text`, of which the first gets the engine hash `first`. Each byte is a token.
pub fn stored(text: &str, first: u64, parent: Option<u64>) -> Value {
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let blocks = tokens.len() / BLOCK;
    let hashes: Vec<u64> = (first..first + blocks as u64).collect();
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens[..blocks * BLOCK],
        "block_size": BLOCK, "lora_id": null, "medium": "GPU"})
}
