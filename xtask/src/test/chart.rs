//! The chart as helm sees it: it lints, every value renders, and values that cannot work are refused before anything is applied.

use std::path::Path;

use anyhow::bail;

use crate::process::{command, quiet, run};

/// Sets everything that is off by default, and names that YAML would take for numbers.
const EVERYTHING: &[&str] = &[
    "--set-string=watchNamespace=5,serviceAccount.name=77,image.tag=1,imagePullSecrets[0].name=8",
    "--set-string=operator.podLabels.number=1,operator.podAnnotations.number=2,operator.nodeSelector.number=3",
    "--set=hostModelPaths={/models},operator.podDisruptionBudget=true,operator.priorityClassName=high",
    "--set=operator.log=null,operator.resources=null,operator.tolerations[0].operator=Exists",
    "--set=metrics.service.enabled=true,metrics.podMonitor.enabled=true,metrics.podMonitor.labels.release=x",
    "--api-versions=monitoring.coreos.com/v1/PodMonitor",
];

/// What must be in the result: numbers are strings.
const RENDERED: &[&str] = &[
    "namespace: \"123\"",
    "namespace: \"5\"",
    "serviceAccountName: \"77\"",
    "\"--namespace=5\"",
    "\"--host-model-path=/models\"",
    "app.kubernetes.io/instance: \"1234\"",
    "number: \"1\"",
    "value: \"info\"",
    "maxUnavailable: 1",
    "kind: PodMonitor",
    "priorityClassName: \"high\"",
];

/// Each is a mistake of its own.
const REFUSED: &[&str] = &[
    "hostModelPaths={/models/../etc}",
    "hostModelPaths={models}",
    "image.tag=a/b",
    "serviceAccount.name=A_b",
    "operator.resources.cpu=1",
    "operator.resources.requests.cpu=lots",
    "operator.replica=2",
    "metrics.podMonitor.interval=often",
];

/// Lints and renders it.
pub fn check(helm: &Path) -> anyhow::Result<()> {
    run(command(helm).args(["lint", "--strict", "--quiet", "helm/armature"]))?;
    // Without a cluster helm assumes a version of its own, which may be older than the chart allows.
    let template = || {
        let mut template = command(helm);
        template.args(["template", "1234", "helm/armature", "--namespace", "123", "--kube-version", "1.30.0"]);
        template
    };
    let text = quiet(template().args(EVERYTHING))?;
    if let Some(missing) = RENDERED.iter().find(|part| !text.contains(**part)) {
        bail!("the chart renders without `{missing}`:\n{text}");
    }
    for value in REFUSED {
        if quiet(template().arg("--set").arg(value)).is_ok() {
            bail!("the chart takes {value}, which cannot work");
        }
    }
    if quiet(&mut template())?.contains("PodMonitor") {
        bail!("the chart needs the Prometheus operator by default");
    }
    Ok(())
}
