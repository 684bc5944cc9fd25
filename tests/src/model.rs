//! Where tests find the default model.

use std::path::PathBuf;

/// `$ARMATURE_TEST_MODEL`, or the default model in the cache.
///
/// # Panics
/// When there is no such file: a test that needs the model fails rather than passing without it.
pub fn path() -> PathBuf {
    let path = std::env::var_os("ARMATURE_TEST_MODEL").map(PathBuf::from).unwrap_or_else(|| {
        let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache");
        let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
        cache.join("armature/models/smollm2-135m-instruct-q4_1.gguf")
    });
    assert!(path.is_file(), "{} is missing: run `cargo xtask model`", path.display());
    path
}
