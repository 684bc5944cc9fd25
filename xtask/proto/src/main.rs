//! Prints the Rust code of the request plane's messages, without protoc: protox compiles, prost-build writes.
//!
//! `cargo xtask generate` runs it and writes the result to `crates/protocol/src/generated`.

use std::path::PathBuf;

use anyhow::Context;

fn main() -> anyhow::Result<()> {
    let folder = std::env::args_os().nth(1).map(PathBuf::from).context("usage: proto-codegen FOLDER")?;
    let descriptors = protox::compile(["request_plane.proto"], [folder])?;
    let mut config = prost_build::Config::new();
    config.bytes([".armature.v1.KvAnswer", ".armature.v1.ArtifactChunk"]);
    let requests = descriptors
        .file
        .into_iter()
        .map(|file| (prost_build::Module::from_protobuf_package_name(file.package()), file));
    let modules = config.generate(requests.collect())?;
    for code in modules.values() {
        print!("{code}");
    }
    Ok(())
}
