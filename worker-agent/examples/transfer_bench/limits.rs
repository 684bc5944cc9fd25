//! What the machine itself can do: loopback TCP, and copying memory. Neither checks what it moves.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use super::Failure;

/// Between two threads over loopback TCP, in writes and reads of `chunk` bytes; in seconds.
pub(super) fn loopback(bytes: usize, chunk: usize) -> Result<f64, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    // Both buffers are in memory before the clock starts, as an arena is.
    let (from, mut to) = (vec![1u8; bytes], vec![2u8; bytes]);
    let started = Instant::now();
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let mut socket = TcpStream::connect(address)?;
        from.chunks(chunk).try_for_each(|piece| socket.write_all(piece))
    });
    let (mut socket, _) = listener.accept()?;
    to.chunks_mut(chunk).try_for_each(|piece| socket.read_exact(piece))?;
    let took = started.elapsed().as_secs_f64();
    sender.join().map_err(|_| "the sender panicked")??;
    Ok(took)
}

/// Two ranges of memory.
pub(super) struct Memory {
    from: Vec<u8>,
    to: Vec<u8>,
    chunk: usize,
}

impl Memory {
    pub(super) fn new(bytes: usize, chunk: usize) -> Self {
        Self { from: vec![1; bytes], to: vec![2; bytes], chunk }
    }

    /// Copies one into the other; in seconds.
    pub(super) fn copy(&mut self) -> f64 {
        let started = Instant::now();
        for (from, to) in self.from.chunks(self.chunk).zip(self.to.chunks_mut(self.chunk)) {
            to.copy_from_slice(from);
        }
        std::hint::black_box(&mut self.to);
        started.elapsed().as_secs_f64()
    }
}
