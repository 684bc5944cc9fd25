//! The thread on which blocks are moved, in both directions: of the lowest priority, so that copying and checksums take the
//! time that computing leaves. On a machine without idle cores the kernel gives it one or two percent of a core; a transfer
//! takes longer then, and running streams hardly notice it.

use std::convert::Infallible;
use std::future::Future;
use std::io;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

mod priority;

pub(super) use priority::lower;

/// The thread. It ends, with all that runs on it, when this is dropped.
pub struct Lane {
    handle: Handle,
    _running: oneshot::Sender<Infallible>,
}

impl Lane {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (running, dropped) = oneshot::channel();
        std::thread::Builder::new().name("kv-transfer".into()).spawn(move || {
            if let Err(error) = lower() {
                tracing::warn!(%error, "KV transfers run at the priority of the engine");
            }
            // Nothing is ever sent.
            let _ = runtime.block_on(dropped);
        })?;
        Ok(Self { handle, _running: running })
    }

    /// Runs a future on the thread, until it ends or the handle is dropped.
    pub fn run<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> AbortOnDropHandle<T> {
        AbortOnDropHandle::new(self.handle.spawn(future))
    }

    /// The thread's runtime.
    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }
}
