//! A file from the Hugging Face hub, in the hub's own cache layout, so that other tools share what is downloaded.
//!
//! `models--org--name/{blobs/<etag>, refs/<revision>, snapshots/<commit>/<file>}`; a snapshot's files are links to blobs.
//! Interrupted downloads go on where they stopped.

use std::path::{Path, PathBuf};

use futures::TryStreamExt;
use http_body_util::BodyDataStream;
use hyper::header::{CONTENT_LENGTH, ETAG, HeaderMap};
use hyper::{Method, StatusCode};
use serde::Deserialize;
use tokio::io::AsyncWriteExt;

use super::http::{Follow, Http, STALL, accepted};
use super::{HubModel, OnProgress, Progress, SourceError, choice, set, sha256};

/// How to reach the hub, and where its cache is.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// Without a slash at its end.
    pub endpoint: String,
    /// Sent to the endpoint's host only.
    pub token: Option<String>,
    /// Use the cache alone.
    pub offline: bool,
    /// Folder with the `models--…` folders.
    pub cache: PathBuf,
}

impl HubSettings {
    pub(super) fn from_env(cache: &Path) -> Self {
        let home = set("HF_HOME").map_or_else(|| cache.join("huggingface"), PathBuf::from);
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Self {
            endpoint: endpoint.trim_end_matches('/').into(),
            token: set("HF_TOKEN")
                .or_else(|| std::fs::read_to_string(home.join("token")).ok().map(|t| t.trim().into())),
            offline: set("HF_HUB_OFFLINE").is_some_and(|value| !matches!(value.as_str(), "0" | "false" | "no")),
            cache: set("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
        }
    }
}

/// What the hub says of a revision.
#[derive(Deserialize)]
struct Revision {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// The file's path in the cache.
pub(super) async fn obtain(
    model: &HubModel,
    hub: &HubSettings,
    progress: OnProgress<'_>,
) -> Result<PathBuf, SourceError> {
    let folder = hub.cache.join(format!("models--{}", model.repo.replace('/', "--")));
    if hub.offline {
        let missing = || SourceError::Offline { repo: model.repo.clone(), cache: hub.cache.clone() };
        return cached(model, &folder)?.ok_or_else(missing);
    }
    let http = Http::new(hub.token.as_deref())?;
    let url = format!("{}/api/models/{}/revision/{}", hub.endpoint, model.repo, model.revision);
    let revision: Revision = http.json(&url).await?;
    let files: Vec<_> = revision.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
    let file = match &model.file {
        Some(file) => file.clone(),
        None => choice::choose(&model.repo, &files)?,
    };
    if [&revision.sha, &file].iter().any(|part| part.split('/').any(|name| matches!(name, "" | "." | ".."))) {
        return Err(SourceError::Refused { url, reason: "the answer names a path outside the repository".into() });
    }
    let snapshot = folder.join("snapshots").join(&revision.sha).join(&file);
    if !snapshot.exists() {
        let url = format!("{}/{}/resolve/{}/{file}", hub.endpoint, model.repo, revision.sha);
        let blob = download(&http, &url, &file, &folder.join("blobs"), progress).await?;
        link(&blob, &snapshot, &file)?;
    }
    let reference = folder.join("refs").join(&model.revision);
    write(&reference, revision.sha.as_bytes())?;
    Ok(snapshot)
}

/// The file from the cache alone.
fn cached(model: &HubModel, folder: &Path) -> Result<Option<PathBuf>, SourceError> {
    // A full commit id has no file in refs/.
    let commit =
        std::fs::read_to_string(folder.join("refs").join(&model.revision)).unwrap_or_else(|_| model.revision.clone());
    let snapshot = folder.join("snapshots").join(commit.trim());
    let file = match &model.file {
        Some(file) => file.clone(),
        None => match std::fs::read_dir(&snapshot) {
            Ok(entries) => {
                let files: Vec<_> =
                    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
                choice::choose(&model.repo, &files)?
            }
            Err(_) => return Ok(None),
        },
    };
    Ok(Some(snapshot.join(file)).filter(|path| path.exists()))
}

/// What the hub announces of a file before it is downloaded.
struct Announced {
    etag: String,
    bytes: Option<u64>,
}

impl Announced {
    /// From the answer to HEAD. For large files the hub answers with a redirect to its storage, and says etag and size of
    /// what is there in headers of its own.
    fn read(url: &str, headers: &HeaderMap) -> Result<Self, SourceError> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let etag = text("x-linked-etag").or_else(|| text(ETAG.as_str()));
        let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
        let plain = |etag: &String| !etag.is_empty() && etag.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        let Some(etag) = etag.filter(plain) else {
            return Err(SourceError::Refused { url: url.into(), reason: "the answer has no usable etag".into() });
        };
        let bytes = text("x-linked-size").or_else(|| text(CONTENT_LENGTH.as_str())).and_then(|size| size.parse().ok());
        Ok(Self { etag, bytes })
    }
}

/// Downloads into `blobs/<etag>`, through `<etag>.incomplete`, which a later attempt continues.
async fn download(
    http: &Http,
    url: &str,
    name: &str,
    blobs: &Path,
    progress: OnProgress<'_>,
) -> Result<PathBuf, SourceError> {
    let head = accepted(url, http.send(&Method::HEAD, url, 0, Follow::SameHost).await?)?;
    let announced = Announced::read(url, head.headers())?;
    let (blob, partial) = (blobs.join(&announced.etag), blobs.join(format!("{}.incomplete", announced.etag)));
    if blob.exists() {
        return Ok(blob);
    }
    std::fs::create_dir_all(blobs).map_err(SourceError::io(blobs))?;
    let file = std::fs::File::options().create(true).append(true).open(&partial).map_err(SourceError::io(&partial))?;
    // Held until the file is dropped, by the process's death too.
    file.try_lock().map_err(|_| SourceError::Busy(name.into()))?;
    receive(http, url, name, &file, &partial, announced.bytes, progress).await?;
    let checked = check(&partial, &announced, name).await;
    if checked.is_err() {
        std::fs::remove_file(&partial).map_err(SourceError::io(&partial))?;
    }
    checked?;
    std::fs::rename(&partial, &blob).map_err(SourceError::io(&blob))?;
    Ok(blob)
}

/// Appends what is missing to the file.
async fn receive(
    http: &Http,
    url: &str,
    name: &str,
    file: &std::fs::File,
    path: &Path,
    total: Option<u64>,
    progress: OnProgress<'_>,
) -> Result<(), SourceError> {
    let mut done = file.metadata().map_err(SourceError::io(path))?.len();
    if total.is_some_and(|total| done >= total) {
        return Ok(()); // complete, or too long and found out by the check
    }
    let answer = http.send(&Method::GET, url, done, Follow::All).await?;
    // The server sends the whole file, or has another one. A refusal (401, 503, …) costs nothing of what is here.
    if matches!(answer.status(), StatusCode::OK | StatusCode::RANGE_NOT_SATISFIABLE) {
        file.set_len(0).map_err(SourceError::io(path))?;
        done = 0;
    }
    let answer = match answer.status() {
        StatusCode::RANGE_NOT_SATISFIABLE => accepted(url, http.send(&Method::GET, url, 0, Follow::All).await?)?,
        _ => accepted(url, answer)?,
    };
    let mut out = tokio::fs::File::from_std(file.try_clone().map_err(SourceError::io(path))?);
    let mut body = BodyDataStream::new(answer.into_body());
    let failed = |message: String| SourceError::Network { url: url.into(), stage: "downloading", message };
    progress(Progress { file: name, done, total });
    let received = loop {
        let bytes = match tokio::time::timeout(STALL, body.try_next()).await {
            Err(_) => break Err(failed(format!("no byte for {} s", STALL.as_secs()))),
            Ok(Err(error)) => break Err(failed(error.to_string())),
            Ok(Ok(None)) => break Ok(()),
            Ok(Ok(Some(bytes))) => bytes,
        };
        out.write_all(&bytes).await.map_err(SourceError::io(path))?;
        done += bytes.len() as u64;
        progress(Progress { file: name, done, total });
    };
    // A broken download keeps what it has, for the next attempt.
    out.flush().await.map_err(SourceError::io(path))?;
    received
}

/// Length, and the digest where the etag is one: large files have their SHA-256 as etag.
async fn check(path: &Path, announced: &Announced, name: &str) -> Result<(), SourceError> {
    let damaged = |what| SourceError::Damaged { file: name.into(), what };
    let length = std::fs::metadata(path).map_err(SourceError::io(path))?.len();
    if announced.bytes.is_some_and(|bytes| bytes != length) {
        return Err(damaged("its length is not the announced one"));
    }
    if announced.etag.len() != 64 {
        return Ok(());
    }
    let (path, etag) = (path.to_path_buf(), announced.etag.clone());
    let hashed =
        tokio::task::spawn_blocking(move || sha256(&path).map(|digest| digest == etag).map_err(SourceError::io(&path)));
    match hashed.await.expect("hashing does not panic")? {
        true => Ok(()),
        false => Err(damaged("its SHA-256 is not the announced one")),
    }
}

/// Makes the snapshot's file a relative link to the blob, so that the cache can be moved.
fn link(blob: &Path, snapshot: &Path, file: &str) -> Result<(), SourceError> {
    let up = "../".repeat(2 + file.matches('/').count());
    let name = blob.file_name().expect("a blob has a name").to_string_lossy();
    if let Some(folder) = snapshot.parent() {
        std::fs::create_dir_all(folder).map_err(SourceError::io(folder))?;
    }
    match std::os::unix::fs::symlink(format!("{up}blobs/{name}"), snapshot) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked.map_err(SourceError::io(snapshot)),
    }
}

fn write(path: &Path, content: &[u8]) -> Result<(), SourceError> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(SourceError::io(folder))?;
    }
    std::fs::write(path, content).map_err(SourceError::io(path))
}
