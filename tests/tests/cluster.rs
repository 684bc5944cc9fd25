//! Two real nodes: the chart, one object, traffic through the Service, failures of pods, and an uninstall without traces.
//!
//! One story in order, since each step needs the one before; `cargo xtask test --stage cluster` brings the cluster up.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Context;
use integration_tests::chat::{message, story};
use integration_tests::cluster::{Service, apply, inside, kubectl, objects, ready_pods};
use integration_tests::process::model;
use integration_tests::wait::until;

const SYSTEM: &str = "armature-system";
const DEMO: &str = "demo";
/// Goal: from `helm install` to the first streamed token, images present.
const FIRST_TOKEN: Duration = Duration::from_secs(30);
const ROLLOUT: Duration = Duration::from_secs(90);

#[tokio::test]
async fn a_model_on_kubernetes_from_install_to_uninstall() {
    kubectl(&["create", "namespace", DEMO]).await.expect("created");
    apply(&model_volume(&model())).await.expect("a volume with the model");
    kubectl(&[
        "wait",
        "pvc/models",
        "--namespace",
        DEMO,
        "--for",
        "jsonpath={.status.phase}=Bound",
        "--timeout",
        "60s",
    ])
    .await
    .expect("bound");
    let before = inventory().await;

    let chat = step("helm install to the first token", install()).await;
    step("a conversation stays with its worker", conversations(&chat)).await;
    step("the API server dies three times while traffic goes on", lost_api_server(&chat)).await;
    step("a deleted worker is replaced while traffic goes on", deleted_worker(&chat)).await;
    step("a deleted router is replaced", deleted_router(&chat)).await;
    step("a rollout loses no request", rollout(&chat)).await;
    step("a pool follows kubectl scale", scale(&chat)).await;
    step("a second deployment is a world of its own", second_deployment(&chat)).await;
    step("prompts and answers on different workers", halves()).await;
    step("uninstall", uninstall(&before)).await;
}

/// Runs a step and prints how long it took; what went wrong inside is shown with the state of the cluster.
async fn step<T>(what: &str, step: impl Future<Output = T>) -> T {
    let start = Instant::now();
    let _shown = ShowOnPanic;
    let value = step.await;
    println!("{what}: {:.1} s", start.elapsed().as_secs_f64());
    value
}

/// Prints what an operator would look at first.
struct ShowOnPanic;

impl Drop for ShowOnPanic {
    fn drop(&mut self) {
        let xtask = std::env::var_os("ARMATURE_XTASK").filter(|_| std::thread::panicking());
        let Some(xtask) = xtask else { return };
        for words in [
            "kubectl get md,wp,dwm,pods,services --all-namespaces --output wide",
            "kubectl get events --all-namespaces --field-selector type=Warning --sort-by .lastTimestamp",
            "kubectl logs --namespace armature-system --selector app.kubernetes.io/name=armature --tail 20",
            "kubectl logs --namespace demo --selector armature.dev/deployment --prefix --tail 10",
        ] {
            let shown = std::process::Command::new(&xtask).args(["cluster", "in"]).args(words.split(' ')).output();
            let text = shown.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
            println!("\n$ {words}\n{}", String::from_utf8_lossy(&text));
        }
    }
}

async fn install() -> Service {
    let start = Instant::now();
    inside(&["helm", "install", "armature", "helm/armature", "--namespace", SYSTEM, "--create-namespace"], "")
        .await
        .expect("installed");
    let object =
        deployment("chat", "{replicas: 2}", "[{name: worker, replicas: 2, terminationGracePeriodSeconds: 30}]");
    until("the definition of ModelDeployment", ROLLOUT, || async { apply(&object).await }).await;
    let answer = until("a streamed answer through the Service", ROLLOUT, || async {
        let service = Service::find(DEMO, "chat").await?;
        let answer = service.chat("chat", &[message("user", "Hi")], 1).await?;
        anyhow::Ok((service, answer, start.elapsed()))
    });
    let (service, answer, took) = answer.await;
    assert!(!answer.finish_reason.is_empty());
    println!("first token {:.1} s after helm install", took.as_secs_f64());
    assert!(took <= FIRST_TOKEN, "{took:?}");
    kubectl(&["wait", "md/chat", "--namespace", DEMO, "--for", "condition=Ready", "--timeout", "90s"])
        .await
        .expect("ready");
    service
}

