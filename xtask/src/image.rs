//! The container image, written without a daemon or a registry: one layer from a handful of files, and the JSON around it.
//!
//! The tar file is an OCI layout and a docker archive at once, so `docker load`, `podman load` and `ctr images import` all
//! take it. The same input gives the same bytes: sorted entries, time 0, fixed owners.

mod archive;
mod layer;

use std::path::{Path, PathBuf};

use anyhow::Context;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

use crate::process::{cargo, run as run_command, target};
use archive::Archive;

/// Builds the container image.
#[derive(clap::Args)]
pub struct Args {
    /// `release` shares what the tests have compiled; `dist` (thin LTO) is what ships.
    #[arg(long, value_enum, default_value = "dist")]
    profile: Profile,
    /// Where to write the tar file.
    #[arg(long, default_value = "target/armature-image.tar")]
    out: PathBuf,
    /// Name and tag inside the archive.
    #[arg(long, default_value = NAME)]
    name: String,
}

/// A cargo profile.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// Without LTO.
    Release,
    /// With it.
    Dist,
}

/// Name and tag that the chart's default values expect.
pub const NAME: &str = "armature:0.1.0";

/// User and group of the processes: the usual `nonroot`.
const NONROOT: u32 = 65532;

/// Builds the binary and the image around it.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let profile = if args.profile == Profile::Release { "release" } else { "dist" };
    run_command(cargo().args(["build", "--quiet", "--workspace", "--bins", "--profile", profile]))?;
    product(&target().join(profile).join("armature"), &args.name, &args.out)
}

/// The image of the product around this binary.
pub fn product(binary: &Path, name: &str, out: &Path) -> anyhow::Result<()> {
    let layer = layer::product(binary)?;
    let config = json!({"Entrypoint": ["/armature"], "User": format!("{NONROOT}:{NONROOT}"), "WorkingDir": "/",
        "Env": ["PATH=/", "HOME=/tmp", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"]});
    write(out, name, layer, config)?;
    let bytes = std::fs::metadata(out)?.len();
    println!("image: {name}, {:.1} MB, {}", bytes as f64 / 1e6, out.display());
    Ok(())
}

/// An image of one static program that does nothing: what a pod's sandbox runs.
pub fn pause(program: &Path, name: &str, out: &Path) -> anyhow::Result<()> {
    let mut layer = Archive::default();
    layer.file("busybox", 0o755, std::fs::read(program).with_context(|| format!("cannot read {}", program.display()))?);
    write(out, name, layer.finish(), json!({"Entrypoint": ["/busybox", "sleep", "2147483647"]}))
}

/// Writes layer, config and manifest as one archive.
fn write(out: &Path, name: &str, layer: Vec<u8>, process: Value) -> anyhow::Result<()> {
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let layer_digest = sha256(&layer);
    let config = json!({"architecture": architecture, "os": "linux", "config": process, "created": "1970-01-01T00:00:00Z",
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer_digest}")]}});
    let config = config.to_string().into_bytes();
    let config_digest = sha256(&config);
    let oci = "application/vnd.oci.image";
    let manifest = json!({"schemaVersion": 2, "mediaType": format!("{oci}.manifest.v1+json"),
        "config": {"mediaType": format!("{oci}.config.v1+json"), "digest": format!("sha256:{config_digest}"), "size": config.len()},
        "layers": [{"mediaType": format!("{oci}.layer.v1.tar"), "digest": format!("sha256:{layer_digest}"), "size": layer.len()}]});
    let manifest = manifest.to_string().into_bytes();
    let full = if name.contains('/') { name.to_owned() } else { format!("docker.io/library/{name}") };
    let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    let index = json!({"schemaVersion": 2, "mediaType": format!("{oci}.index.v1+json"), "manifests": [{
        "mediaType": format!("{oci}.manifest.v1+json"), "digest": format!("sha256:{}", sha256(&manifest)), "size": manifest.len(),
        "annotations": {"io.containerd.image.name": full, "org.opencontainers.image.ref.name": tag}}]});
    let docker = json!([{"Config": format!("blobs/sha256/{config_digest}"), "RepoTags": [name],
        "Layers": [format!("blobs/sha256/{layer_digest}")]}]);

    let mut archive = Archive::default();
    archive.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
    archive.file("index.json", 0o644, index.to_string().into_bytes());
    archive.file("manifest.json", 0o644, docker.to_string().into_bytes());
    for blob in [config, manifest, layer] {
        archive.file(&format!("blobs/sha256/{}", sha256(&blob)), 0o644, blob);
    }
    if let Some(folder) = out.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(out, archive.finish()).with_context(|| format!("cannot write {}", out.display()))
}

/// SHA-256, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_sha256sum() {
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
