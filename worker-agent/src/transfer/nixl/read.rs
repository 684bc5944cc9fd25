//! One read that NIXL makes, and the room that it writes to.
//!
//! A read cannot be called back: NIXL cancels what can be cancelled and does not wait for the rest, which goes on writing. So a
//! read owns its room, and a request that is cancelled or runs out of time leaves both behind: somebody goes on looking until
//! the read has ended, and only then is the room given back. UCX ends every read, by an error if need be, when the other worker
//! is gone. After an error some part of the read may not have heard of it: the connection is ended, and then the room rests. All
//! this time its blocks are among the reserved ones, of which there are half an arena at most; and where a few such reads hang, no
//! fetch from that worker begins until they have ended.

use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::agent::Request;
use super::remote::{Remote, UnderWay};
use crate::engine::builtin::exchange::Room;
use crate::transfer::client::Deadline;
use crate::transfer::wire::BlockPlace;
use crate::transfer::{Stage, TransferError};

/// How long it is looked for the end of a read without a pause: what a few megabytes take within a host.
const SPIN: Duration = Duration::from_micros(500);
/// Pause between two looks after that: the shortest that the timer has.
const LOOK: Duration = Duration::from_millis(1);
/// Pause between two looks at a read that nobody waits for.
const LEFT_LOOK: Duration = Duration::from_millis(20);
/// A read that nobody waits for and that has not ended by then hangs; most have, within a few milliseconds.
const HANGS: Duration = Duration::from_secs(1);
/// How long a room rests after an error, which is one part's and does not wait for the others, and after the end of the connection:
/// what that had under way is over in milliseconds.
const REST: Duration = Duration::from_secs(10);

/// A piece of a read: from where in the other worker, to where here, and how many bytes.
pub(super) type Move = (u64, *mut u8, usize);

/// A read under way.
pub(in crate::transfer) struct Read {
    /// Absent when it has ended.
    parts: Option<Parts>,
    /// Where it is looked after when nobody waits for it any more.
    runtime: Handle,
}

/// Fields end in this order: what has ended, its room, and the agent last.
struct Parts {
    request: Request,
    room: Room,
    under_way: UnderWay,
    /// By an error; what the room has is not what was read.
    failed: bool,
}

impl Parts {
    /// Whether it has ended well. After an error nobody looks again.
    fn ended(&mut self) -> io::Result<bool> {
        let ended = self.under_way.remote().agent().ended(&self.request);
        self.note(ended)
    }

    fn note<T>(&mut self, outcome: io::Result<T>) -> io::Result<T> {
        if outcome.is_err() {
            self.failed = true;
            self.under_way.remote().set_broken();
        }
        outcome
    }
}

impl Read {
    /// Begins to read what is at `places` in the other worker's arena, one block for each of `room`. Refused after an error.
    /// Must be called inside a Tokio runtime.
    ///
    /// # Panics
    /// When there are fewer blocks than places.
    pub(in crate::transfer) fn begin(remote: &Arc<Remote>, room: Room, places: &[BlockPlace]) -> io::Result<Self> {
        let under_way = remote.read()?;
        let moves = places.iter().enumerate().map(|(index, place)| -> Move {
            (remote.base().wrapping_add(place.offset), room.place(index), place.bytes as usize)
        });
        // Until it has begun, nothing writes.
        let request = remote.agent().prepare(remote.name(), moves)?;
        let mut parts = Parts { request, room, under_way, failed: false };
        // SAFETY: the room is among the parts, which are kept until the read has ended.
        let begun = unsafe { remote.agent().begin(&parts.request) };
        let begun = parts.note(begun);
        let read = Self { parts: Some(parts), runtime: Handle::current() };
        begun.map(|()| read)
    }

    /// Waits for the end. Gives back the room, which has what was read.
    pub(in crate::transfer) async fn ended(mut self, deadline: Deadline) -> Result<Room, TransferError> {
        let started = Instant::now();
        while let Some(parts) = &mut self.parts {
            if parts.ended().map_err(|source| TransferError::Io { stage: Stage::Blocks, source })? {
                break;
            }
            deadline.check(Stage::Blocks)?;
            if started.elapsed() < SPIN {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(LOOK).await;
            }
        }
        self.parts.take().map(|parts| parts.room).ok_or(TransferError::Ended)
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        if let Some(parts) = self.parts.take() {
            self.runtime.spawn(Left::new(parts).look_after());
        }
    }
}

/// A read that nobody waits for. Dropped before its end, which is when the thread that looks after it ends, it is leaked with its
/// room, its agent and the arena: memory that may be written to is never given back.
struct Left(ManuallyDrop<Parts>);

impl Left {
    fn new(parts: Parts) -> Self {
        Self(ManuallyDrop::new(parts))
    }

    async fn look_after(mut self) {
        let (left, mut hangs) = (Instant::now(), false);
        while !self.0.failed && matches!(self.0.ended(), Ok(false)) {
            if !hangs && left.elapsed() >= HANGS {
                hangs = true;
                self.0.under_way.remote().hangs();
            }
            tokio::time::sleep(LEFT_LOOK).await;
        }
        let Parts { request, room, under_way, failed } = ManuallyDrop::into_inner(self.0);
        // As above: given back at the end of this, or never.
        let kept = ManuallyDrop::new((room, under_way.remote().clone()));
        // The request first, then the connection, which other reads may still need, and only then is it quiet.
        drop((request, under_way));
        if failed {
            while !kept.1.is_forgotten() {
                tokio::time::sleep(LEFT_LOOK).await;
            }
            tokio::time::sleep(REST).await;
        }
        let (room, remote) = ManuallyDrop::into_inner(kept);
        drop(room);
        if hangs {
            remote.hung();
        }
    }
}
