//! The test cluster as its user sees it: kubectl, helm and curl inside its namespaces.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::chat::{Answer, WORKER_HEADER, read_stream, request};

/// Longest time of one command.
const COMMAND: Duration = Duration::from_secs(120);

/// Runs a command inside the cluster and returns its standard output.
pub async fn inside(arguments: &[&str], stdin: &str) -> anyhow::Result<String> {
    let xtask = std::env::var_os("ARMATURE_XTASK")
        .context("ARMATURE_XTASK is not set: run `cargo xtask test --stage cluster`")?;
    let mut command = Command::new(PathBuf::from(xtask));
    command.args(["cluster", "in"]).args(arguments).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut input = child.stdin.take().context("piped")?;
    let run = async {
        input.write_all(stdin.as_bytes()).await?;
        drop(input);
        child.wait_with_output().await
    };
    let output =
        tokio::time::timeout(COMMAND, run).await.with_context(|| format!("{arguments:?} takes too long"))??;
    if !output.status.success() {
        bail!("{}: {}: {}", arguments.join(" "), output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// kubectl.
pub async fn kubectl(arguments: &[&str]) -> anyhow::Result<String> {
    inside(&[&["kubectl"], arguments].concat(), "").await
}

/// `kubectl apply` of these manifests.
pub async fn apply(manifests: &str) -> anyhow::Result<String> {
    inside(&["kubectl", "apply", "-f", "-"], manifests).await
}

/// Objects of a kind in a namespace, as `kubectl get` has them.
pub async fn objects(namespace: &str, kind: &str, selector: &str) -> anyhow::Result<Vec<Value>> {
    let list = kubectl(&["get", kind, "--namespace", namespace, "--selector", selector, "--output", "json"]).await?;
    let list: Value = serde_json::from_str(&list)?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

/// Names of ready pods.
pub async fn ready_pods(namespace: &str, selector: &str) -> anyhow::Result<Vec<String>> {
    let ready = |pod: &Value| {
        let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        pod["metadata"]["deletionTimestamp"].is_null()
            && conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
    };
    let pods = objects(namespace, "pods", selector).await?;
    Ok(pods
        .iter()
        .filter(|pod| ready(pod))
        .filter_map(|pod| Some(pod["metadata"]["name"].as_str()?.to_owned()))
        .collect())
}

/// A Service that routers stand behind. Requests start inside the cluster and go through its virtual address.
#[derive(Clone, Debug)]
pub struct Service {
    namespace: String,
    name: String,
    base: String,
}

impl Service {
    /// The Service of this name, once it has an address.
    pub async fn find(namespace: &str, name: &str) -> anyhow::Result<Self> {
        let path = "jsonpath={.spec.clusterIP}:{.spec.ports[0].port}";
        let address = kubectl(&["get", "service", name, "--namespace", namespace, "--output", path]).await?;
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned(), base: format!("http://{address}") })
    }

    /// Addresses of the pods that kube-proxy of the node where requests start sends connections to.
    pub async fn leads_to(&self) -> anyhow::Result<BTreeSet<String>> {
        let rules = inside(&["iptables-save", "--table", "nat"], "").await?;
        let comment = format!("--comment \"{}/{}:", self.namespace, self.name);
        let targets = rules.lines().filter(|rule| rule.contains(&comment));
        let targets = targets.filter_map(|rule| rule.split_once("--to-destination ")?.1.split_once(':'));
        Ok(targets.map(|(address, _)| address.to_owned()).collect())
    }

    /// GETs a path; fails unless the answer is 200.
    pub async fn get(&self, path: &str) -> anyhow::Result<String> {
        inside(&["curl", "--silent", "--show-error", "--fail", "--max-time", "10", &format!("{}{path}", self.base)], "")
            .await
    }

    /// One turn of a conversation, streamed.
    pub async fn chat(&self, model: &str, messages: &[Value], max_tokens: u32) -> anyhow::Result<Answer> {
        let url = format!("{}/v1/chat/completions", self.base);
        let flags = [
            "--silent",
            "--show-error",
            "--include",
            "--no-buffer",
            "--max-time",
            "60",
            "--header",
            "content-type: application/json",
        ];
        let body = request(model, messages, max_tokens).to_string();
        let answer = inside(&[&["curl"], &flags[..], &["--data", "@-", &url]].concat(), &body).await?;
        let (head, events) = answer.split_once("\r\n\r\n").context("no head")?;
        if !head.starts_with("HTTP/1.1 200") {
            bail!("{answer}");
        }
        let worker = head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(name, _)| name.eq_ignore_ascii_case(WORKER_HEADER));
        read_stream(events, worker.map_or("", |(_, value)| value).to_owned())
    }
}
