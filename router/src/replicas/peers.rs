//! Where the other routers are: a list, a directory, or the endpoints of their Service. Whole views, never differences.

mod file;
mod kubernetes;

use routing::RouterId;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::mesh::View;
use super::options::PeerSource;
use crate::discovery::DiscoveryError;
use crate::discovery::kubernetes::client;

/// Starts looking, and makes this router known where that is needed: by a task that takes that back at `stop`. No view until
/// the first one is complete.
pub(super) async fn start(
    source: PeerSource,
    own: RouterId,
    address: String,
    stop: CancellationToken,
) -> Result<(watch::Receiver<Option<View>>, Option<JoinHandle<()>>), DiscoveryError> {
    let (publish, view) = watch::channel(None);
    let mut announced = None;
    match source {
        PeerSource::Listed(addresses) => {
            publish.send_replace(Some(addresses.into_iter().collect()));
        }
        PeerSource::Directory(directory) => {
            announced = Some(tokio::spawn(file::announce(directory.clone(), own, address, stop.clone())));
            tokio::spawn(stop.run_until_cancelled_owned(file::run(directory, own, publish)));
        }
        PeerSource::Service { name, namespace } => {
            let client = client().await?;
            tokio::spawn(stop.run_until_cancelled_owned(kubernetes::run(client, namespace, name, publish)));
        }
    }
    Ok((view, announced))
}

/// Publishes a view, unless it equals the last one.
fn publish(to: &watch::Sender<Option<View>>, view: View) {
    to.send_if_modified(|last| {
        let changed = last.as_ref() != Some(&view);
        *last = Some(view);
        changed
    });
}
