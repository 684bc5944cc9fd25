//! `armature up`: one router and some workers on this machine, over file discovery, until Ctrl-C.
//!
//! The router runs in this process and the workers in processes of their own, as they would in pods: a worker that dies
//! takes nothing with it, and is started again.

mod download;
mod ready;
mod workers;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use clap::Args;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use worker_agent::source::{Cache, ModelSource};

use crate::commands;
use crate::outcome::{Failure, Outcome, cannot_listen};
use workers::Workers;

/// Flags of `up`.
#[derive(Args, Clone, Debug)]
pub struct Up {
    /// GGUF file, Hugging Face repository (org/name, hf://org/name@rev/file.gguf) or `default`
    #[arg(long, default_value = "default")]
    pub model: String,
    /// What clients put into "model"; by default the name of the file or repository
    #[arg(long)]
    pub model_name: Option<String>,
    /// Worker processes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub workers: u16,
    /// Port of the OpenAI API; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Threads that compute, for each worker; by default the cores are shared out
    #[arg(long)]
    pub threads: Option<usize>,
    /// KV blocks of each worker
    #[arg(long, default_value_t = 4096)]
    pub kv_blocks: usize,
    /// Tokens per KV block: 16, 32 or 64
    #[arg(long, default_value_t = 16)]
    pub block_size: u32,
}

/// Serves until `shutdown`.
pub async fn run(args: Up, shutdown: CancellationToken) -> Outcome {
    let source: ModelSource = args.model.parse().map_err(Failure::settings)?;
    let address = SocketAddr::new(args.host, args.port);
    let listener = TcpListener::bind(address).await.map_err(|error| cannot_listen(address, "--port", &error))?;
    let address = listener.local_addr()?;
    let cache = Cache::from_env();
    let model = tokio::select! {
        model = download::obtain(&source, &cache) => model?,
        () = shutdown.cancelled() => return Ok(()),
    };
    let name = args.model_name.clone().unwrap_or_else(|| served_name(&source, &model));

    let discovery = tempfile::Builder::new().prefix("armature-").tempdir()?;
    let mut router =
        tokio::spawn(commands::router::beside_workers(listener, discovery.path().to_path_buf(), shutdown.clone()));
    let stop_workers = CancellationToken::new();
    let mut workers = Workers::start(&args, &model, &name, discovery.path(), stop_workers.clone())?;
    let outcome = tokio::select! {
        ready = ready::wait(discovery.path(), args.workers, address, &name) => ready,
        failed = workers.failed() => Err(failed),
        ended = &mut router => Err(early_end(ended)),
        () = shutdown.cancelled() => Ok(()),
    };
    let outcome = match outcome {
        Ok(()) if !shutdown.is_cancelled() => {
            announce(&args, address, &name);
            tokio::select! {
                failed = workers.failed() => Err(failed),
                ended = &mut router => Err(early_end(ended)),
                () = shutdown.cancelled() => Ok(()),
            }
        }
        other => other,
    };
    // The router first: what runs at a worker must be able to finish. However it ends, the workers drain, too.
    shutdown.cancel();
    let drained = if router.is_finished() { Ok(()) } else { router.await.unwrap_or_else(|error| Err(error.into())) };
    stop_workers.cancel();
    workers.ended().await;
    outcome.and(drained)
}

/// Why the router ended before it was asked to.
fn early_end(ended: Result<Outcome, tokio::task::JoinError>) -> Failure {
    match ended {
        Ok(Ok(())) => anyhow::anyhow!("the router ended").into(),
        Ok(Err(failure)) => failure,
        Err(error) => error.into(),
    }
}

/// A name that is pleasant to type.
fn served_name(source: &ModelSource, file: &Path) -> String {
    match source {
        ModelSource::Default => "smollm2".into(),
        ModelSource::Hub(model) => model.repo.rsplit('/').next().unwrap_or(&model.repo).to_ascii_lowercase(),
        ModelSource::File(_) => file.file_stem().unwrap_or_default().to_string_lossy().to_ascii_lowercase(),
    }
}

fn announce(args: &Up, address: SocketAddr, name: &str) {
    let threads = workers::threads(args);
    let plural = if threads == 1 { "thread" } else { "threads" };
    println!(
        "worker   {} ready (built-in engine, {threads} {plural} each, {} KV blocks of {} tokens)",
        args.workers, args.kv_blocks, args.block_size
    );
    println!("router   http://{address}/v1   metrics http://{address}/metrics");
    let body = format!(r#"{{"model":"{name}","messages":[{{"role":"user","content":"Hi"}}],"stream":true}}"#);
    println!("try      curl http://{address}/v1/chat/completions -H 'content-type: application/json' -d '{body}'");
}
