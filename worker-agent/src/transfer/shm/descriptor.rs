//! An open file from one process to another, over a Unix socket.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// A descriptor travels beside a byte, which this is.
const MARK: u8 = b'm';

/// Sends a descriptor, which both processes have then.
pub(in crate::transfer) async fn send(socket: &UnixStream, file: BorrowedFd<'_>) -> io::Result<()> {
    let send = || {
        let files = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(socket, &[IoSlice::new(&[MARK])], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    };
    socket.async_io(Interest::WRITABLE, send).await
}

/// Takes the descriptor that comes next.
pub(super) async fn receive(socket: &UnixStream) -> io::Result<OwnedFd> {
    let receive = || {
        let mut mark = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(socket, &mut [IoSliceMut::new(&mut mark)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let mut files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        match files.next().and_then(|mut files| files.next()) {
            Some(file) if received.bytes == 1 && mark == [MARK] => Ok(file),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "no descriptor came")),
        }
    };
    socket.async_io(Interest::READABLE, receive).await
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn a_file_comes_and_anything_else_is_an_error() {
        let (mut from, to) = UnixStream::pair().expect("two sockets");
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(b"blocks", 0).expect("written");
        send(&from, file.as_fd()).await.expect("sent");
        drop(file);
        let mut bytes = [0; 6];
        File::from(receive(&to).await.expect("a descriptor")).read_exact_at(&mut bytes, 0).expect("readable");
        assert_eq!(&bytes, b"blocks");
        from.write_all(&[MARK]).await.expect("sent");
        assert_eq!(receive(&to).await.expect_err("a byte alone").kind(), io::ErrorKind::InvalidData);
        drop(from);
        receive(&to).await.expect_err("the end");
    }
}
