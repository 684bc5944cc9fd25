//! NIXL's own agent, as far as it is used here: one piece of memory, which others may read, and reads into it.
//!
//! The library is opened when the first agent starts: a build with NIXL runs where there is none.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use nixl_sys::{
    Agent as Handle, AgentConfig, MemType, MemoryRegion, NixlDescriptor, NixlError, Params, RegistrationHandle,
    ThreadSync, XferDescList, XferOp,
};

use super::read::Move;
use crate::engine::builtin::arena::KvArena;
use crate::transfer::lane;
use crate::transfer::wire::AgentHead;

pub(super) use nixl_sys::XferRequest as Request;

/// The plugin that all networks go through.
const PLUGIN: &str = "UCX";
/// How often the agent's thread looks by itself, in microseconds; it is woken by what comes. At 0 it would never sleep.
const LOOK_US: u64 = 5_000;

/// Whether there is a library to start an agent with.
pub(in crate::transfer) fn available() -> Result<(), &'static str> {
    match nixl_sys::is_stub() {
        false => Ok(()),
        true => Err("needs NIXL's library, libnixl_capi.so, where LD_LIBRARY_PATH leads"),
    }
}

/// The agent of one arena. Fields end in this order: first nobody reads the memory any more, and then it goes.
pub(in crate::transfer) struct Agent {
    _registration: RegistrationHandle,
    handle: Handle,
    metadata: Bytes,
    arena: Arc<KvArena>,
}

/// An arena as NIXL sees it.
#[derive(Debug)]
struct Memory<'a>(&'a KvArena);

impl MemoryRegion for Memory<'_> {
    unsafe fn as_ptr(&self) -> *const u8 {
        self.0.range().0
    }

    fn size(&self) -> usize {
        self.0.range().1
    }
}

impl NixlDescriptor for Memory<'_> {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}

impl Agent {
    /// Starts an agent that lets others read the arena. Its threads have the priority of those that move blocks.
    pub(in crate::transfer) fn start(arena: Arc<KvArena>) -> io::Result<Self> {
        available().map_err(io::Error::other)?;
        // Threads inherit their priority.
        let starting = std::thread::Builder::new().name("nixl".into()).spawn(move || {
            if let Err(error) = lane::lower() {
                tracing::warn!(%error, "NIXL runs at the priority of the engine");
            }
            Self::open(arena, true, "")
        })?;
        starting.join().map_err(|_| io::Error::other("NIXL's start panicked"))?
    }

    /// Starts an agent with settings of UCX, as `NAME=VALUE,…`. Without a thread nothing is done for those that read from it.
    pub(in crate::transfer) fn open(arena: Arc<KvArena>, has_thread: bool, settings: &str) -> io::Result<Self> {
        // Others know it by this name in this life only.
        let name = format!("armature-{:032x}", rand::random::<u128>());
        let config = AgentConfig {
            enable_prog_thread: has_thread,
            thread_sync: ThreadSync::Strict,
            pthr_delay_us: LOOK_US,
            ..AgentConfig::default()
        };
        let handle = Handle::new_configured(&name, &config).map_err(failed("an agent"))?;
        let (_, defaults) = handle.get_plugin_params(PLUGIN).map_err(failed("its plugin for UCX"))?;
        let mut params: Params = defaults.clone().map_err(failed("settings"))?;
        if !settings.is_empty() {
            params.set("engine_config", settings).map_err(failed("settings"))?;
        }
        handle.create_backend(PLUGIN, &params).map_err(failed("UCX"))?;
        let registration = handle.register_memory(&Memory(&arena), None).map_err(failed("registration of memory"))?;
        let metadata = handle.get_local_md().map_err(failed("its metadata"))?.into();
        Ok(Self { _registration: registration, handle, metadata, arena })
    }

    /// What others have to know of it.
    pub(in crate::transfer) fn head(&self) -> AgentHead {
        AgentHead { metadata: self.metadata.clone(), base: self.arena.range().0 as u64 }
    }

    /// Makes another agent known to this one; returns its name.
    pub(super) fn load(&self, metadata: &[u8]) -> io::Result<String> {
        self.handle.load_remote_md(metadata).map_err(failed("loading an agent"))
    }

    /// Ends the connection to another agent, which nothing is read from any more.
    pub(super) fn forget(&self, name: &str) {
        if let Err(error) = self.handle.invalidate_remote_md(name) {
            tracing::debug!(%error, name, "NIXL did not forget an agent");
        }
    }

    /// Whether it knows another agent.
    #[cfg(test)]
    pub(super) fn knows(&self, name: &str) -> bool {
        self.handle.check_remote_metadata(name, None)
    }

    /// A read that has not begun. Refuses what the other agent has not registered.
    pub(super) fn prepare(&self, from: &str, moves: impl Iterator<Item = Move>) -> io::Result<Request> {
        let list = || XferDescList::new(MemType::Dram).map_err(failed("a list"));
        let (mut here, mut there) = (list()?, list()?);
        for (from, to, bytes) in moves {
            here.add_desc(to as usize, bytes, 0);
            there.add_desc(from as usize, bytes, 0);
        }
        self.handle.create_xfer_req(XferOp::Read, &here, &there, from, None).map_err(failed("a read"))
    }

    /// Begins the read. When that fails, parts of it may have begun.
    ///
    /// # Safety
    /// Until it has ended, nothing else accesses the memory that it writes to, and the request is kept.
    pub(super) unsafe fn begin(&self, read: &Request) -> io::Result<()> {
        self.handle.post_xfer_req(read, None).map(drop).map_err(failed("the beginning of a read"))
    }

    /// Whether the read has ended well; an error is one of its parts'. Moves bytes, where the system does not do so by itself.
    pub(super) fn ended(&self, read: &Request) -> io::Result<bool> {
        self.handle.get_xfer_status(read).map(|status| status.is_success()).map_err(failed("a read"))
    }
}

fn failed(what: &str) -> impl Fn(NixlError) -> io::Error {
    move |error| io::Error::other(format!("NIXL, {what}: {error}"))
}
