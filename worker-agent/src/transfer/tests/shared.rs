//! Shared memory: which way is taken, and a worker that dies or whose memory changes while it is read.

use std::os::fd::OwnedFd;
use std::time::Instant;

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use super::*;
use crate::transfer::wire::{BlockPlace, Pull, Welcome};

fn auto() -> Setup {
    Setup { transports: Transports::Auto, ..Setup::default() }
}

/// Another way to shared memory in place of the first.
fn over(source: &Source, address: &str) -> Source {
    let mut source = source.clone();
    let offer = source.offers.iter_mut().find(|offer| offer.backend == shm::BACKEND).expect("offered");
    offer.address = address.to_owned();
    source
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_way_through_memory_blocks_come_over_tcp() {
    let (prefill, decoder) = (Node::start(auto()).await, Node::start(auto()).await);
    let prompt = tokens(100, 80);
    let (first, source) = prefill.prefill(&prompt).await;
    // As a worker in another network namespace, or on another host, finds it.
    let elsewhere = over(&source.expect("a lease"), "armature-kv-nobody");
    let (rest, reused) = decoder.answer(decode(&prompt, first, ANSWER, &elsewhere)).await;
    assert_eq!(([&[first], &rest[..]].concat(), reused), (alone(&prompt).await, 96));
    assert_eq!(decoder.metrics.failures(Failure::connect), 0, "another way is no failure");
    assert_eq!(decoder.metrics.received_bytes(tcp::BACKEND).get(), 6 * BLOCK as u64);
    assert_eq!(decoder.metrics.received_bytes(shm::BACKEND).get(), 0);
    until("the lease is ended", || prefill.leased() == (0, 0)).await;

    let strict = Node::start(Setup { transports: Transports::Shm, ..Setup::default() }).await;
    falls_back(&strict, &prompt, first, &elsewhere, Failure::connect).await;
    let tcp_only = Node::start(Setup::default()).await;
    let (_, source) = prefill.prefill(&prompt).await;
    tcp_only.answer(decode(&prompt, first, ANSWER, &source.expect("a lease"))).await;
    assert_eq!(tcp_only.metrics.received_bytes(tcp::BACKEND).get(), 6 * BLOCK as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_within_the_host_fall_back_too() {
    let shm = || Setup { transports: Transports::Shm, ..Setup::default() };
    let prefill = Node::start(shm()).await;
    let prompt = tokens(64, 81);
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let other_life = Source { boot_epoch: "earlier".into(), ..source.clone() };
    let no_lease = Source { lease: source.lease ^ 1, ..source.clone() };
    for (source, reason) in [(other_life, Failure::refused), (no_lease, Failure::lease_gone)] {
        let decoder = Node::start(shm()).await;
        falls_back(&decoder, &prompt, first, &source, reason).await;
        decoder.idle().await;
    }
}

/// What goes wrong with a worker whose memory is being read.
#[derive(Clone, Copy, Debug)]
enum Harm {
    /// It is killed.
    Dies,
    /// It writes to a block that it has given.
    Overwrites,
    /// It gives a place that is not in its memory.
    Strays,
    /// It gives something else than memory.
    OtherFile,
}

/// Takes the place of `prefill` for one fetch: shares its memory, and does harm from the second block on.
fn impostor(prefill: &Node, source: &Source, harm: Harm) -> (String, JoinHandle<()>) {
    let exchange = prefill.engine.exchange().expect("a model has blocks");
    let lease = exchange.lease(source.lease).expect("held");
    let listener = shm::Listener::bind().expect("a name");
    let address = listener.address.clone();
    let memory: OwnedFd = match harm {
        Harm::OtherFile => tempfile::tempfile().expect("a file").into(),
        _ => exchange.memory().expect("shared").try_clone_to_owned().expect("a descriptor"),
    };
    let serving = tokio::spawn(async move {
        let (mut socket, _) = within("a client", listener.socket.accept()).await.expect("accepted");
        let hello = within("a greeting", read::<ToServer>(&mut socket)).await.expect("a message");
        assert!(matches!(hello.ask, Some(Ask::Hello(_))));
        say(&mut socket, Answer::Welcome(Welcome { version: VERSION })).await;
        shm::send(&socket, std::os::fd::AsFd::as_fd(&memory)).await.expect("sent");
        let pull = within("a question", read::<ToServer>(&mut socket)).await.expect("a message");
        let Some(Ask::Pull(Pull { blocks, .. })) = pull.ask else { panic!("{pull:?}") };
        for (index, hash) in blocks.into_iter().enumerate() {
            let bytes = lease.bytes(index);
            let (mut offset, mut checksum) = (lease.offset(index), xxhash_rust::xxh3::xxh3_64(bytes));
            match harm {
                Harm::Dies if index == 1 => return,
                Harm::Overwrites if index == 1 => checksum ^= 1,
                Harm::Strays if index == 1 => offset = 1 << 40,
                _ => {}
            }
            say(&mut socket, Answer::Place(BlockPlace { hash, bytes: bytes.len() as u32, checksum, offset })).await;
        }
        // The client ends it.
        let _ = read::<ToServer>(&mut socket).await;
    });
    (address, serving)
}

/// A client that has seen enough may be gone.
async fn say(socket: &mut UnixStream, answer: Answer) {
    let mut frame = BytesMut::new();
    encode_frame(&ToClient { answer: Some(answer) }, &mut frame);
    let _ = socket.write_all(&frame).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_cannot_be_trusted_is_only_latency() {
    for (number, (harm, reason, whole)) in
        [(Harm::Dies, Failure::lost, 1), (Harm::Overwrites, Failure::checksum, 1), (Harm::Strays, Failure::protocol, 1)]
            .into_iter()
            .enumerate()
    {
        let (prefill, decoder) = (Node::start(auto()).await, Node::start(auto()).await);
        let prompt = tokens(100, 90 + number as u64);
        let (first, source) = prefill.prefill(&prompt).await;
        let source = source.expect("a lease");
        let (address, serving) = impostor(&prefill, &source, harm);
        falls_back(&decoder, &prompt, first, &over(&source, &address), reason).await;
        decoder.idle().await;
        assert_eq!(decoder.metrics.received_blocks.get(), whole, "{harm:?}");
        within("its end", serving).await.expect("no panic");
    }
}

/// Asks a worker for all blocks of a lease, as one that says it copies for so long; gives the connection with all that was told.
async fn pull(source: &Source, address: &str, copies: Duration) -> UnixStream {
    let mut socket = UnixStream::connect(shm::path(address)).await.expect("it listens");
    let layout = serde_json::to_string(&source.layout).expect("numbers are JSON");
    let (boot_epoch, revision) = (source.boot_epoch.clone(), source.revision.clone());
    let hello = Hello { version: VERSION, boot_epoch, revision, layout };
    let blocks: Vec<u64> = source.blocks.iter().map(|hash| hash.0).collect();
    let count = blocks.len();
    let within_ms = copies.as_millis() as u32;
    for ask in [Ask::Hello(hello), Ask::Pull(Pull { lease: source.lease, blocks, within_ms })] {
        let mut frame = BytesMut::new();
        encode_frame(&ToServer { ask: Some(ask) }, &mut frame);
        socket.write_all(&frame).await.expect("it reads");
    }
    within("a welcome", read::<ToClient>(&mut socket)).await.expect("a message");
    within("a byte beside the descriptor", socket.read_u8()).await.expect("a byte");
    for _ in 0..count {
        within("a place", read::<ToClient>(&mut socket)).await.expect("a message");
    }
    socket
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_stay_while_their_reader_has_time_and_not_much_longer() {
    let prefill = Node::start(Setup { lease: Duration::from_millis(100), ..auto() }).await;
    let (_, source) = prefill.prefill(&tokens(100, 99)).await;
    let source = source.expect("a lease");
    let address = source.offers.iter().find(|offer| offer.backend == shm::BACKEND).expect("one host").address.clone();
    let mut brief = pull(&source, &address, Duration::from_millis(200)).await;
    let _patient = pull(&source, &address, Duration::from_secs(30)).await;
    let mut byte = [0];
    let begun = Instant::now();
    let ended = within("the end of the brief one", brief.read(&mut byte)).await;
    assert_eq!(ended.expect("no error"), 0, "it is told nothing more");
    assert!(begun.elapsed() >= Duration::from_millis(200));
    assert_ne!(prefill.leased(), (0, 0), "the other one has time left, although the lease is old");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_could_be_cut_short_is_not_mapped() {
    let (prefill, decoder) = (Node::start(auto()).await, Node::start(auto()).await);
    let prompt = tokens(100, 95);
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let (address, serving) = impostor(&prefill, &source, Harm::OtherFile);
    let (_, reused) = decoder.answer(decode(&prompt, first, ANSWER, &over(&source, &address))).await;
    assert_eq!((reused, decoder.metrics.received_bytes(tcp::BACKEND).get()), (96, 6 * BLOCK as u64));
    serving.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_has_left_since_the_last_fetch_is_asked_no_more() {
    let shm = || Setup { transports: Transports::Shm, ..Setup::default() };
    let (prefill, decoder) = (Node::start(shm()).await, Node::start(shm()).await);
    let mut last = None;
    for seed in 96..98 {
        let prompt = tokens(64, seed);
        let (first, source) = prefill.prefill(&prompt).await;
        let source = source.expect("a lease");
        let (_, reused) = decoder.answer(decode(&prompt, first, ANSWER, &source)).await;
        assert_eq!(reused, 64, "also over the connection of the first");
        last = Some(source);
    }
    until("the leases are ended", || prefill.leased() == (0, 0)).await;
    let (prompt, source) = (tokens(64, 98), last.expect("two"));
    let (first, again) = prefill.prefill(&prompt).await;
    let offers = source.offers.clone();
    prefill.drain.stop();
    within("the server ends", prefill.serving).await.expect("no panic");
    let gone = Source { offers, ..again.expect("a lease") };
    falls_back(&decoder, &prompt, first, &gone, Failure::connect).await;
}
