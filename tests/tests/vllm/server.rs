//! A vLLM process, bound to a core, with KV events and the connector that moves KV.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use integration_tests::process::{children_of, kill_group, required};
use integration_tests::system::{free_port, sum};

use super::*;

/// Loading the model, on a machine that is busy with other things.
const START: Duration = Duration::from_secs(600);

/// A server; killed with all its processes when dropped, and its log shown if the test fails.
pub struct Vllm {
    process: Child,
    /// Where it answers.
    pub url: String,
    /// Where it publishes its KV events, as an agent is told.
    pub events: String,
    log: tempfile::NamedTempFile,
}

impl Drop for Vllm {
    fn drop(&mut self) {
        kill_group(&mut self.process);
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.log.path()).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            println!("--- {}\n{}", self.url, lines[lines.len().saturating_sub(60)..].join("\n"));
        }
    }
}

impl Vllm {
    /// Starts the server on this core, and waits until it is ready. The first one connects to whoever wants its events, the second
    /// one is connected to.
    pub async fn start(core: usize) -> Self {
        let [port, events, replay, side_channel] = [(); 4].map(|()| free_port());
        let log = tempfile::NamedTempFile::new().expect("a file");
        let (publish, events) = match core {
            0 => (format!("tcp://127.0.0.1:{events}"), format!("tcp://*:{events}")),
            _ => (format!("tcp://*:{events}"), format!("tcp://127.0.0.1:{events}")),
        };
        let replay = format!("tcp://127.0.0.1:{replay}");
        let publisher = json!({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": publish,
            "replay_endpoint": replay, "topic": "kv-events"});
        let role = if core == 0 { "kv_producer" } else { "kv_consumer" };
        let transfer = json!({"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"});
        let mut command = Command::new("taskset");
        command.args(["--cpu-list", &core.to_string()]).arg(required("ARMATURE_VLLM")).arg("serve");
        command.arg(required("ARMATURE_VLLM_MODEL")).args(["--served-model-name", MODEL, "--host", "127.0.0.1"]);
        command.args(["--port", &port.to_string(), "--max-model-len", "2048", "--dtype", "bfloat16"]);
        command.args(["--enforce-eager", "--block-size", &BLOCK.to_string(), "--enable-prompt-tokens-details"]);
        command.args(["--kv-events-config", &publisher.to_string(), "--kv-transfer-config", &transfer.to_string()]);
        let core = core.to_string();
        command.envs([
            ("VLLM_CPU_KVCACHE_SPACE", "1"),
            ("VLLM_CPU_OMP_THREADS_BIND", core.as_str()),
            ("VLLM_TARGET_DEVICE", "cpu"),
            ("VLLM_HOST_IP", "127.0.0.1"),
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT", side_channel.to_string().as_str()),
            ("UCX_TLS", "tcp,self,sm"),
            ("UCX_NET_DEVICES", "lo"),
            ("HF_HUB_OFFLINE", "1"),
            ("TRANSFORMERS_OFFLINE", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("PYTHONHASHSEED", "0"),
        ]);
        let out = || Stdio::from(log.reopen().expect("open"));
        command.stdin(Stdio::null()).stdout(out()).stderr(out()).process_group(0);
        let process = command.spawn().expect("taskset and vLLM are installed");
        let url = format!("http://127.0.0.1:{port}");
        let mut server = Self { process, url, events: format!("{events};replay={replay}"), log };
        until("a vLLM that is ready", START, || server.look()).await;
        server
    }

    fn look(&mut self) -> impl Future<Output = anyhow::Result<()>> + use<> {
        let ended = self.process.try_wait();
        let router = Router::new(&self.url);
        async move {
            assert!(ended?.is_none(), "vLLM ended");
            let (status, _, _) = router.send(Method::GET, "/health", None).await?;
            if status == StatusCode::OK { Ok(()) } else { anyhow::bail!("{status}") }
        }
    }

    /// The process that computes; another one answers.
    pub fn engine(&self) -> u32 {
        let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let children = children_of(self.process.id()).expect("it runs");
        children.into_iter().find(|pid| name(*pid).starts_with("VLLM::EngineCore")).expect("an engine")
    }

    /// Sum of the samples of a metric whose names begin so.
    pub async fn metric(&self, name: &str) -> f64 {
        let (_, _, page) = Router::new(&self.url).send(Method::GET, "/metrics", None).await.expect("metrics");
        sum(&page, &format!("vllm:{name}"))
    }
}