async fn conversations(chat: &Service) {
    // At the same time, so that load spreads them.
    let turn = |number| async move {
        let mut messages = story(number);
        let first = chat.chat("chat", &messages, 8).await.expect("first turn");
        messages.extend([message("assistant", &first.text), message("user", "And what was the price?")]);
        (first.worker, messages)
    };
    let conversations = futures::future::join_all((1..=6).map(turn)).await;
    let workers: BTreeSet<_> = conversations.iter().map(|(worker, _)| worker).collect();
    assert_eq!(workers.len(), 2, "conversations are spread over both workers");
    for (worker, messages) in &conversations {
        // Two routers see the first turn's blocks a moment after it ended.
        let second = until("the second turn on the first one's worker", Duration::from_secs(20), || async {
            let second = chat.chat("chat", messages, 2).await.map_err(|error| error.to_string())?;
            if second.worker == *worker { Ok(second) } else { Err(format!("{worker} then {}", second.worker)) }
        });
        assert!(second.await.cached_tokens() >= 96, "the story has more than six blocks");
    }
}

/// Requests, so many at a time, until `step` is done; none may fail. No two prompts share a block.
async fn under_traffic<T>(service: &Service, model: &str, at_once: usize, step: impl Future<Output = T>) -> (T, usize) {
    const FIRST: usize = 10_000;
    let (done, begun) = (AtomicBool::new(false), AtomicUsize::new(0));
    let client = async || {
        while !done.load(Relaxed) {
            let number = FIRST + begun.fetch_add(1, Relaxed);
            service.chat(model, &story(number), 4).await.expect("every request is answered");
        }
    };
    let traffic = futures::future::join_all((0..at_once).map(|_| client()));
    let step = async {
        let value = step.await;
        done.store(true, Relaxed);
        value
    };
    let (_, value) = tokio::join!(traffic, step);
    (value, begun.into_inner())
}

/// Routers keep their last good view; that their watches recover shows in the next step, which needs a new worker seen.
async fn lost_api_server(chat: &Service) {
    let deaths = async {
        for _ in 0..3 {
            inside(&["sh", "-c", "kill -KILL $(pidof kube-apiserver)"], "").await.expect("killed");
            until("the API server", ROLLOUT, || kubectl(&["get", "--raw=/readyz"])).await;
        }
    };
    let ((), answered) = under_traffic(chat, "chat", 1, deaths).await;
    println!("{answered} requests answered meanwhile");
    // Every watch of the operator has failed three times, and yet it is back at work within seconds: it repairs what it owns.
    kubectl(&["delete", "service", "chat-router", "--namespace", DEMO]).await.expect("deleted");
    let repaired = || kubectl(&["get", "service", "chat-router", "--namespace", DEMO]);
    until("the operator's repair", Duration::from_secs(30), repaired).await;
}

async fn deleted_worker(chat: &Service) {
    let workers = "armature.dev/deployment=chat,armature.dev/pool=worker";
    let before = ready_pods(DEMO, workers).await.expect("listed");
    let victim = before.first().expect("two workers").clone();
    let replaced = async {
        kubectl(&["delete", "pod", &victim, "--namespace", DEMO, "--wait=false"]).await.expect("deleted");
        until("a new worker pod", ROLLOUT, || async {
            let now = ready_pods(DEMO, workers).await?;
            let fresh = now.len() == 2 && !now.contains(&victim);
            if fresh { Ok(now) } else { Err(anyhow::anyhow!("{now:?}")) }
        })
        .await
    };
    let (pods, answered) = under_traffic(chat, "chat", 1, replaced).await;
    println!("{answered} requests answered meanwhile");
    let fresh = pods.into_iter().find(|pod| !before.contains(pod)).expect("a new one");
    let number = AtomicUsize::new(100);
    until("an answer from the new worker", ROLLOUT, || async {
        let first = number.fetch_add(4, Relaxed);
        let stories: Vec<_> = (first..first + 4).map(story).collect();
        let answers = futures::future::join_all(stories.iter().map(|story| chat.chat("chat", story, 8))).await;
        let workers: Vec<_> = answers.into_iter().flatten().map(|answer| answer.worker).collect();
        if workers.contains(&fresh) { Ok(()) } else { Err(anyhow::anyhow!("{workers:?} answered")) }
    })
    .await;
}

