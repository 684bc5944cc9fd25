//! Kubernetes files: the CRDs, as the product's binary prints them, and the chart rendered with its default values.

use std::path::Path;

use anyhow::Context;

use super::Generated;
use crate::process::{built, command, quiet, root};

/// `crds/*.yaml`, one file a CRD. The chart carries copies: helm installs nothing outside its own folder.
pub fn crds() -> anyhow::Result<Vec<Generated>> {
    let yaml = quiet(built("armature")?.arg("crds"))?;
    let mut files = Vec::new();
    for document in yaml.split("---\n").filter(|document| !document.trim().is_empty()) {
        let name =
            document.lines().find_map(|line| line.strip_prefix("  name: ")).context("a CRD without metadata.name")?;
        let (plural, group) = name.split_once('.').context("a CRD's name is its plural and its group")?;
        for folder in ["crds", "helm/armature/crds"] {
            let path = Path::new(folder).join(format!("{group}_{plural}.yaml"));
            files.push(Generated { path, content: document.to_owned() });
        }
    }
    Ok(files)
}

/// `deploy/armature.yaml`: the chart with default values. Left alone where there is neither chart nor helm: `cargo xtask test` builds helm.
pub fn rendered() -> anyhow::Result<Vec<Generated>> {
    let Some(helm) = crate::cluster::helm()? else { return Ok(Vec::new()) };
    if !root().join("helm/armature/Chart.yaml").exists() {
        return Ok(Vec::new());
    }
    let mut render = command(helm);
    // Without a cluster helm assumes a version, which depends on how helm was built; ours is the least the chart takes.
    render.args(["template", "armature", "helm/armature", "--namespace", "armature-system", "--include-crds"]);
    render.args(["--kube-version", "1.30.0"]);
    let content =
        format!("# helm template armature helm/armature: written by `cargo xtask generate`.\n{}", quiet(&mut render)?);
    Ok(vec![Generated { path: "deploy/armature.yaml".into(), content }])
}
