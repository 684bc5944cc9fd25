//! Abstract Unix sockets: names without a file, seen by the processes of one network namespace, gone with their process.
//! Nothing is left behind by a worker that is killed.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use tokio::net::{UnixListener, UnixStream};

/// A listening socket.
#[derive(Debug)]
pub(in crate::transfer) struct Listener {
    pub(in crate::transfer) socket: UnixListener,
    /// Its name, as [`path`] takes it.
    pub(in crate::transfer) address: String,
}

impl Listener {
    /// Listens under a name that nobody else has.
    pub(in crate::transfer) fn bind() -> io::Result<Self> {
        let address = format!("armature-kv-{:032x}", rand::random::<u128>());
        Ok(Self { socket: UnixListener::bind(path(&address))?, address })
    }
}

/// An abstract name as the path that stands for it.
pub(in crate::transfer) fn path(address: &str) -> PathBuf {
    let bytes = [b"\0", address.as_bytes()].concat();
    OsString::from_vec(bytes).into()
}

/// Anybody in the namespace can use a name; blocks are for processes of our own user.
pub(in crate::transfer) fn is_ours(socket: &UnixStream) -> io::Result<()> {
    let (peer, own) = (socket.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    if peer == own {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("the other side is of user {peer}, this one of {own}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_leads_to_its_listener_while_that_lives() {
        let listener = Listener::bind().expect("a name");
        let client = UnixStream::connect(path(&listener.address)).await.expect("the listener is there");
        is_ours(&client).expect("one process has one user");
        drop(listener.socket);
        let error = UnixStream::connect(path(&listener.address)).await.expect_err("it is gone");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