async fn deleted_router(chat: &Service) {
    let routers = "armature.dev/deployment=chat,!armature.dev/pool";
    let before = ready_pods(DEMO, routers).await.expect("listed");
    assert_eq!(before.len(), 2, "{before:?}");
    kubectl(&["delete", "pod", &before[0], "--namespace", DEMO]).await.expect("deleted");
    until("a new router pod", ROLLOUT, || async {
        let now = ready_pods(DEMO, routers).await?;
        if now.len() == 2 && !now.contains(&before[0]) { Ok(()) } else { Err(anyhow::anyhow!("{now:?}")) }
    })
    .await;
    // kube-proxy watches again only after a pause that grows with each death of the API server.
    until("the Service leads to these two", ROLLOUT, || async {
        let pods = addresses(routers).await?;
        let led_to = chat.leads_to().await?;
        if led_to == pods { Ok(()) } else { Err(anyhow::anyhow!("{led_to:?}, not {pods:?}")) }
    })
    .await;
    // A router is ready only with a view of the workers.
    for _ in 0..6 {
        chat.chat("chat", &[message("user", "Hi")], 1).await.expect("both routers answer");
    }
}

/// Every worker pod is replaced by one with other settings, under steady traffic.
async fn rollout(chat: &Service) {
    let workers = "armature.dev/deployment=chat,armature.dev/pool=worker";
    let before = ready_pods(DEMO, workers).await.expect("listed");
    let pool = r#"{"name": "worker", "replicas": 2, "terminationGracePeriodSeconds": 30, "engine": {"builtIn": {"kvBlocks": 2048}}}"#;
    let patch = format!(r#"{{"spec": {{"pools": [{pool}]}}}}"#);
    let rolled = async {
        kubectl(&["patch", "md", "chat", "--namespace", DEMO, "--type", "merge", "--patch", &patch])
            .await
            .expect("patched");
        until("two new workers and none of the old", ROLLOUT, || async {
            let all = objects(DEMO, "pods", workers).await?;
            let ready = ready_pods(DEMO, workers).await?;
            let fresh = all.len() == 2 && ready.len() == 2 && ready.iter().all(|pod| !before.contains(pod));
            if fresh { Ok(()) } else { Err(anyhow::anyhow!("{} pods, ready {ready:?}", all.len())) }
        })
        .await;
    };
    let ((), answered) = under_traffic(chat, "chat", 1, rolled).await;
    println!("{answered} requests answered meanwhile");
}

async fn scale(chat: &Service) {
    kubectl(&["scale", "workerpool/chat-worker", "--namespace", DEMO, "--replicas", "3"]).await.expect("scaled");
    until("three workers in the status", ROLLOUT, || async {
        let status =
            kubectl(&["get", "md", "chat", "--namespace", DEMO, "--output", "jsonpath={.status.workers}"]).await?;
        if status == "3/3" { Ok(()) } else { Err(anyhow::anyhow!("{status}")) }
    })
    .await;
    let (_, answered) = under_traffic(chat, "chat", 1, async {
        kubectl(&["scale", "workerpool/chat-worker", "--namespace", DEMO, "--replicas", "1"]).await.expect("scaled");
        until("one registration", ROLLOUT, || async {
            let registrations = objects(DEMO, "dynamoworkermetadatas", "").await?;
            if registrations.len() == 1 { Ok(()) } else { Err(anyhow::anyhow!("{}", registrations.len())) }
        })
        .await;
    })
    .await;
    println!("{answered} requests answered while two workers left");
}

async fn second_deployment(chat: &Service) {
    apply(&deployment("other", "{replicas: 1}", "[]")).await.expect("applied");
    let other = until("an answer of the second deployment", ROLLOUT, || async {
        let service = Service::find(DEMO, "other").await?;
        let answer = service.chat("other", &[message("user", "Hi")], 1).await?;
        anyhow::Ok((service, answer))
    });
    let (other, answer) = other.await;
    let theirs = ready_pods(DEMO, "armature.dev/deployment=other,armature.dev/pool").await.expect("listed");
    assert!(theirs.contains(&answer.worker), "{answer:?}, {theirs:?}");
    for (service, own, foreign) in [(chat, "chat", "other"), (&other, "other", "chat")] {
        let models = service.get("/v1/models").await.expect("listed");
        assert!(models.contains(&format!("{own:?}")) && !models.contains(&format!("{foreign:?}")), "{models}");
        let error = service.chat(foreign, &[message("user", "Hi")], 1).await.expect_err("not served here");
        assert!(error.to_string().contains("404"), "{error}");
    }
}

/// One prefill and two decode workers: KV goes from node to node, and the prefill worker can be spared for a while.
async fn halves() {
    let pools = "[{name: prefill, role: prefill, terminationGracePeriodSeconds: 30}, \
                 {name: decode, role: decode, replicas: 2, terminationGracePeriodSeconds: 30}]";
    apply(&deployment("halves", "{replicas: 1}", pools)).await.expect("applied");
    kubectl(&["wait", "md/halves", "--namespace", DEMO, "--for", "condition=Ready", "--timeout", "90s"])
        .await
        .expect("ready");
    let service = Service::find(DEMO, "halves").await.expect("a Service");
    let prefill = "armature.dev/deployment=halves,armature.dev/pool=prefill";
    let decode = "armature.dev/deployment=halves,armature.dev/pool=decode";
    let number = AtomicUsize::new(200);
    until("KV on another node than where it was computed", ROLLOUT, || async {
        let first = number.fetch_add(4, Relaxed);
        let stories: Vec<_> = (first..first + 4).map(story).collect();
        let answers = stories.iter().map(|story| service.chat("halves", story, 8));
        futures::future::try_join_all(answers).await?;
        let source = placed(prefill).await?;
        for (pod, node) in placed(decode).await? {
            let received =
                worker_metric(&pod, "armature_worker_kv_transfer_received_bytes_total{transport=\"tcp\"}").await?;
            if received > 0.0 && source.iter().all(|(_, other)| *other != node) {
                println!("{received} bytes of KV from {source:?} to {pod} on {node}");
                return Ok(());
            }
        }
        Err(anyhow::anyhow!("only from {source:?}"))
    })
    .await;
    let remote = || async {
        let page = service.get("/metrics").await?;
        let line =
            page.lines().find_map(|line| line.strip_prefix("armature_router_prefills_total{reason=\"remote\"} "));
        anyhow::Ok(line.context("no prompt was computed elsewhere")?.parse::<u64>()?)
    };
    let before = ready_pods(DEMO, prefill).await.expect("listed");
    let replaced = async {
        kubectl(&["delete", "pod", &before[0], "--namespace", DEMO, "--wait=false"]).await.expect("deleted");
        until("another prefill worker", ROLLOUT, || async {
            let now = ready_pods(DEMO, prefill).await?;
            if now.len() == 1 && now != before { Ok(()) } else { Err(anyhow::anyhow!("{now:?}")) }
        })
        .await;
        let counted = remote().await.expect("counted");
        until("prompts on the new prefill worker", ROLLOUT, || async {
            let now = remote().await?;
            if now > counted { Ok(()) } else { Err(anyhow::anyhow!("{now} as before")) }
        })
        .await;
    };
    let ((), answered) = under_traffic(&service, "halves", 8, replaced).await;
    println!("{answered} requests answered meanwhile");
}

/// Addresses of pods.
async fn addresses(selector: &str) -> anyhow::Result<BTreeSet<String>> {
    let pods = objects(DEMO, "pods", selector).await?;
    Ok(pods.iter().filter_map(|pod| Some(pod["status"]["podIP"].as_str()?.to_owned())).collect())
}

/// Name and node of each pod.
async fn placed(selector: &str) -> anyhow::Result<Vec<(String, String)>> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let pods = objects(DEMO, "pods", selector).await?;
    Ok(pods.iter().map(|pod| (text(&pod["metadata"]["name"]), text(&pod["spec"]["nodeName"]))).collect())
}

