//! What the API server cannot check: rules that depend on this operator's settings. The result is proof of it.

use crds::ModelDeployment;
use crds::model_deployment::Pool;
use crds::source::Source;
use crds::worker_pool::{Role, WorkerTemplate};
use kube::{Resource, ResourceExt};

use crate::build::server;
use crate::config::Settings;

/// Why an object cannot be carried out. Its author has to change it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// The source is not understood.
    #[error("spec.model.source: {0}")]
    Source(#[from] crds::source::InvalidSource),
    /// The operator may not mount this path of a node.
    #[error(
        "spec.model.source: {path} is not below a directory that the operator may mount from nodes ({allowed}); see its flag --host-model-path"
    )]
    HostPath {
        /// The path asked for.
        path: String,
        /// The allowed directories, or `none`.
        allowed: String,
    },
    /// Servers read directories of the Hugging Face layout.
    #[error(
        "spec.model.source names one file; vLLM, SGLang and TensorRT-LLM read the directory of a model, with config.json and tokenizer.json in it"
    )]
    OneFile,
    /// It would part a server from its worker.
    #[error(
        "{argument} of {engine} cannot be set: the operator sets up what is between {engine} and its worker, and each worker is one rank"
    )]
    EngineArgument {
        /// Whose it is.
        engine: &'static str,
        /// An argument, a variable, or an option.
        argument: String,
    },
    /// An object without a namespace or UID did not come from an API server.
    #[error("the object has no {0}")]
    Incomplete(&'static str),
}

impl Invalid {
    /// Reason for conditions, events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Source(_) | Self::OneFile => "InvalidSource",
            Self::EngineArgument { .. } => "InvalidEngine",
            Self::HostPath { .. } => "HostPathNotAllowed",
            Self::Incomplete(_) => "InvalidObject",
        }
    }
}

/// A deployment that can be built: defaults filled in, source understood and allowed.
#[derive(Clone, Debug)]
pub struct ValidDeployment<'a> {
    /// The object.
    pub object: &'a ModelDeployment,
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// What clients put into `model`.
    pub model_name: String,
    /// Its pools, never empty.
    pub pools: Vec<Pool>,
}

/// Checks a deployment and fills in what its author left out.
pub fn deployment<'a>(object: &'a ModelDeployment, settings: &Settings) -> Result<ValidDeployment<'a>, Invalid> {
    let namespace = object.namespace().ok_or(Invalid::Incomplete("namespace"))?;
    object.meta().uid.as_ref().ok_or(Invalid::Incomplete("UID"))?;
    let source = source(&object.spec.model.source, settings)?;
    for pool in &object.spec.pools {
        if let Some(kind) = pool.worker.engine.as_ref().and_then(server::Kind::of) {
            directory(&source)?;
            kind.check(&pool.worker)?;
        }
    }
    let name = object.name_any();
    let pools = match object.spec.pools.as_slice() {
        [] => vec![Pool {
            name: "worker".into(),
            role: Role::Aggregated,
            replicas: None,
            worker: WorkerTemplate::default(),
        }],
        pools => pools.to_vec(),
    };
    let model_name = object.spec.model.name.clone().unwrap_or_else(|| name.clone());
    Ok(ValidDeployment { object, name, namespace, model_name, pools })
}

/// Parses a source and checks that this operator may mount it.
pub fn source(source: &str, settings: &Settings) -> Result<Source, Invalid> {
    let source = Source::parse(source)?;
    if let Source::Node(path) = &source
        && !settings.host_model_paths.iter().any(|allowed| is_below(path, allowed))
    {
        let allowed = match settings.host_model_paths.as_slice() {
            [] => "none".into(),
            paths => paths.join(", "),
        };
        return Err(Invalid::HostPath { path: path.clone(), allowed });
    }
    Ok(source)
}

/// Checks that a source can be a directory of the Hugging Face layout: what servers read.
pub fn directory(source: &Source) -> Result<(), Invalid> {
    let file = match source {
        Source::Hub(id) => id.matches('/').count() != 1 || id.ends_with(".gguf"),
        Source::Claim { path, .. } | Source::Node(path) => path.ends_with(".gguf"),
    };
    if file { Err(Invalid::OneFile) } else { Ok(()) }
}

/// Whether `path` lies strictly below `directory`. Neither holds `..`: [`Source::parse`] refuses it.
fn is_below(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory.trim_end_matches('/')).is_some_and(|rest| rest.starts_with('/') && rest.len() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_paths_must_lie_below_an_allowed_directory() {
        let settings = |paths: &[&str]| Settings {
            image: String::new(),
            image_pull_policy: String::new(),
            image_pull_secrets: Vec::new(),
            host_model_paths: paths.iter().map(|p| p.to_string()).collect(),
        };
        assert!(source("file:///models/x.gguf", &settings(&["/models"])).is_ok());
        assert!(source("file:///models/x.gguf", &settings(&["/data", "/models/"])).is_ok());
        for (path, allowed) in
            [("file:///models-private/x", "/models"), ("file:///etc/shadow", "/models"), ("file:///models/", "/models")]
        {
            assert!(matches!(source(path, &settings(&[allowed])), Err(Invalid::HostPath { .. })), "{path}");
        }
        let refused = source("file:///models/x", &settings(&[])).expect_err("nothing is allowed");
        assert!(refused.to_string().contains("(none)"), "{refused}");
    }

    #[test]
    fn one_file_is_no_directory() {
        let check = |source| directory(&Source::parse(source).expect("a source"));
        for good in ["hf://org/name", "hf://org/name@v1.0", "pvc://claim/models/llama", "file:///models/llama"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["hf://org/name/x.gguf", "hf://org/name@main/x.gguf", "pvc://claim/x.gguf", "file:///models/x.gguf"]
        {
            assert_eq!(check(bad), Err(Invalid::OneFile), "{bad}");
        }
    }
}
