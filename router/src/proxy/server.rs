//! One OpenAI server as a worker: who it is, whether it is well, what it serves, and the connections to it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, HOST, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use kv_index::{WorkerId, WorkerRank};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::Notify;

use super::event_watch::EventWatch;
use super::line::{Answer, LineError, Lines};
use super::socket::Trust;
use crate::discovery::static_servers::{EventSource, ServerUrl, StaticServer};
use crate::openai::Endpoint;
use crate::workers::Trouble;

/// Whether requests go there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Health {
    /// Nobody has asked yet.
    Unknown,
    /// The last check went well.
    Up,
    /// A dial or some checks failed.
    Down {
        /// Why.
        reason: String,
        /// Nobody listens: whatever it held is gone.
        gone: bool,
    },
}

/// A model as a server lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListedModel {
    /// What clients put into `model`.
    pub(super) name: String,
    /// Most tokens of prompt and answer together; 0 where the server does not say.
    pub(super) context_length: u32,
    /// It is a LoRA adapter of another model on the list.
    pub(super) is_adapter: bool,
}

/// What is known of a server now.
#[derive(Clone, Debug)]
pub(super) struct Status {
    pub(super) health: Health,
    /// What it served when it was asked last.
    pub(super) models: Arc<[ListedModel]>,
}

/// An OpenAI server.
pub(super) struct Server {
    pub(super) id: WorkerId,
    pub(super) url: ServerUrl,
    /// `HOST:PORT`, for people.
    pub(super) name: Arc<str>,
    pub(super) name_header: HeaderValue,
    pub(super) events: Option<EventSource>,
    /// Whether they come, and can be used.
    pub(super) watch: EventWatch,
    authority: HeaderValue,
    chat: Uri,
    completions: Uri,
    lines: Arc<Lines>,
    status: Mutex<Status>,
    /// Wakes whoever publishes what can be routed.
    changed: Arc<Notify>,
    /// Wakes the task that checks it: a request could not reach it.
    pub(super) suspect: Notify,
    /// Wakes the task that follows its events: it is there again after it was not.
    pub(super) revived: Notify,
}

impl Server {
    pub(super) fn new(
        listed: &StaticServer,
        trust: Option<Trust>,
        dial: Duration,
        watch: EventWatch,
        changed: Arc<Notify>,
    ) -> Self {
        let StaticServer { url, events } = listed.clone();
        let (authority, name) = (url.authority(), url.to_string());
        let name = name.split_once("://").map_or(&*name, |(_, name)| name);
        let header = |text: &str| HeaderValue::try_from(text).expect("a URL is visible ASCII");
        let uri = |path: &str| url.path(path).parse().expect("the paths of a URL and of the API make a path");
        Self {
            chat: uri(Endpoint::Chat.path()),
            completions: uri(Endpoint::Completions.path()),
            id: WorkerId(url.instance_id()),
            name: name.into(),
            name_header: header(name),
            authority: header(&authority),
            lines: Arc::new(Lines::new(url.clone(), trust, dial)),
            url,
            events,
            watch,
            status: Mutex::new(Status { health: Health::Unknown, models: [].into() }),
            changed,
            suspect: Notify::new(),
            revived: Notify::new(),
        }
    }

    /// The one rank it is to us.
    pub(super) fn rank(&self) -> WorkerRank {
        WorkerRank { worker: self.id, dp_rank: 0 }
    }

    /// Where it answers an endpoint.
    pub(super) fn uri(&self, endpoint: Endpoint) -> Uri {
        match endpoint {
            Endpoint::Chat => self.chat.clone(),
            Endpoint::Completions => self.completions.clone(),
        }
    }

    pub(super) fn status(&self) -> Status {
        self.status.lock().clone()
    }

