//! A worker without its request plane, and one fetch between two of them.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use prometheus_client::registry::Registry;
use protocol::request_plane::{Generate, Stop};
use worker_agent::drain::Drain;
use worker_agent::engine::builtin::exchange::{Exchange, Reservation};
use worker_agent::engine::builtin::open::{OpenOptions, open};
use worker_agent::engine::{Engine, EngineOutput};
use worker_agent::transfer::metrics::TransferMetrics;
use worker_agent::transfer::{self, KvTransport, Lane, Options, Source, Transfers, Transports, serve};

use super::streams::{FETCHES, STREAMS};
use super::{Blocks, Failure, Pair, TIMEOUT, cores};

pub(super) struct Node {
    pub(super) engine: Transfers,
    pub(super) exchange: Arc<Exchange>,
    /// Where this worker's fetches run, as in a real one.
    pub(super) lane: Lane,
}

impl Node {
    /// Blocks move on `core`, if one is named.
    pub(super) async fn start(
        model: &str,
        tokens: usize,
        threads: usize,
        transports: Transports,
        core: Option<usize>,
    ) -> Result<Self, Failure> {
        // Leases and reservations may take half of the arena.
        let total_blocks = 2 * (FETCHES + 1) * tokens.div_ceil(16) + 64 * STREAMS;
        let options = OpenOptions { threads: NonZeroUsize::new(threads), total_blocks, ..OpenOptions::default() };
        let (engine, ..) = open(Path::new(model), options)?;
        let exchange = engine.exchange().ok_or("the engine's blocks cannot be moved")?;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let options = Options {
            boot_epoch: address.clone(),
            address,
            transports,
            revision: String::new(),
            lease: TIMEOUT,
            timeout: TIMEOUT,
        };
        let metrics = TransferMetrics::new(&mut Registry::default());
        let open = || transfer::open(Arc::new(engine), exchange.clone(), options, listener, metrics);
        let (opened, lane) = cores::on(core, || (open(), Lane::start()))?;
        let ((engine, server), lane) = (opened?, lane?);
        tokio::spawn(serve(server, Arc::new(Drain::default())));
        Ok(Self { engine, exchange, lane })
    }

    /// Leases the prompt's blocks; computes those that are not cached.
    pub(super) async fn lease(&self, prompt: &[u32]) -> Result<Source, Failure> {
        let mut outputs = self.engine.submit(Generate { prefill_only: true, ..generate(prompt, 2) })?;
        while let Some(output) = outputs.recv().await {
            if let EngineOutput::Prefilled(prefilled) = output {
                return Ok(Source::parse(&prefilled.disaggregated_params.ok_or("no room for a lease")?)?);
            }
        }
        Err("the prompt was not computed".into())
    }

    pub(super) async fn reserve(&self, blocks: &Blocks) -> Result<Reservation, Failure> {
        Ok(self.exchange.reserve(blocks.to_vec(), TIMEOUT).await?)
    }

    /// Moves the blocks that the reservation is missing; returns how long that took, in seconds.
    pub(super) async fn pull(
        &self,
        transport: Arc<dyn KvTransport>,
        source: Source,
        mut reservation: Reservation,
    ) -> Result<f64, Failure> {
        let address = source.address(transport.backend()).ok_or("the transport is not offered")?.to_owned();
        let started = Instant::now();
        let until = tokio::time::Instant::now() + TIMEOUT;
        let moved = self.lane.run(async move { transport.pull(&source, &address, &mut reservation, until).await });
        moved.await??;
        Ok(started.elapsed().as_secs_f64())
    }
}

pub(super) fn generate(prompt: &[u32], max_tokens: u32) -> Generate {
    let stop = Stop { max_tokens, ignore_eos: true, ..Default::default() };
    Generate { token_ids: prompt.to_vec(), stop: Some(stop), ..Default::default() }
}

/// One fetch of all blocks of the prompt, in seconds. What has come is dropped: the next fetch finds nothing here.
pub(super) async fn fetch(pair: &Pair, transport: &Arc<dyn KvTransport>) -> Result<f64, Failure> {
    let source = pair.from.lease(&pair.prompt).await?;
    let reservation = pair.to.reserve(&pair.blocks).await?;
    pair.to.pull(transport.clone(), source, reservation).await
}
