//! `armature router`, alone or inside `armature up`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use router::config::Config;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::outcome::{Failure, Outcome, cannot_listen};

/// Runs a router until `shutdown`.
pub async fn run(config: Config, shutdown: CancellationToken) -> Outcome {
    config.validate().map_err(Failure::settings)?;
    let address = SocketAddr::new(config.http_host, config.http_port);
    let listener = TcpListener::bind(address).await.map_err(|error| cannot_listen(address, "--http-port", &error))?;
    Ok(router::service::run(config, listener, shutdown).await?)
}

/// Runs a router on a bound port over the workers in a discovery directory. Other flags keep their defaults, or what the
/// environment says.
pub async fn beside_workers(listener: TcpListener, discovery: PathBuf, shutdown: CancellationToken) -> Outcome {
    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        config: Config,
    }
    let arguments =
        ["router".into(), "--discovery-backend=file".into(), "--discovery-dir".into(), OsString::from(discovery)];
    let flags = Flags::try_parse_from(arguments).map_err(Failure::settings)?;
    Ok(router::service::run(flags.config, listener, shutdown).await?)
}