/// A counter of a worker pod; 0 where it does not show it.
async fn worker_metric(pod: &str, name: &str) -> anyhow::Result<f64> {
    let page = kubectl(&["get", "--raw", &format!("/api/v1/namespaces/{DEMO}/pods/{pod}:9090/proxy/metrics")]).await?;
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Ok(value.map(str::parse).transpose()?.unwrap_or(0.0))
}

async fn uninstall(before: &BTreeSet<String>) {
    kubectl(&["delete", "md", "--all", "--namespace", DEMO, "--timeout", "90s"]).await.expect("deleted");
    until("the end of what the operator made", ROLLOUT, || async {
        let left = left_of(DEMO).await?;
        if left.is_empty() { Ok(()) } else { Err(anyhow::anyhow!("{left:?}")) }
    })
    .await;
    inside(&["helm", "uninstall", "armature", "--namespace", SYSTEM, "--wait"], "").await.expect("uninstalled");
    until("the end of what the chart made", ROLLOUT, || async {
        let mut left = left_of(SYSTEM).await?;
        left.extend(inventory().await.difference(before).cloned());
        if left.is_empty() { Ok(()) } else { Err(anyhow::anyhow!("{left:?}")) }
    })
    .await;
}

/// Everything in a namespace that Kubernetes did not put there itself.
async fn left_of(namespace: &str) -> anyhow::Result<Vec<String>> {
    let mut kinds = "deployments,replicasets,pods,services,endpointslices,serviceaccounts,roles,rolebindings,configmaps,secrets,leases".to_owned();
    let definitions = kubectl(&["get", "crds", "--output", "name"]).await?;
    for kind in ["workerpools.armature.dev", "modeldeployments.armature.dev", "dynamoworkermetadatas.nvidia.com"] {
        if definitions.contains(kind) {
            kinds = format!("{kinds},{kind}");
        }
    }
    let names = kubectl(&["get", &kinds, "--namespace", namespace, "--output", "name"]).await?;
    let own = ["serviceaccount/default", "configmap/kube-root-ca.crt"];
    Ok(names.lines().filter(|name| !own.contains(name)).map(str::to_owned).collect())
}

