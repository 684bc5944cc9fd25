//! A client's socket that gives up on a client who no longer reads.
//!
//! A write that is stuck holds the response, and with it the request at its worker. Bytes that the client takes count
//! as progress, however slowly they go.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// A connection whose writes fail when none of their bytes have been taken for `limit`.
pub(super) struct ClientSocket {
    stream: TcpStream,
    limit: Duration,
    /// When the stuck write began to be stuck.
    stuck_since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl ClientSocket {
    pub(super) fn new(stream: TcpStream, limit: Duration) -> ClientSocket {
        ClientSocket { stream, limit, stuck_since: None, timer: None }
    }

    /// The result of a write, or an error when writes have been stuck for too long.
    fn watch(&mut self, cx: &mut Context<'_>, written: Poll<Result<usize>>) -> Poll<Result<usize>> {
        if written.is_ready() {
            self.stuck_since = None;
            return written;
        }
        let due = *self.stuck_since.get_or_insert_with(Instant::now) + self.limit;
        // The timer is made by the first write that is stuck, and moved only when it fires.
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
        while timer.as_mut().poll(cx).is_ready() {
            if Instant::now() >= due {
                let message = format!("the client has read nothing for {} s", self.limit.as_secs());
                return Poll::Ready(Err(Error::new(ErrorKind::TimedOut, message)));
            }
            timer.as_mut().reset(due);
        }
        Poll::Pending
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.watch(cx, written)
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
