//! `armature operator`.

use operator::config::Config;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::outcome::{Outcome, cannot_listen};

/// Runs the operator until `shutdown`.
pub async fn run(config: Config, shutdown: CancellationToken) -> Outcome {
    let address = config.listen;
    let listener = TcpListener::bind(address).await.map_err(|error| cannot_listen(address, "--listen", &error))?;
    Ok(operator::run(config, listener, shutdown).await?)
}
