//! The command line. Flags of a component belong to its library; here is only what ties them into one binary.

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::explain::Explain;
use crate::up::Up;

/// Serves large language models on Kubernetes, or on this machine.
#[derive(Parser)]
#[command(name = "armature", version, propagate_version = true)]
pub struct Armature {
    /// What to run.
    #[command(subcommand)]
    pub command: Command,
    /// How log lines look; what is logged is set by RUST_LOG
    #[arg(
        long, global = true, value_enum, default_value_t = LogFormat::Text, env = "ARMATURE_LOG_FORMAT",
        help_heading = "Flags of every command"
    )]
    pub log_format: LogFormat,
}

/// Format of log lines.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A component, or everything at once.
#[derive(Subcommand)]
pub enum Command {
    /// Reconciles ModelDeployments in a Kubernetes cluster
    Operator(operator::config::Config),
    /// Serves the OpenAI API and sends requests to workers
    Router(Box<router::config::Config>),
    /// Runs an engine and makes it known to routers
    Worker(Box<WorkerArgs>),
    /// Serves a model on this machine: one router and some workers, until Ctrl-C
    Up(Up),
    /// Gets a model's file, unless it is here, and prints its path
    Model {
        /// GGUF file, Hugging Face repository (org/name, hf://org/name@rev/file.gguf) or `default`
        #[arg(default_value = "default")]
        model: String,
    },
    /// Asks a router where a request would go, or why one went where it did
    Explain(Explain),
    /// Prints the Kubernetes definitions, for `kubectl apply -f -`
    Crds,
    /// Prints a page of the reference documentation
    #[command(hide = true)]
    Reference {
        /// Which page.
        #[arg(value_enum)]
        what: crate::reference::Page,
    },
}

impl Command {
    /// What is logged when RUST_LOG does not say.
    pub fn default_log_filter(&self) -> &'static str {
        match self {
            // zeromq warns at every attempt to reach a worker that has gone; discovery says so once.
            Self::Up(_) => "warn,zeromq=error",
            _ => "info,zeromq=error",
        }
    }
}

/// A worker: the agent's flags, and the model that its engine opens.
#[derive(Args, Clone, Debug)]
pub struct WorkerArgs {
    /// GGUF file, Hugging Face repository (org/name, hf://org/name@rev/file.gguf) or `default`
    #[arg(long, default_value = "default")]
    pub model: String,
    /// Process id of the process that started it; ends when that one does
    #[arg(long, hide = true)]
    pub with_parent: Option<i32>,
    /// The agent.
    #[command(flatten)]
    pub agent: worker_agent::config::Config,
}

impl WorkerArgs {
    /// With `--with-parent`, asks the kernel to kill us when the parent dies, however it dies: the only router that knows us, and
    /// our entry in its discovery directory, are gone with it. Only Linux can.
    pub fn follow_parent(&self) {
        #[cfg(target_os = "linux")]
        if let Some(expected) = self.with_parent {
            use rustix::process::{Signal, getppid, set_parent_process_death_signal};
            if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
                tracing::warn!(%error, "this worker will outlive its parent");
            }
            // A parent that died before the call above sends nothing; somebody else is the parent then.
            if getppid().map(|parent| parent.as_raw_nonzero().get()) != Some(expected) {
                std::process::exit(0);
            }
        }
    }
}