/// Cluster-wide objects an installation makes.
async fn inventory() -> BTreeSet<String> {
    let kinds = "clusterroles,clusterrolebindings,validatingwebhookconfigurations,mutatingwebhookconfigurations,priorityclasses";
    let names = kubectl(&["get", kinds, "--output", "name"]).await.expect("listed");
    names.lines().map(str::to_owned).collect()
}

/// A claim `models` on the folder that the model is in.
fn model_volume(model: &Path) -> String {
    let folder = model.parent().expect("a file has a folder").display();
    format!(
        "apiVersion: v1
kind: PersistentVolume
metadata: {{name: models}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadOnlyMany]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ''
  claimRef: {{namespace: {DEMO}, name: models}}
  hostPath: {{path: '{folder}'}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: models, namespace: {DEMO}}}
spec:
  accessModes: [ReadOnlyMany]
  storageClassName: ''
  volumeName: models
  resources: {{requests: {{storage: 1Gi}}}}
"
    )
}

fn deployment(name: &str, router: &str, pools: &str) -> String {
    let file = model();
    let file = file.file_name().expect("a file has a name").display();
    format!(
        "apiVersion: armature.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: {name}, namespace: {DEMO}}}
spec:
  model: {{source: 'pvc://models/{file}'}}
  router: {router}
  pools: {pools}
"
    )
}