    /// What is wrong with its KV events, if it is to publish any.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        self.events.as_ref().and_then(|_| self.watch.trouble())
    }

    /// A check went well.
    pub(super) fn found(&self, models: Vec<ListedModel>) {
        let mut status = self.status.lock();
        let before = std::mem::replace(&mut status.health, Health::Up);
        if before == Health::Up && *status.models == *models {
            return;
        }
        if before != Health::Up {
            tracing::info!(worker = %self.name, models = models.len(), "server is well");
        }
        status.models = models.into();
        drop(status);
        if matches!(before, Health::Down { .. }) {
            self.revived.notify_one();
        }
        self.changed.notify_one();
    }

    /// A dial or some checks failed. Nothing goes there until a check goes well.
    pub(super) fn lost(&self, reason: String, gone: bool) {
        let mut status = self.status.lock();
        match &mut status.health {
            Health::Down { gone: before, .. } if *before || !gone => return,
            Health::Down { .. } => {}
            Health::Unknown | Health::Up => tracing::warn!(worker = %self.name, reason, "server is not well"),
        }
        status.health = Health::Down { reason, gone };
        drop(status);
        self.lines.sweep(true);
        self.changed.notify_one();
    }

    /// Closes connections that have been idle for long.
    pub(super) fn sweep(&self) {
        self.lines.sweep(false);
    }

    /// Sends what `request` makes, to `path`; it may be made twice. A dial that fails is held against the server.
    pub(super) async fn send(&self, request: impl Fn() -> Request<Full<Bytes>>) -> Result<Response<Answer>, LineError> {
        let with_host = || {
            let mut request = request();
            request.headers_mut().insert(HOST, self.authority.clone());
            request
        };
        let answer = self.lines.send(with_host).await;
        if let Err(error) = &answer
            && error.is_of_dial()
        {
            self.lost(error.to_string(), matches!(error, LineError::Dial(_)));
        }
        answer
    }

    /// Reads a page of at most `limit` bytes: its status, and what it says.
    pub(super) async fn get(&self, path: &str, key: Option<&str>, limit: usize) -> Result<(u16, Vec<u8>), LineError> {
        let path = self.url.path(path);
        let request = || {
            let mut request = Request::new(Full::default());
            *request.method_mut() = Method::GET;
            *request.uri_mut() = path.parse().expect("the paths of a URL and of the API make a path");
            let authorization = key.and_then(|key| HeaderValue::try_from(format!("Bearer {key}")).ok());
            request.headers_mut().extend(authorization.map(|value| (AUTHORIZATION, value)));
            request
        };
        let (head, mut answer) = self.send(request).await?.into_parts();
        let mut page = Vec::new();
        while page.len() < limit
            && let Some(piece) = answer.piece().await
        {
            page.extend_from_slice(&piece?);
        }
        Ok((head.status.as_u16(), page))
    }
}

/// `GET /v1/models`, as far as it is read here.
#[derive(Deserialize)]
struct Listing {
    data: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    id: String,
    #[serde(default)]
    max_model_len: Option<u32>,
    /// vLLM and SGLang: the model that an adapter belongs to.
    #[serde(default)]
    parent: Option<String>,
    /// llama.cpp.
    #[serde(default)]
    meta: Option<Meta>,
}

#[derive(Deserialize)]
struct Meta {
    #[serde(default)]
    n_ctx: Option<u32>,
}

/// Reads what a server lists.
pub(super) fn listed_models(page: &[u8]) -> Result<Vec<ListedModel>, serde_json::Error> {
    let listing: Listing = serde_json::from_slice(page)?;
    let model = |entry: Entry| ListedModel {
        name: entry.id,
        context_length: entry.max_model_len.or(entry.meta.and_then(|meta| meta.n_ctx)).unwrap_or(0),
        is_adapter: entry.parent.is_some(),
    };
    Ok(listing.data.into_iter().map(model).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_several_servers_are_read() {
        let model =
            |name: &str, context_length, is_adapter| ListedModel { name: name.into(), context_length, is_adapter };
        for (page, expected) in [
            (
                r#"{"object":"list","data":[{"id":"m","object":"model","max_model_len":4096,"parent":null,"permission":[{}]},
                    {"id":"a","max_model_len":null,"root":"/adapters/a","parent":"m"}]}"#,
                vec![model("m", 4096, false), model("a", 0, true)],
            ),
            (
                r#"{"models":[{"name":"x"}],"data":[{"id":"x.gguf","meta":{"n_ctx":2048,"n_ctx_train":8192,"size":1}}]}"#,
                vec![model("x.gguf", 2048, false)],
            ),
            (r#"{"data":[]}"#, vec![]),
        ] {
            assert_eq!(listed_models(page.as_bytes()).expect("a list"), expected);
        }
        assert!(listed_models(b"{}").is_err() && listed_models(b"<html>").is_err());
    }

    #[test]
    fn changes_of_health_are_told_once() {
        let changed = Arc::new(Notify::new());
        let listed = StaticServer { url: "http://h:1/p".parse().expect("a URL"), events: None };
        let watch = EventWatch::new(Duration::ZERO, changed.clone());
        let server = Server::new(&listed, None, Duration::from_secs(1), watch, changed.clone());
        assert_eq!((&*server.name, server.status().health), ("h:1/p", Health::Unknown));
        let told = || {
            let notified = std::pin::pin!(changed.notified());
            futures::FutureExt::now_or_never(notified).is_some()
        };
        server.found(Vec::new());
        assert!(told() && server.status().health == Health::Up);
        server.found(Vec::new());
        assert!(!told(), "nothing is new");
        let down = |reason: &str, gone| Health::Down { reason: reason.into(), gone };
        server.lost("slow".into(), false);
        assert!(told());
        server.lost("again".into(), false);
        assert!(!told() && server.status().health == down("slow", false));
        server.lost("refused".into(), true);
        assert!(told() && server.status().health == down("refused", true));
        server.found(Vec::new());
        assert!(told());
    }
}
