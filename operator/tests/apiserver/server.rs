//! A namespace of its own on the API server, and operators that act in it.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use crds::{ModelDeployment, WorkerPool};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use operator::context::Context;
use operator::metrics::Metrics;
use operator::{Config, OperatorError, Settings};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Longest wait for anything. The garbage collector may first have to learn of definitions that have just been applied.
const DEADLINE: Duration = Duration::from_secs(120);

/// A namespaced object.
pub trait Object:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + Serialize + DeserializeOwned
{
}

impl<K> Object for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + Serialize + DeserializeOwned
{
}

pub struct Server {
    pub client: Client,
    pub namespace: String,
    pub context: Arc<Context>,
}

impl Server {
    /// Applies the definitions and makes a namespace.
    pub async fn start(name: &str) -> Self {
        let client = Client::try_default().await.expect("KUBECONFIG names a cluster");
        let definitions = Api::all(client.clone());
        for crd in crds::all() {
            let apply = PatchParams::apply("tests").force();
            let name = crd.name_any();
            definitions.patch(&name, &apply, &Patch::Apply(&crd)).await.expect("applied");
            let established = kube::runtime::conditions::is_crd_established();
            let wait = kube::runtime::wait::await_condition(definitions.clone(), &name, established);
            tokio::time::timeout(DEADLINE, wait).await.expect("in time").expect("established");
        }
        let namespace = format!("op-{name}-{}", std::process::id());
        let object = Namespace {
            metadata: kube::api::ObjectMeta { name: Some(namespace.clone()), ..Default::default() },
            ..Default::default()
        };
        Api::all(client.clone()).create(&PostParams::default(), &object).await.expect("created");
        let settings = Settings {
            image: "armature:test".into(),
            image_pull_policy: "Never".into(),
            image_pull_secrets: Vec::new(),
            host_model_paths: vec!["/models".into()],
        };
        let context = Arc::new(Context::new(client.clone(), settings, Metrics::default(), "tests".into()));
        Self { client, namespace, context }
    }

    pub async fn stop(self) {
        let namespaces: Api<Namespace> = Api::all(self.client);
        namespaces.delete(&self.namespace, &DeleteParams::background()).await.expect("deleted");
    }

    pub fn api<K: Object>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates a ModelDeployment as `kubectl create` does: unknown fields are refused.
    pub async fn create(&self, name: &str, spec: &Value) -> Result<(), kube::Error> {
        let path = format!("{}?fieldValidation=Strict", ModelDeployment::url_path(&(), Some(&self.namespace)));
        let body = serde_json::to_vec(&object(name, spec)).expect("serializable");
        let request = axum::http::Request::post(path).header("content-type", "application/json").body(body);
        self.client.request::<Value>(request.expect("a valid request")).await.map(|_| ())
    }

    /// Replaces the spec as `kubectl replace` does.
    pub async fn replace(&self, name: &str, spec: &Value) {
        let mut object = self.deployment(name).await;
        object.spec = serde_json::from_value(spec.clone()).expect("a spec");
        object.metadata.managed_fields = None;
        self.api::<ModelDeployment>().replace(name, &PostParams::default(), &object).await.expect("replaced");
    }

    pub async fn deployment(&self, name: &str) -> ModelDeployment {
        self.api().get(name).await.expect("there")
    }

    pub async fn pool(&self, name: &str) -> WorkerPool {
        self.api().get(name).await.expect("there")
    }

    /// The Deployment, once its controller has seen its newest spec.
    pub async fn settled(&self, name: &str) -> Deployment {
        let api = self.api::<Deployment>();
        self.until("the Deployment is observed", async || {
            let deployment = api.get(name).await.expect("there");
            let desired = deployment.spec.as_ref().and_then(|spec| spec.replicas);
            let status = deployment.status.unwrap_or_default();
            status.observed_generation == deployment.metadata.generation && status.replicas == desired
        })
        .await;
        api.get(name).await.expect("there")
    }

    pub async fn gone<K: Object>(&self, name: &str) {
        let api = self.api::<K>();
        self.until("the object is gone", async || api.get_metadata_opt(name).await.expect("answers").is_none()).await;
    }

    /// The cells that `kubectl get` prints for one object.
    pub async fn table<K: Object>(&self, name: &str) -> Value {
        let path = format!("{}/{name}", K::url_path(&(), Some(&self.namespace)));
        let request = http_get(&path);
        let answer: Value = self.client.request(request).await.expect("a table");
        answer["rows"][0]["cells"].clone()
    }

    /// Asks again and again until `holds`; the API offers no single watch for what is asked here.
    pub async fn until(&self, what: &str, mut holds: impl AsyncFnMut() -> bool) {
        let asked = async {
            let mut tick = tokio::time::interval(Duration::from_millis(50));
            loop {
                tick.tick().await;
                if holds().await {
                    return;
                }
            }
        };
        tokio::time::timeout(DEADLINE, asked).await.unwrap_or_else(|_| panic!("not in time: {what}"));
    }

    /// Starts an operator for this namespace.
    pub async fn operator(&self, identity: &str, lease_seconds: u16) -> Running {
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            config: Config,
        }
        let (lease, namespace) = (lease_seconds.to_string(), self.namespace.as_str());
        let flags = [
            "operator",
            "--image",
            "armature:test",
            "--namespace",
            namespace,
            "--lease-namespace",
            namespace,
            "--lease-seconds",
            &lease,
            "--identity",
            identity,
        ];
        let config = Cli::parse_from(flags).config;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(operator::run_with(self.client.clone(), config, listener, shutdown.clone()));
        Running { address, shutdown, task }
    }
}

/// An operator in this process.
pub struct Running {
    address: SocketAddr,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), OperatorError>>,
}

impl Running {
    pub async fn leads(&self) -> bool {
        let mut stream = TcpStream::connect(self.address).await.expect("listens");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.expect("written");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("read");
        answer.contains("\narmature_operator_leader 1\n")
    }

    pub async fn stop(self) -> Result<(), OperatorError> {
        self.shutdown.cancel();
        tokio::time::timeout(DEADLINE, self.task).await.expect("ends in time").expect("does not panic")
    }
}

fn object(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "armature.dev/v1alpha1", "kind": "ModelDeployment", "metadata": {"name": name}, "spec": spec})
}

fn http_get(path: &str) -> axum::http::Request<Vec<u8>> {
    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io";
    axum::http::Request::get(path).header("accept", accept).body(Vec::new()).expect("a valid request")
}
