//! Settings of the operator, from flags and environment.

use std::net::SocketAddr;
use std::time::Duration;

/// Settings of `armature operator`.
#[derive(Clone, Debug, clap::Args)]
pub struct Config {
    /// Address of /healthz, /readyz and /metrics.
    #[arg(long, default_value = "0.0.0.0:8081", env = "ARMATURE_OPERATOR_LISTEN")]
    pub listen: SocketAddr,

    /// Image of router and worker pods, where an object names none.
    #[arg(long, env = "ARMATURE_IMAGE")]
    pub image: String,

    /// When that image is pulled, where an object does not say.
    #[arg(long, env = "ARMATURE_IMAGE_PULL_POLICY", default_value = "IfNotPresent",
          value_parser = ["Always", "IfNotPresent", "Never"])]
    pub image_pull_policy: String,

    /// Secret by which that image is pulled, in the namespace of each object. May be given several times.
    #[arg(long = "image-pull-secret", env = "ARMATURE_IMAGE_PULL_SECRETS", value_delimiter = ',')]
    pub image_pull_secrets: Vec<String>,

    /// Namespace to watch; all of them where missing.
    #[arg(long, env = "ARMATURE_WATCH_NAMESPACE")]
    pub namespace: Option<String>,

    /// Directory on nodes below which file:// models may lie. May be given several times; none allows no file:// model.
    #[arg(long = "host-model-path", env = "ARMATURE_HOST_MODEL_PATHS", value_delimiter = ',')]
    pub host_model_paths: Vec<String>,

    /// Name of the Lease that elects the one active operator.
    #[arg(long, default_value = "armature-operator")]
    pub lease_name: String,

    /// Namespace of that Lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    pub lease_namespace: String,

    /// Seconds after which a Lease that is not renewed may be taken; leadership is given up at two thirds of it.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(3..=600))]
    pub lease_seconds: u16,

    /// Name of this operator in the Lease [default: host name and process id]
    #[arg(long, env = "POD_NAME", default_value_t = default_identity(), hide_default_value = true)]
    pub identity: String,
}

impl Config {
    /// What the operator puts into pods.
    pub fn settings(&self) -> Settings {
        // An empty variable is one empty value.
        let given = |values: &[String]| values.iter().filter(|value| !value.is_empty()).cloned().collect();
        Settings {
            image: self.image.clone(),
            image_pull_policy: self.image_pull_policy.clone(),
            image_pull_secrets: given(&self.image_pull_secrets),
            host_model_paths: given(&self.host_model_paths),
        }
    }

    /// How long the Lease lasts without renewal.
    pub fn lease_duration(&self) -> Duration {
        Duration::from_secs(self.lease_seconds.into())
    }
}

/// The settings that objects are built with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Default image.
    pub image: String,
    /// Default pull policy.
    pub image_pull_policy: String,
    /// Names of Secrets of every pod, to pull its image by.
    pub image_pull_secrets: Vec<String>,
    /// Absolute directories on nodes from which models may be mounted.
    pub host_model_paths: Vec<String>,
}

/// Unique among processes of one host; pods set `POD_NAME`.
fn default_identity() -> String {
    let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "local".into());
    format!("{host}-{}", std::process::id())
}
