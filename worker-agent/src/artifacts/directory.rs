//! The files a router needs of a model that somebody else runs, from its directory as Hugging Face lays it out, or from its
//! place in a cache of Hugging Face's libraries (`models--org--name`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use protocol::metadata::artifact;
use protocol::model_directory::{self, FileError};

/// A model's files, and what a model card needs of its tokenizer.
#[derive(Clone, Debug)]
pub struct DirectoryArtifacts {
    /// By the names in [`protocol::metadata::artifact`]. A model without a chat template has no such file.
    pub files: BTreeMap<String, Bytes>,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Token to put before a completion prompt, where the model wants one.
    pub bos_token_id: Option<u32>,
}

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--model-path {directory}: {error}")]
pub struct DirectoryError {
    directory: String,
    error: FileError,
}

/// Reads a directory.
pub fn read(directory: &Path) -> Result<DirectoryArtifacts, DirectoryError> {
    let cached = snapshot(directory);
    let directory = cached.as_deref().unwrap_or(directory);
    let file = |name: &str| match std::fs::read(directory.join(name)) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    };
    let found = model_directory::read(file)
        .map_err(|error| DirectoryError { directory: directory.display().to_string(), error })?;
    let special = found.special_tokens.to_string();
    let mut files = BTreeMap::from([
        (artifact::TOKENIZER.to_owned(), Bytes::from(found.tokenizer_json)),
        (artifact::SPECIAL_TOKENS.to_owned(), Bytes::from(special)),
    ]);
    files.extend(found.chat_template.map(|text| (artifact::CHAT_TEMPLATE.to_owned(), Bytes::from(text))));
    Ok(DirectoryArtifacts { files, eos_token_ids: found.eos_token_ids, bos_token_id: found.bos_token_id })
}

/// The files of the main branch in a cache, or of the only revision that is there.
fn snapshot(cache: &Path) -> Option<PathBuf> {
    let snapshots = cache.join("snapshots");
    if let Ok(commit) = std::fs::read_to_string(cache.join("refs/main")) {
        return Some(snapshots.join(commit.trim()));
    }
    let mut revisions = std::fs::read_dir(snapshots).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let only = revisions.next()?;
    revisions.next().is_none().then_some(only)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_read_as_the_directory_that_it_keeps() {
        let cache = tempfile::tempdir().expect("a directory");
        let write = |path: &str, text: &str| {
            let path = cache.path().join(path);
            std::fs::create_dir_all(path.parent().expect("below the cache")).expect("created");
            std::fs::write(path, text).expect("written");
        };
        assert!(read(cache.path()).expect_err("empty").to_string().contains("tokenizer.json: is not there"));
        write("snapshots/abc/tokenizer.json", "{}");
        write("snapshots/abc/chat_template.jinja", "{{ messages }}");
        write("snapshots/abc/generation_config.json", r#"{"eos_token_id": [2, 3]}"#);
        for _ in 0..2 {
            let found = read(cache.path()).expect("reads");
            assert_eq!((found.files.len(), &found.eos_token_ids[..]), (3, &[2, 3][..]));
            // More than one: the main branch tells which.
            write("snapshots/def/tokenizer.json", "rubbish");
            write("refs/main", "abc\n");
        }
    }
}
