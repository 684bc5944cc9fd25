//! `armature up`: one router and some workers on this machine, over file discovery, until Ctrl-C.
//!
//! The router runs in this process and the workers in processes of their own, as they would in pods: a worker that dies
//! takes nothing with it, and is started again.

mod download;
mod drain;
mod folder;
mod ready;
mod workers;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use clap::Args;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use worker_agent::engine::builtin::open::{OpenOptions, fits};
use worker_agent::source::{Cache, ModelSource};
use worker_agent::transfer::Transports;

use crate::commands;
use crate::outcome::{Failure, Outcome, cannot_listen};
use folder::Folder;
use workers::Workers;

/// Flags of `up`.
#[derive(Args, Clone, Debug)]
pub struct Up {
    /// GGUF file, Hugging Face repository (org/name, hf://org/name@rev/file.gguf) or `default`
    #[arg(long, default_value = "default")]
    pub model: String,
    /// What clients put into "model" [default: the name of the file or repository]
    #[arg(long)]
    pub model_name: Option<String>,
    /// Worker processes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub workers: u16,
    /// How many of the workers only compute prompts, for the others to go on with: disaggregated serving
    #[arg(long, default_value_t = 0)]
    pub prefill_workers: u16,
    /// How KV blocks travel from those to the others: `auto` is shared memory
    #[arg(long, value_enum, default_value_t = Transports::Auto)]
    pub kv_transfer: Transports,
    /// Port of the OpenAI API; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// IP address to listen on; 0.0.0.0 is every one of this machine
    #[arg(long, default_value = "127.0.0.1", value_parser = ip_address)]
    pub host: IpAddr,
    /// Threads that compute, for each worker [default: the cores are shared out]
    #[arg(long, value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// KV blocks of each worker; one takes layers × KV heads × head size × block size × 4 bytes (360 KiB with the default model)
    #[arg(long, default_value_t = 4096, value_parser = at_least_one)]
    pub kv_blocks: usize,
    /// Tokens per KV block: 16, 32 or 64
    #[arg(long, default_value_t = 16, value_parser = block_size)]
    pub block_size: u32,
}

fn ip_address(text: &str) -> Result<IpAddr, String> {
    text.parse().map_err(|_| "must be an IP address, such as 127.0.0.1 or 0.0.0.0".to_owned())
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| *count > 0).ok_or_else(|| "must be a number of at least 1".to_owned())
}

fn block_size(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|size| [16, 32, 64].contains(size)).ok_or_else(|| "must be 16, 32 or 64".to_owned())
}

/// Serves until `shutdown`.
pub async fn run(args: Up, shutdown: CancellationToken) -> Outcome {
    let source: ModelSource = args.model.parse().map_err(Failure::settings)?;
    if args.prefill_workers >= args.workers {
        let (prefill, all) = (args.prefill_workers, args.workers);
        return Err(Failure::settings(format!(
            "--prefill-workers {prefill} of --workers {all} leave nobody to decode"
        )));
    }
    let address = SocketAddr::new(args.host, args.port);
    let listener = TcpListener::bind(address).await.map_err(|error| cannot_listen(address, "--port", &error))?;
    let address = listener.local_addr()?;
    let cache = Cache::from_env();
    let model = tokio::select! {
        model = download::obtain(&source, &cache) => model?,
        () = shutdown.cancelled() => return Ok(()),
    };
    let name = args.model_name.clone().unwrap_or_else(|| served_name(&source, &model));
    let sizes = OpenOptions { total_blocks: args.kv_blocks, block_size: args.block_size, ..OpenOptions::default() };
    fits(&model, &sizes, args.workers.into()).map_err(|error| commands::worker::refused(&model, &error))?;

    let discovery = Folder::create()?;
    // Of its own: only after `shutdown` has been noticed here may the router end.
    let stop_router = CancellationToken::new();
    let mut router =
        tokio::spawn(commands::router::beside_workers(listener, discovery.path().to_path_buf(), stop_router.clone()));
    let stop_workers = CancellationToken::new();
    let mut workers = Workers::start(&args, &model, &name, discovery.path(), stop_workers.clone())?;
    let metrics = workers.metrics();
    let serving = async {
        ready::wait(discovery.path(), args.workers, address, &name).await?;
        crate::reference::print(announcement(&args, address, &name, &metrics.all().await))?;
        std::future::pending().await
    };
    let outcome = tokio::select! {
        biased;
        () = shutdown.cancelled() => Ok(()),
        failed = workers.failed() => Err(failed),
        ended = &mut router => Err(early_end(ended)),
        failed = serving => failed,
    };
    if outcome.is_ok() {
        drain::announce(address).await;
    }
    // The router first: what runs at a worker must be able to finish. However it ends, the workers drain, too.
    stop_router.cancel();
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

/// What a person needs to know once everything is up. Printed in one piece: who reads to the line that it waits for and then
/// goes leaves nobody to read a later one.
fn announcement(args: &Up, address: SocketAddr, name: &str, worker_metrics: &[String]) -> String {
    let threads = workers::threads(args);
    let plural = if threads == 1 { "thread" } else { "threads" };
    let mut text = format!(
        "worker   {} ready (built-in engine, {threads} {plural} each, {} KV blocks of {} tokens)\n",
        args.workers, args.kv_blocks, args.block_size
    );
    for line in worker_metrics {
        text += &format!("worker   {line}\n");
    }
    text += &format!("router   http://{address}/v1   metrics http://{address}/metrics\n");
    // Greedy, and more than one block with the template around it: the same answer when asked again, out of the cache.
    let body = format!(
        r#"{{"model":"{name}","messages":[{{"role":"user","content":"What is the capital of France?"}}],"temperature":0}}"#
    );
    text += &format!(
        "try      curl -i http://{address}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
    );
    text + "         twice: x-armature-reused-blocks goes from 0 up, that is the prefix cache\n"
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        up: Up,
    }

    #[test]
    fn values_that_cannot_work_are_refused_with_the_flag() {
        for (flag, value, rule) in [
            ("--threads", "0", "must be a number of at least 1"),
            ("--kv-blocks", "0", "must be a number of at least 1"),
            ("--block-size", "20", "must be 16, 32 or 64"),
            ("--host", "localhost", "must be an IP address"),
            ("--workers", "0", "0 is not in 1..=64"),
        ] {
            let refused = Command::try_parse_from(["up", flag, value]).err().expect("refused").to_string();
            assert!(refused.contains(flag) && refused.contains(rule), "{refused}");
        }
        let command = Command::try_parse_from(["up", "--block-size", "64", "--host", "::1"]).expect("valid");
        assert_eq!((command.up.block_size, command.up.host.is_ipv6()), (64, true));
    }
}
