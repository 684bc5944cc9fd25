//! The rows of the table: every server with what it has behind it, and how one is started.

use std::path::PathBuf;

use anyhow::Context;
use tempfile::TempDir;

use crate::peers::{Dynamo, POLICY, Peers};
use crate::process::Usage;
use crate::system::{self, OpenAiServers, Router, Workers};

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Server {
    /// A worker without anything in front: the floor.
    Direct,
    /// vLLM's router.
    VllmRouter,
    /// SGLang's router.
    SglangRouter,
    /// Dynamo's frontend.
    Dynamo,
    /// Ours.
    Armature,
}

impl Server {
    /// As results name it.
    pub fn name(self) -> &'static str {
        match self {
            Server::Direct => "direct",
            Server::VllmRouter => "vllm-router",
            Server::SglangRouter => "sglang-router",
            Server::Dynamo => "dynamo",
            Server::Armature => "armature",
        }
    }

    /// Whether it is somebody else's router.
    pub fn is_peer(self) -> bool {
        matches!(self, Server::VllmRouter | Server::SglangRouter | Server::Dynamo)
    }
}

/// What is behind a server. All answer at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Behind {
    /// OpenAI servers, the same for all.
    #[value(name = "openai")]
    OpenAi,
    /// Our agents, which tell of their cached blocks.
    Agents,
    /// Dynamo's workers, which do not.
    #[value(name = "dynamo")]
    DynamoWorkers,
}

impl Behind {
    /// As results name it.
    pub fn name(self) -> &'static str {
        match self {
            Behind::OpenAi => "openai",
            Behind::Agents => "agents",
            Behind::DynamoWorkers => "dynamo",
        }
    }
}

/// A row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Who.
    pub server: Server,
    /// How it picks workers.
    pub mode: String,
    /// In front of what.
    pub behind: Behind,
    /// Of another build than the one that is measured.
    pub other_build: bool,
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let build = if self.other_build { ", the other build" } else { "" };
        write!(f, "{} in mode {}{build}", self.server.name(), self.mode)
    }
}

/// Modes of Dynamo's that are measured.
const DYNAMO_MODES: [&str; 2] = ["kv", "round-robin"];

/// The rows of these servers; `modes` are those of our router, and with `other_build` there is another one of it.
pub fn rows(servers: &[Server], modes: &[String], other_build: bool) -> Vec<Row> {
    let row =
        |server: Server, mode: &str, behind: Behind| Row { server, mode: mode.to_owned(), behind, other_build: false };
    let of = |server: &Server| match *server {
        Server::Direct => vec![row(*server, "none", Behind::OpenAi)],
        Server::VllmRouter | Server::SglangRouter => vec![row(*server, POLICY, Behind::OpenAi)],
        Server::Dynamo => DYNAMO_MODES.map(|mode| row(*server, mode, Behind::DynamoWorkers)).into(),
        Server::Armature => {
            let behind = [Behind::OpenAi, Behind::Agents];
            let this = behind.iter().flat_map(|behind| modes.iter().map(|mode| row(*server, mode, *behind)));
            let other = |this: Row| [this.clone(), Row { other_build: true, ..this }];
            if other_build { this.flat_map(other).collect() } else { this.collect() }
        }
    };
    servers.iter().flat_map(of).collect()
}

/// What the servers share: the workers, and the model's files.
pub struct Shared {
    openai: OpenAiServers,
    model: TempDir,
    peers: Option<Peers>,
    other_build: Option<PathBuf>,
    count: usize,
}

impl Shared {
    /// Starts `count` workers of the kind that keeps nothing from row to row.
    pub async fn start(count: usize, peers: Option<Peers>, other_build: Option<PathBuf>) -> anyhow::Result<Self> {
        let openai = OpenAiServers::start(count).await?;
        Ok(Self { openai, model: system::model::folder()?, peers, other_build, count })
    }

    /// Starts the row's server; when this returns it answers requests.
    pub async fn serve(&self, row: &Row) -> anyhow::Result<Running> {
        let peers = || self.peers.as_ref().context("the peers' folder is not given");
        let build = self.other_build.as_deref().filter(|_| row.other_build);
        let running = match (row.server, row.behind) {
            (Server::Direct, _) => Running::Worker(*self.openai.addresses.first().context("there are no workers")?),
            (Server::VllmRouter, _) => Running::Router(peers()?.vllm_router(&self.openai).await?),
            (Server::SglangRouter, _) => Running::Router(peers()?.sglang_router(&self.openai).await?),
            (Server::Dynamo, _) => Running::Dynamo(peers()?.dynamo(&row.mode, self.model.path(), self.count).await?),
            (Server::Armature, Behind::Agents) => {
                let agents = Workers::start(self.count).await?;
                let router = Router::start_with(&agents, &row.mode, build, &[]).await?;
                Running::OverAgents { router, _agents: agents }
            }
            (Server::Armature, _) => {
                Running::Router(Router::in_front_of(&self.openai, &row.mode, build, self.model.path()).await?)
            }
        };
        if row.server == Server::Armature {
            system::routable(running.address(), self.count).await?;
        }
        Ok(running)
    }
}

/// A server that answers; what was started for it is killed when dropped.
pub enum Running {
    /// A worker that all share.
    Worker(std::net::SocketAddr),
    /// A router.
    Router(Router),
    /// A router, and agents that held nothing when it came.
    OverAgents {
        /// It.
        router: Router,
        /// Killed when dropped.
        _agents: Workers,
    },
    /// A router with workers of its own.
    Dynamo(Dynamo),
}

impl Running {
    /// Where it listens.
    pub fn address(&self) -> std::net::SocketAddr {
        match self {
            Running::Worker(address) => *address,
            Running::Router(router) | Running::OverAgents { router, .. } => router.address,
            Running::Dynamo(dynamo) => dynamo.frontend.address,
        }
    }

    /// The router, if there is one.
    pub fn router(&self) -> Option<&Router> {
        match self {
            Running::Worker(_) => None,
            Running::Router(router) | Running::OverAgents { router, .. } => Some(router),
            Running::Dynamo(dynamo) => Some(&dynamo.frontend),
        }
    }

    /// What the router has used so far.
    pub fn usage(&self) -> anyhow::Result<Option<Usage>> {
        self.router().map(Router::usage).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_is_measured_in_each_mode_before_both_kinds_of_workers() {
        let modes = ["kv".to_owned(), "random".to_owned()];
        let rows = rows(&[Server::Direct, Server::VllmRouter, Server::Armature], &modes, false);
        let shown: Vec<_> = rows.iter().map(|row| (row.server.name(), row.mode.as_str(), row.behind.name())).collect();
        assert_eq!(shown[..2], [("direct", "none", "openai"), ("vllm-router", "cache_aware", "openai")]);
        let ours = [("kv", "openai"), ("random", "openai"), ("kv", "agents"), ("random", "agents")];
        assert_eq!(shown[2..], ours.map(|(mode, behind)| ("armature", mode, behind)));
        assert!(rows.iter().all(|row| !row.other_build));
        let twice = super::rows(&[Server::Direct, Server::Armature], &modes, true);
        assert_eq!(twice.iter().map(|row| row.other_build).collect::<Vec<_>>()[..4], [false, false, true, false]);
        assert_eq!(twice.len(), 1 + 2 * ours.len());
    }
}
