//! Routers in a directory beside the workers' files: `routers/<id>.json`, kept alive as `discovery::leased` describes.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use routing::RouterId;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::publish;
use crate::discovery::leased::{self, Live};
use crate::replicas::hub::shown;
use crate::replicas::mesh::View;

/// How often the own file is touched; readers take one that is 3 s old as gone.
const REFRESH: Duration = Duration::from_secs(1);

/// What a router says of itself.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    /// In hexadecimal.
    router_id: String,
    /// `host:port` of its publisher.
    address: String,
}

fn routers(directory: &Path) -> PathBuf {
    directory.join("routers")
}

/// Publishes views for ever.
pub(super) async fn run(directory: PathBuf, own: RouterId, to: watch::Sender<Option<View>>) {
    let own = shown(own);
    leased::follow::<Entry>(routers(&directory), |live: Vec<Live<'_, Entry>>| {
        let others = live.iter().filter(|router| !router.lapsed && router.entry.router_id != own);
        publish(&to, others.map(|router| router.entry.address.clone()).collect());
    })
    .await;
}

/// Keeps the own file until `stop`, then removes it.
pub(super) async fn announce(directory: PathBuf, own: RouterId, address: String, stop: CancellationToken) {
    let entry = Entry { router_id: shown(own), address };
    let path = routers(&directory).join(format!("{}.json", entry.router_id));
    let keep = async {
        let mut ticks = interval(REFRESH);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failing = false;
        loop {
            ticks.tick().await;
            // A file that somebody removed is written again.
            let kept = match touch(&path).await {
                Ok(()) => Ok(()),
                Err(_) => write(&path, &entry).await,
            };
            if let Err(error) = &kept
                && !failing
            {
                tracing::warn!(file = %path.display(), %error, "this router cannot make itself known to others");
            }
            failing = kept.is_err();
        }
    };
    stop.run_until_cancelled(keep).await;
    if let Err(error) = tokio::fs::remove_file(&path).await {
        tracing::debug!(file = %path.display(), %error, "own file not removed; it expires in 3 s");
    }
}

/// Replaces the file in one step: readers see all of it or nothing.
async fn write(path: &Path, entry: &Entry) -> std::io::Result<()> {
    if let Some(directory) = path.parent() {
        tokio::fs::create_dir_all(directory).await?;
    }
    let new = path.with_extension("json.new");
    tokio::fs::write(&new, serde_json::to_vec(entry)?).await?;
    tokio::fs::rename(&new, path).await
}

async fn touch(path: &Path) -> std::io::Result<()> {
    let file = tokio::fs::OpenOptions::new().append(true).open(path).await?;
    file.into_std().await.set_modified(SystemTime::now())
}
