//! Too little room, too many fetches, and an engine that dies: waits are in order and end, bounds hold, nothing starves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::*;
use crate::engine::builtin::exchange::Exchange;
use crate::transfer::serve::MAX_CONNECTIONS;

type Blocks = Vec<(BlockHash, SequenceHash)>;

/// The full blocks of some tokens.
pub(super) fn blocks(tokens: &[u32]) -> Blocks {
    let local = kv_hashing::HashSpace::default().blocks(tokens, kv_hashing::BlockSize::new(16).expect("not zero"));
    let sequence = kv_hashing::sequence_hashes(&local);
    local.into_iter().zip(sequence).collect()
}

pub(super) fn exchange(node: &Node) -> Arc<Exchange> {
    node.engine.exchange().expect("a model has blocks")
}

/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_free_blocks_nothing_is_fetched() {
    let prefill = Node::start(Setup::default()).await;
    let decoder = Node::start(Setup { blocks: 16, timeout: Duration::from_millis(100), ..Setup::default() }).await;
    let prompt = tokens(64, 53);
    let (first, source) = prefill.prefill(&prompt).await;
    let held = exchange(&decoder).reserve(blocks(&tokens(80, 54)), LONG).await.expect("five of eight");
    let mut outputs = decoder.submit(decode(&prompt, first, ANSWER, &source.expect("a lease")));
    until("the transfer fails", || decoder.metrics.failures(Failure::no_blocks) == 1).await;
    drop(held);
    let (rest, _) = whole(&mut outputs).await;
    assert_eq!([&[first], &rest[..]].concat(), alone(&prompt).await);
    decoder.idle().await;
    until("the lease is ended", || prefill.leased() == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_waits_for_room_and_then_comes() {
    let prefill = Node::start(Setup::default()).await;
    let decoder = Node::start(Setup { blocks: 16, ..Setup::default() }).await;
    let prompt = tokens(64, 60);
    let (first, source) = prefill.prefill(&prompt).await;
    let held = exchange(&decoder).reserve(blocks(&tokens(80, 61)), LONG).await.expect("five of eight");
    let mut outputs = decoder.submit(decode(&prompt, first, ANSWER, &source.expect("a lease")));
    // Answered in later steps than the one that found no room.
    assert_eq!(decoder.answer(generate(&tokens(20, 62), ANSWER)).await.0.len(), ANSWER as usize);
    assert!(outputs.try_recv().is_err(), "it waits");
    drop(held);
    let (rest, reused) = whole(&mut outputs).await;
    assert_eq!(([&[first], &rest[..]].concat(), reused), (alone(&prompt).await, 64));
    assert_eq!(decoder.metrics.failures(Failure::no_blocks), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_is_given_in_order_and_who_needs_none_waits_for_nobody() {
    let decoder = Node::start(Setup { blocks: 16, ..Setup::default() }).await;
    decoder.answer(generate(&tokens(40, 63), 2)).await;
    let exchange = exchange(&decoder);
    let held = exchange.reserve(blocks(&tokens(80, 64)), LONG).await.expect("five of eight");
    let (large, small) = (blocks(&tokens(64, 65)), blocks(&tokens(16, 66)));
    let mut large = Box::pin(exchange.reserve(large, LONG));
    let mut small = Box::pin(exchange.reserve(small, LONG));
    assert!(futures::poll!(&mut large).is_pending() && futures::poll!(&mut small).is_pending());
    let here = within("cached blocks", exchange.reserve(blocks(&tokens(40, 63)), LONG)).await.expect("all are here");
    assert_eq!((here.here(), here.missing().len()), (2, 0));
    assert!(futures::poll!(&mut small).is_pending(), "there is room for one block, but others asked before");
    drop(held);
    let large = within("room", large).await.expect("four of eight");
    let small = within("room", small).await.expect("five of eight");
    assert_eq!((large.missing().len(), small.missing().len(), exchange.reserved()), (4, 1, 5));
    drop((large, small, here));
    decoder.idle().await;
    assert_eq!(exchange.reserved(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetches_reserve_half_of_the_arena_and_the_rest_computes() {
    let prefill = Node::start(Setup::default()).await;
    let decoder = Node::start(Setup { blocks: 8, ..Setup::default() }).await;
    let prompt = tokens(100, 67);
    let (first, source) = prefill.prefill(&prompt).await;
    let mut source = source.expect("a lease");
    let proxy = Proxy::before(&mut source, Harm::Stall(2 * BLOCK)).await;
    let mut outputs = decoder.submit(decode(&prompt, first, ANSWER, &source));
    within("the transfer begins", proxy.stalled.notified()).await;
    assert_eq!(exchange(&decoder).reserved(), 4, "of the six blocks of the prompt");
    assert_eq!(decoder.answer(generate(&tokens(40, 68), ANSWER)).await.0.len(), ANSWER as usize, "four are left");
    proxy.kill();
    let (rest, _) = whole(&mut outputs).await;
    assert_eq!([&[first], &rest[..]].concat(), alone(&prompt).await);

    let decoder = Node::start(Setup { blocks: 8, ..Setup::default() }).await;
    let (first, source) = prefill.prefill(&prompt).await;
    let (rest, reused) = decoder.answer(decode(&prompt, first, ANSWER, &source.expect("a lease"))).await;
    assert_eq!(([&[first], &rest[..]].concat(), reused), (alone(&prompt).await, 64));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_take_half_of_the_arena_and_nobody_starves() {
    let prefill = Node::start(Setup { blocks: 16, ..Setup::default() }).await;
    let mut sources = Vec::new();
    for seed in 40..48 {
        // Three full blocks each: two leases fit into half of 16 blocks.
        sources.extend(prefill.prefill(&tokens(50, seed)).await.1);
    }
    assert_eq!((sources.len(), prefill.leased()), (2, (2, 6)));
    // Everything else goes on around them.
    assert_eq!(prefill.answer(generate(&tokens(90, 50), ANSWER)).await.0.len(), ANSWER as usize);
    // Leased blocks were neither evicted nor overwritten.
    let decoder = Node::start(Setup::default()).await;
    for (source, seed) in sources.iter().zip(40..) {
        let prompt = tokens(50, seed);
        let expected = alone(&prompt).await;
        let (rest, reused) = decoder.answer(decode(&prompt, expected[0], ANSWER, source)).await;
        assert_eq!((&rest[..], reused), (&expected[1..], 48));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_under_two_leases_count_once() {
    let prefill = Node::start(Setup { blocks: 16, ..Setup::default() }).await;
    let prompt = tokens(66, 69);
    let mut sources = Vec::new();
    for tail in 0..6 {
        sources.extend(prefill.prefill(&[&prompt[..], &[tail]].concat()).await.1);
    }
    assert_eq!((sources.len(), prefill.leased()), (6, (6, 4)), "four blocks, of the eight that may be leased");
    for source in &sources[1..] {
        exchange(&prefill).end_lease(source.lease);
    }
    assert_eq!((prefill.leased(), prefill.engine.load().active_blocks), ((1, 4), 4), "still held by the first");
    exchange(&prefill).end_lease(sources[0].lease);
    assert_eq!(prefill.leased(), (0, 0));
    prefill.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_misses_nothing_connects_to_nobody() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(64, 70);
    // The same tokens, so that everything is here already.
    let expected = decoder.answer(generate(&prompt, ANSWER)).await.0;
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let tcp = |address: &str| vec![Offer { backend: tcp::BACKEND.into(), address: address.into() }];
    let nobody = Source { offers: tcp("127.0.0.1:1"), ..source.clone() };
    let (rest, reused) = decoder.answer(decode(&prompt, first, ANSWER, &nobody)).await;
    assert_eq!((&rest[..], reused), (&expected[1..], 64));
    assert_eq!(decoder.metrics.failures(Failure::connect), 0);
    decoder.answer(decode(&prompt, first, ANSWER, &source)).await;
    until("the lease is ended", || prefill.leased() == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_does_not_come_ends_well_before_the_lease() {
    let lease = Duration::from_secs(3);
    let prefill = Node::start(Setup { blocks: 256, lease, ..Setup::default() }).await;
    let decoder = Node::start(Setup { blocks: 256, max_waiting: 32, ..Setup::default() }).await;
    let (mut stalled, mut proxies) = (Vec::new(), Vec::new());
    for seed in 0..MAX_FETCHES as u64 {
        let prompt = tokens(64, 100 + seed);
        let (first, source) = prefill.prefill(&prompt).await;
        let mut source = Source { lease_ms: 60_000, ..source.expect("a lease") };
        let proxy = Proxy::before(&mut source, Harm::Stall(BLOCK)).await;
        stalled.push(decoder.submit(decode(&prompt, first, ANSWER, &source)));
        within("the transfer begins", proxy.stalled.notified()).await;
        proxies.push(proxy);
    }
    let prompt = tokens(64, 120);
    let (first, source) = prefill.prefill(&prompt).await;
    let began = Instant::now();
    let source = source.expect("a lease");
    falls_back(&decoder, &prompt, first, &source, Failure::timeout).await;
    assert!(began.elapsed() >= lease / WAIT, "{:?}", began.elapsed());
    until("its lease is ended, and not expired", || exchange(&prefill).lease(source.lease).is_err()).await;
    assert!(began.elapsed() < lease, "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_too_many_connections_says_so() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(64, 71);
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let address = source.address(tcp::BACKEND).expect("TCP");
    let mut silent = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        silent.push(TcpStream::connect(address).await.expect("accepted"));
    }
    let hello = Hello { version: VERSION, ..Default::default() };
    let mut frames = BytesMut::new();
    encode_frame(&ToServer { ask: Some(Ask::Hello(hello)) }, &mut frames);
    for _ in 0..8 {
        let mut socket = TcpStream::connect(address).await.expect("accepted");
        socket.write_all(&frames).await.expect("sent");
        let answer = within("an answer", read::<ToClient>(&mut socket)).await.expect("and no reset").answer;
        assert!(matches!(answer, Some(Answer::Refused(refused)) if refused.refusal() == Refusal::Busy));
    }
    falls_back(&decoder, &prompt, first, &source, Failure::refused).await;
    assert_eq!(prefill.leased(), (1, 4), "it could not be told either");
    drop(silent);
    until("it is told later, long before the lease expires", || prefill.leased() == (0, 0)).await;
    prefill.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_leaves_half_of_the_time_for_the_first_token_to_computing() {
    let prefill = Node::start(Setup::default()).await;
    let decoder = Node::start(Setup { timeout: LONG, ..Setup::default() }).await;
    for (harm, room) in [(Harm::Stall(2 * BLOCK), true), (Harm::Stall(2 * BLOCK), false)] {
        let prompt = tokens(100, 76 + u64::from(room));
        let (first, source) = prefill.prefill(&prompt).await;
        let mut source = Source { lease_ms: LONG.as_millis() as u64, ..source.expect("a lease") };
        let _proxy = Proxy::before(&mut source, harm).await;
        // The connection stalls, or there is no room for what it would bring.
        let held = exchange(&decoder).reserve(blocks(&tokens(16 * 32, 78)), LONG).await.expect("half of the arena");
        let held = (!room).then_some(held);
        let began = Instant::now();
        let request = Generate { first_token_ms: 800, ..decode(&prompt, first, ANSWER, &source) };
        let (rest, _) = decoder.answer(request).await;
        assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
        assert_eq!([&[first], &rest[..]].concat(), alone(&prompt).await);
        drop(held);
        let reason = if room { Failure::timeout } else { Failure::no_blocks };
        assert_eq!(decoder.metrics.failures(reason), 1);
        until("the lease is ended", || prefill.leased() == (0, 0)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_engine_fails_those_that_fetch_at_once() {
    let prefill = Node::start(Setup::default()).await;
    let dies = Arc::new(AtomicBool::new(false));
    let decoder = Node::start(Setup { dies: Some(dies.clone()), ..Setup::default() }).await;
    let prompt = tokens(100, 72);
    let (first, source) = prefill.prefill(&prompt).await;
    let mut source = source.expect("a lease");
    let proxy = Proxy::before(&mut source, Harm::Stall(2 * BLOCK)).await;
    let mut fetching = decoder.submit(decode(&prompt, first, ANSWER, &source));
    within("the transfer begins", proxy.stalled.notified()).await;
    dies.store(true, Relaxed);
    let mut running = decoder.submit(generate(&tokens(20, 73), ANSWER));
    for outputs in [&mut running, &mut fetching] {
        let output = within("its end", outputs.recv()).await;
        assert!(matches!(output, Some(EngineOutput::Failed(_))), "{output:?}");
    }
    until("the lease is ended", || prefill.leased() == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_that_was_taken_outlives_its_reservation() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(100, 75);
    let source = prefill.prefill(&prompt).await.1.expect("a lease");
    let lease = exchange(&prefill).lease(source.lease).expect("held");
    let exchange = exchange(&decoder);
    let (place, mut outputs) = exchange.place(generate(&prompt, ANSWER)).expect("room in the queue");
    let place = place.expect("something to compute");
    let mut reservation = exchange.reserve(place.reusable().to_vec(), Duration::from_secs(5)).await.expect("room");

    let room = reservation.take_room(4).expect("six are missing");
    assert_eq!((room.blocks(), reservation.missing().len(), exchange.reserved()), (4, 6, 6));
    assert!(reservation.take_room(1).is_none() && reservation.next_bytes().is_none(), "it comes back first");
    for index in 0..2 {
        let bytes = lease.bytes(index);
        // SAFETY: the room is ours, and each of its places has room for a block.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), room.place(index), bytes.len()) };
    }
    reservation.put_back(room, 2);
    assert_eq!((reservation.received(), reservation.missing().len()), (2, 4));

    let room = reservation.take_room(3).expect("four are missing");
    place.enter(Some(reservation.finish()));
    assert_eq!(whole(&mut outputs).await, (alone(&prompt).await, 32), "what had come is used, and nothing after it");
    assert_eq!((exchange.reserved(), decoder.engine.load().active_blocks), (3, 3), "the room is nobody else's");
    drop(room);
    decoder.idle().await;
    assert_eq!(exchange.reserved(), 0);
}
