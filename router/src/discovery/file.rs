//! Discovery through a directory: one JSON file for each worker, kept alive as `leased` describes.

use std::path::PathBuf;

use protocol::metadata::WorkerMetadata;
use serde::Deserialize;

use super::{Announced, Sink, leased};

#[derive(Debug, Deserialize)]
struct Entry {
    name: String,
    metadata: WorkerMetadata,
}

/// Publishes views for ever.
pub(super) async fn run(directory: PathBuf, mut sink: Sink) {
    let found = tokio::fs::metadata(&directory).await;
    if found.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        tracing::warn!(directory = %directory.display(), "discovery: no such directory yet; the first worker makes it");
    }
    leased::follow::<Entry>(directory, |live| {
        sink.publish(live.into_iter().map(announced));
    })
    .await;
}

fn announced(worker: leased::Live<'_, Entry>) -> Announced<'_> {
    let Entry { name, metadata } = worker.entry;
    Announced { name, metadata, since: worker.since, lapsed: worker.lapsed }
}
