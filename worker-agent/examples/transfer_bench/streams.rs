//! Steps of running streams, with and without transfers beside them.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedReceiver;
use worker_agent::engine::{Engine, EngineOutput};
use worker_agent::transfer::KvTransport;

use super::node::generate;
use super::{Failure, Pair, prompt};

/// Streams that decode while blocks come.
pub(super) const STREAMS: usize = 4;
/// Tokens of the streams' prompts.
const STREAM_PROMPT: usize = 64;
/// Fetches that are prepared for a round.
pub(super) const FETCHES: usize = 24;
/// Steps until all streams decode.
const START: usize = 8;
/// Steps that are measured before transfers, and again after them.
const CALM: usize = 30;
/// Most steps that are measured beside transfers.
const BUSY: usize = 90;
/// Tokens that each stream generates at most.
const STREAM_TOKENS: u32 = (START + 2 * CALM + BUSY + 20) as u32;

/// Lengths of steps, in seconds.
#[derive(Default)]
pub(super) struct Steps(Vec<f64>);

impl Steps {
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    pub(super) fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    pub(super) fn p95(&self) -> f64 {
        let mut steps = self.0.clone();
        steps.sort_by(f64::total_cmp);
        steps.get(steps.len() * 95 / 100).copied().unwrap_or(f64::NAN)
    }
}

/// What was measured.
#[derive(Default)]
pub(super) struct Beside {
    pub(super) calm: Steps,
    pub(super) busy: Steps,
    /// How much longer steps were in each round, in percent: machines get faster and slower from one to the next.
    pub(super) slowdowns: Vec<f64>,
    /// What fetches took beside the streams, in seconds.
    pub(super) fetches: Vec<f64>,
}

/// Measures `rounds` times: steps before transfers, while one transfer follows the other, and after them.
pub(super) async fn beside(pair: &Pair, transport: &Arc<dyn KvTransport>, rounds: usize) -> Result<Beside, Failure> {
    let mut beside = Beside::default();
    for number in 0..rounds {
        round(pair, transport, number, &mut beside).await?;
    }
    Ok(beside)
}

async fn round(
    pair: &Pair,
    transport: &Arc<dyn KvTransport>,
    number: usize,
    beside: &mut Beside,
) -> Result<(), Failure> {
    // Leased and reserved before, so that only bytes move.
    let mut fetches = Vec::new();
    for _ in 0..FETCHES {
        fetches.push((pair.from.lease(&pair.prompt).await?, pair.to.reserve(&pair.blocks).await?));
    }
    let submit =
        |seed| pair.to.engine.submit(generate(&prompt(STREAM_PROMPT, 100 * (number + 1) + seed), STREAM_TOKENS));
    let mut streams = (0..STREAMS).map(submit).collect::<Result<Vec<_>, _>>()?;
    steps(&mut streams, START, std::future::pending()).await;
    let mut calm = Steps(steps(&mut streams, CALM, std::future::pending()).await);
    let moving = async {
        for (source, reservation) in fetches {
            beside.fetches.push(pair.to.pull(transport.clone(), source, reservation).await?);
        }
        Ok::<_, Failure>(())
    };
    let busy = Steps(steps(&mut streams, BUSY, moving).await);
    calm.0.extend(steps(&mut streams, CALM, std::future::pending()).await);
    beside.slowdowns.push(100.0 * (busy.mean() / calm.mean() - 1.0));
    beside.calm.0.extend(calm.0);
    beside.busy.0.extend(busy.0);
    Ok(())
}

/// Times between tokens of the first stream: so many, or until `meanwhile` has ended, which is given up after them.
async fn steps(
    streams: &mut [UnboundedReceiver<EngineOutput>],
    count: usize,
    meanwhile: impl Future<Output = Result<(), Failure>>,
) -> Vec<f64> {
    let (mut steps, mut last) = (Vec::new(), None);
    let mut meanwhile = std::pin::pin!(meanwhile);
    while steps.len() < count {
        for stream in streams.iter_mut().skip(1) {
            while stream.try_recv().is_ok() {}
        }
        let output = tokio::select! {
            output = streams[0].recv() => output,
            ended = &mut meanwhile => {
                if let Err(error) = ended {
                    eprintln!("a transfer failed: {error}");
                }
                break;
            }
        };
        let Some(EngineOutput::First { .. } | EngineOutput::Token { .. }) = output else { break };
        let now = Instant::now();
        steps.extend(last.replace(now).map(|last: Instant| (now - last).as_secs_f64()));
    }
    steps
}
