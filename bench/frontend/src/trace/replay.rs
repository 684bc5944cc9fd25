//! Requests at the trace's times, whether or not earlier ones have been answered.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::client::{self, Ended};
use super::record::Record;
use super::request;

/// One run over the trace.
pub struct Replay {
    /// What is asked, and when.
    pub records: Arc<Vec<Record>>,
    /// The router.
    pub address: SocketAddr,
    /// What is put into "model".
    pub model: &'static str,
    /// How many times faster than the trace.
    pub speedup: f64,
    /// Most requests at a time.
    pub connections: usize,
}

/// One request, as it went.
pub struct Outcome {
    /// When it was to be sent.
    pub due: Instant,
    /// When it was.
    pub sent: Instant,
    /// How it ended, or why it failed.
    pub ended: anyhow::Result<Ended>,
}

/// Longest time that one request may take: far more than any takes that does not hang.
const REQUEST: Duration = Duration::from_secs(180);

impl Replay {
    /// Runs it; outcomes come in no order.
    pub async fn run(self) -> Vec<Outcome> {
        let replay = Arc::new(self);
        let places = Arc::new(Semaphore::new(replay.connections));
        let (mut arrivals, mut requests) = (replay.clone().arrivals(), JoinSet::new());
        while let Some((index, due)) = arrivals.recv().await {
            let (replay, places) = (replay.clone(), places.clone());
            requests.spawn(async move {
                let _place = places.acquire().await.expect("never closed");
                replay.ask(index, due).await
            });
        }
        requests.join_all().await
    }

    /// Each record's index, when it is due. From a thread: the runtime's timer goes in steps of 1 ms, which are many in the
    /// trace's time.
    fn arrivals(self: Arc<Self>) -> UnboundedReceiver<(usize, Instant)> {
        let (arrivals, receiver) = unbounded_channel();
        std::thread::spawn(move || {
            let start = Instant::now();
            for (index, record) in self.records.iter().enumerate() {
                let due = start + record.at.div_f64(self.speedup);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                if arrivals.send((index, due)).is_err() {
                    return;
                }
            }
        });
        receiver
    }

    async fn ask(&self, index: usize, due: Instant) -> Outcome {
        // A request's text exists only while it is sent: the longest have hundreds of kilobytes.
        let text = request::bytes(&self.records[index], self.model, self.address);
        let sent = Instant::now();
        let ended = timeout(REQUEST, client::ask(self.address, &text)).await;
        let ended = ended.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {} s", REQUEST.as_secs())));
        Outcome { due, sent, ended }
    }
}
