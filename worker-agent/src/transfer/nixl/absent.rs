//! In place of NIXL's agent where the build has none: an agent that does not start.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use super::read::Move;
use crate::engine::builtin::arena::KvArena;
use crate::transfer::wire::AgentHead;

const ABSENT: &str = "needs a build with NIXL (cargo feature `nixl`)";

/// Whether there is a library to start an agent with.
pub(in crate::transfer) fn available() -> Result<(), &'static str> {
    Err(ABSENT)
}

/// There is none.
pub(super) struct Request {
    never: Infallible,
}

/// There is none.
pub(in crate::transfer) struct Agent {
    never: Infallible,
}

impl Agent {
    pub(in crate::transfer) fn start(_: Arc<KvArena>) -> io::Result<Self> {
        Err(io::Error::other(ABSENT))
    }

    pub(in crate::transfer) fn head(&self) -> AgentHead {
        match self.never {}
    }

    pub(super) fn load(&self, _: &[u8]) -> io::Result<String> {
        match self.never {}
    }

    pub(super) fn forget(&self, _: &str) {
        match self.never {}
    }

    pub(super) fn prepare(&self, _: &str, _: impl Iterator<Item = Move>) -> io::Result<Request> {
        match self.never {}
    }

    /// # Safety
    /// It is never called.
    pub(super) unsafe fn begin(&self, read: &Request) -> io::Result<()> {
        match read.never {}
    }

    pub(super) fn ended(&self, read: &Request) -> io::Result<bool> {
        match read.never {}
    }
}
