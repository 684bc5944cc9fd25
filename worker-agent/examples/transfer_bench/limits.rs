//! What the machine itself can do: loopback TCP, and copying memory. Neither checks what it moves.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use super::{Failure, cores};

/// Two ranges of memory, as large as what is fetched. They are kept from one measurement to the next, as arenas are: fresh
/// ones would be in a cache.
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

    /// Sends one from a thread over loopback TCP to this one, which writes it to the other, each on a core of its own; in
    /// seconds, with connecting.
    pub(super) fn loopback(&mut self) -> Result<f64, Failure> {
        let Self { from, to, chunk } = self;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let send = || {
            let mut socket = TcpStream::connect(address)?;
            from.chunks(*chunk).try_for_each(|piece| socket.write_all(piece))
        };
        let receive = || {
            let started = Instant::now();
            let (mut socket, _) = listener.accept()?;
            to.chunks_mut(*chunk).try_for_each(|piece| socket.read_exact(piece))?;
            Ok::<_, std::io::Error>(started.elapsed().as_secs_f64())
        };
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| cores::on(Some(0), send)?);
            let took = cores::on(Some(1), receive)??;
            sender.join().map_err(|_| "the sender panicked")??;
            Ok(took)
        })
    }
}
