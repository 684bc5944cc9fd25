//! A backend whose workers say what the test wrote, and the words they say it in.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use protocol::request_plane::{FinishReason, Finished, Generate, Output, TokenLogprobs};
use router::backend::{Backend, DispatchError, RouteOptions, Routed, ServedModel, StreamItem};
use router::model::Model;
use routing::Record;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::harness::{DEADLINE, card};

/// One token for each byte.
pub fn byte_tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

pub fn tokens(token_ids: &[u32]) -> Result<StreamItem, DispatchError> {
    Ok(StreamItem::Output(Output { token_ids: token_ids.to_vec(), ..Default::default() }))
}

pub fn first(token_ids: &[u32], reused_blocks: u32) -> Result<StreamItem, DispatchError> {
    let output = Output { token_ids: token_ids.to_vec(), first: true, reused_blocks, ..Default::default() };
    Ok(StreamItem::Output(output))
}

pub fn text(text: &str) -> Result<StreamItem, DispatchError> {
    tokens(&byte_tokens(text))
}

pub fn with_logprobs(token_ids: &[u32]) -> Result<StreamItem, DispatchError> {
    let logprobs = token_ids.iter().map(|&token_id| logprob(token_id)).collect();
    Ok(StreamItem::Output(Output { token_ids: token_ids.to_vec(), logprobs, ..Default::default() }))
}

pub fn logprob(token_id: u32) -> TokenLogprobs {
    use protocol::request_plane::TopLogprob;
    let top = vec![
        TopLogprob { token_id, logprob: -0.5 },
        TopLogprob { token_id: u32::from(b'z'), logprob: f32::NEG_INFINITY },
    ];
    TokenLogprobs { token_id, logprob: -0.5, top }
}

pub fn finished(reason: FinishReason, completion_tokens: u32, reused_tokens: u32) -> Result<StreamItem, DispatchError> {
    let finished = Finished { reason: reason.into(), completion_tokens, reused_tokens, ..Default::default() };
    Ok(StreamItem::Finished(finished))
}

pub fn worker_failed() -> DispatchError {
    DispatchError::Worker { worker: "w0".into(), stage: "generating", message: "connection reset".into() }
}

/// What one `generate` answers.
pub enum Script {
    /// These items, then the end.
    Items(Vec<Result<StreamItem, DispatchError>>),
    /// What the test sends.
    Live(mpsc::UnboundedReceiver<Result<StreamItem, DispatchError>>),
    /// No worker takes the request before the sender says so.
    Held(oneshot::Receiver<()>),
    /// No stream.
    Refuse(DispatchError),
}

/// A backend whose workers say what the test wrote.
pub struct Scripted {
    served: Mutex<Vec<Arc<ServedModel>>>,
    known: Vec<String>,
    gate: Mutex<Option<std::sync::mpsc::Receiver<()>>>,
    scripts: Mutex<VecDeque<Script>>,
    pub requests: Mutex<Vec<(Generate, RouteOptions)>>,
    /// Requests whose decisions somebody asked for.
    pub asked: Mutex<Vec<String>>,
    pub dropped: Arc<Notify>,
    pub started: Notify,
}

impl Scripted {
    pub fn new(models: Vec<(&str, Model)>) -> Scripted {
        let served = |(name, model): (&str, Model)| {
            Arc::new(ServedModel { card: card(name), model: Arc::new(model), created_s: 1_700_000_000 })
        };
        Scripted {
            known: models.iter().map(|(name, _)| (*name).to_owned()).collect(),
            served: Mutex::new(models.into_iter().map(served).collect()),
            gate: Mutex::default(),
            scripts: Mutex::default(),
            requests: Mutex::default(),
            asked: Mutex::default(),
            dropped: Arc::default(),
            started: Notify::new(),
        }
    }

    pub fn script(&self, items: Vec<Result<StreamItem, DispatchError>>) {
        self.scripts.lock().push_back(Script::Items(items));
    }

    pub fn refuse(&self, error: DispatchError) {
        self.scripts.lock().push_back(Script::Refuse(error));
    }

    /// The sender of the next request's stream.
    pub fn live(&self) -> mpsc::UnboundedSender<Result<StreamItem, DispatchError>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.scripts.lock().push_back(Script::Live(receiver));
        sender
    }

    /// The next request is taken when this is used.
    pub fn hold(&self) -> oneshot::Sender<()> {
        let (sender, receiver) = oneshot::channel();
        self.scripts.lock().push_back(Script::Held(receiver));
        sender
    }

    /// Every worker of the model leaves.
    pub fn leave(&self, name: &str) {
        self.served.lock().retain(|served| served.card.display_name != name);
    }

    /// Blocks the thread that looks a model up next until the sender is used or dropped.
    pub fn block_lookup(&self) -> std::sync::mpsc::Sender<()> {
        let (sender, receiver) = std::sync::mpsc::channel();
        *self.gate.lock() = Some(receiver);
        sender
    }

    /// Whether a lookup has come to the sender of [`Self::block_lookup`], and waits.
    pub fn lookup_waits(&self) -> bool {
        self.gate.lock().is_none()
    }

    /// The only request so far.
    pub fn request(&self) -> Generate {
        let requests = self.requests.lock();
        assert_eq!(requests.len(), 1);
        requests[0].0.clone()
    }
}

struct NotifyOnDrop(Arc<Notify>);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl Backend for Scripted {
    fn model(&self, name: &str) -> Option<Arc<ServedModel>> {
        let gate = self.gate.lock().take();
        if let Some(gate) = gate {
            let _ = gate.recv_timeout(DEADLINE);
        }
        self.served.lock().iter().find(|served| served.card.display_name == name).cloned()
    }

    fn models(&self) -> Vec<Arc<ServedModel>> {
        self.served.lock().clone()
    }

    fn known(&self, name: &str) -> bool {
        self.known.iter().any(|known| known == name)
    }

    fn synced(&self) -> bool {
        true
    }

    fn decisions(&self, request: &str) -> Vec<Record> {
        self.asked.lock().push(request.to_owned());
        Vec::new()
    }

    async fn generate(&self, request: Generate, options: RouteOptions) -> Result<Routed, DispatchError> {
        self.requests.lock().push((request, options.clone()));
        self.started.notify_one();
        let script = self.scripts.lock().pop_front();
        let guard = NotifyOnDrop(self.dropped.clone());
        let stream: router::backend::OutputStream = match script {
            Some(Script::Refuse(error)) => return Err(error),
            Some(Script::Items(items)) => Box::pin(futures::stream::iter(items)),
            Some(Script::Live(receiver)) => {
                Box::pin(futures::stream::unfold((receiver, guard), |(mut receiver, guard)| async move {
                    Some((receiver.recv().await?, (receiver, guard)))
                }))
            }
            Some(Script::Held(receiver)) => {
                receiver.await.map_err(|_| worker_failed())?;
                Box::pin(futures::stream::iter([text("ok"), finished(FinishReason::Eos, 3, 0)]))
            }
            None => Box::pin(futures::stream::iter([text("ok"), finished(FinishReason::Eos, 3, 0)])),
        };
        Ok(Routed { worker_id: 42, worker_name: "w0".into(), overlap_blocks: 7, stream })
    }
}
