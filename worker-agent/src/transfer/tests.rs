//! Two engines, a real model, real sockets: answers are the same whatever happens to a transfer, and nothing stays behind.

use std::time::Duration;

use bytes::BytesMut;
use protocol::request_plane::{FinishReason, Generate, Stop, encode_frame};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::metrics::Failure;
use super::wire::{Answer, Ask, Hello, Refusal, ToClient, ToServer, VERSION, read};
use super::*;
use crate::engine::builtin::llama::tests::tokens;

#[cfg(feature = "nixl")]
mod nixl;
mod node;
mod pressure;
mod shared;

use node::{Harm, Node, Proxy, Setup, decode, generate, until, whole, within};

/// Bytes of a block of the tiny model: 2 layers, keys and values, 2 heads of 16, 16 positions, 2 bytes.
const BLOCK: usize = 2 * 2 * 2 * 16 * 16 * 2;
const ANSWER: u32 = 12;

async fn nodes() -> (Node, Node) {
    (Node::start(Setup::default()).await, Node::start(Setup::default()).await)
}

/// What a node that gets no help answers.
async fn alone(prompt: &[u32]) -> Vec<u32> {
    Node::start(Setup::default()).await.answer(generate(prompt, ANSWER)).await.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn greedy_answers_are_equal_with_and_without_transfer() {
    let ways = [(Transports::Tcp, tcp::BACKEND), (Transports::Shm, shm::BACKEND), (Transports::Auto, shm::BACKEND)];
    let nixl = cfg!(feature = "nixl").then_some((Transports::Nixl, super::nixl::BACKEND));
    for (transports, backend) in ways.into_iter().chain(nixl) {
        equal_answers(transports, backend).await;
    }
}

async fn equal_answers(transports: Transports, backend: &'static str) {
    let node = || Node::start(Setup { transports, ..Setup::default() });
    let (prefill, decoder) = (node().await, node().await);
    let mut blocks = 0;
    for (length, seed) in [(15, 1), (16, 2), (17, 3), (32, 4), (50, 5), (100, 6)] {
        let prompt = tokens(length, seed);
        let expected = alone(&prompt).await;
        let (first, source) = prefill.prefill(&prompt).await;
        let mut got = vec![first];
        match source {
            Some(source) => {
                assert_eq!(source.blocks.len(), length / 16);
                let (rest, reused) = decoder.answer(decode(&prompt, first, ANSWER, &source)).await;
                assert_eq!(reused, length / 16 * 16, "the blocks of {length} tokens were here");
                got.extend(rest);
                blocks += length / 16;
            }
            None => {
                assert_eq!(length / 16, 0, "a prompt without a full block is not handed over");
                got.extend(
                    decoder
                        .answer(Generate { generated: 1, ..generate(&[&prompt[..], &[first]].concat(), ANSWER) })
                        .await
                        .0,
                );
            }
        }
        assert_eq!(got, expected, "{length} tokens");
    }
    assert_eq!(decoder.metrics.received_blocks.get(), blocks as u64);
    assert_eq!(decoder.metrics.received_bytes(backend).get(), (blocks * BLOCK) as u64);
    assert_eq!(prefill.metrics.sent_bytes(backend).get(), (blocks * BLOCK) as u64);
    until("the leases are ended", || prefill.leased() == (0, 0)).await;
    prefill.idle().await;
    decoder.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_prompt_alone_may_be_sent_again() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(64, 7);
    let (_, source) = prefill.prefill(&prompt).await;
    let disaggregated_params = source.expect("a lease").to_json();
    let request = Generate { disaggregated_params, ..generate(&prompt, ANSWER) };
    assert_eq!(decoder.answer(request).await, (alone(&prompt).await, 48), "the last token is computed here");
    assert_eq!(decoder.metrics.received_blocks.get(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_missing_blocks_travel() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(100, 8);
    decoder.answer(generate(&prompt[..40], 2)).await;
    for travelled in [4, 4] {
        // The second time everything is here already.
        let (first, source) = prefill.prefill(&prompt).await;
        let (_, reused) = decoder.answer(decode(&prompt, first, ANSWER, &source.expect("a lease"))).await;
        assert_eq!((reused, decoder.metrics.received_blocks.get()), (96, travelled));
    }
    until("the leases are ended", || prefill.leased() == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_came_are_told_as_events() {
    let (prefill, decoder) = nodes().await;
    let mut events = decoder.engine.take_events().expect("the first taker");
    let prompt = tokens(48, 9);
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    decoder.answer(decode(&prompt, first, 2, &source)).await;
    let stored = events.try_recv().expect("told before the first token").data;
    let kv_index::KvEventData::Stored { parent: None, blocks } = stored else { panic!("{stored:?}") };
    let hashes: Vec<u64> = blocks.iter().map(|block| block.engine.0).collect();
    assert_eq!(hashes, source.blocks.iter().map(|hash| hash.0).collect::<Vec<_>>());
}

/// Runs a decode request whose transfer fails with `reason`; the answer is what it would be anyway.
async fn falls_back(decoder: &Node, prompt: &[u32], first: u32, source: &Source, reason: Failure) {
    let before = decoder.metrics.failures(reason);
    let (rest, _) = decoder.answer(decode(prompt, first, ANSWER, source)).await;
    assert_eq!([&[first], &rest[..]].concat(), alone(prompt).await, "{reason:?}");
    assert_eq!(decoder.metrics.failures(reason), before + 1, "{reason:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_that_breaks_keeps_what_had_come() {
    // Beyond Welcome, the first block and a part of the second one.
    let place = 2 * BLOCK;
    for (number, (harm, reason)) in [
        (Harm::Cut(place), Failure::lost),
        (Harm::Flip(place), Failure::checksum),
        (Harm::Stall(place), Failure::timeout),
    ]
    .into_iter()
    .enumerate()
    {
        let prefill = Node::start(Setup::default()).await;
        let decoder = Node::start(Setup { timeout: Duration::from_millis(200), ..Setup::default() }).await;
        let prompt = tokens(100, 20 + number as u64);
        let (first, source) = prefill.prefill(&prompt).await;
        let mut source = source.expect("a lease");
        let _proxy = Proxy::before(&mut source, harm).await;
        falls_back(&decoder, &prompt, first, &source, reason).await;
        decoder.idle().await;
        assert_eq!(decoder.metrics.received_blocks.get(), 1, "{harm:?}: the first block was whole");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_refusal_falls_back() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(64, 10);
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let at = |backend: &str, address: &str| vec![Offer { backend: backend.into(), address: address.into() }];
    let nobody = Source { offers: at("tcp", "127.0.0.1:1"), ..source.clone() };
    let other_life = Source { boot_epoch: "earlier".into(), ..source.clone() };
    let no_lease = Source { lease: source.lease ^ 1, ..source.clone() };
    let other_revision = Source { revision: "r2".into(), ..source.clone() };
    let other_way = Source { offers: at("pigeon", "roof"), ..source.clone() };
    let other_prompt = Source { blocks: source.blocks[1..].to_vec(), ..source.clone() };
    for (source, reason) in [
        (nobody, Failure::connect),
        (other_life, Failure::refused),
        (no_lease, Failure::lease_gone),
        (other_revision, Failure::layout),
        (other_way, Failure::params),
        (other_prompt, Failure::params),
    ] {
        let decoder = Node::start(Setup::default()).await;
        falls_back(&decoder, &prompt, first, &source, reason).await;
        decoder.idle().await;
    }
    let request = Generate { disaggregated_params: "{".into(), ..generate(&prompt, ANSWER) };
    assert_eq!(decoder.answer(request).await.0, alone(&prompt).await);
    assert_eq!(decoder.metrics.failures(Failure::params), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_another_model_are_not_taken() {
    let prefill = Node::start(Setup { other_model: true, ..Setup::default() }).await;
    let decoder = Node::start(Setup::default()).await;
    let prompt = tokens(64, 11);
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let (rest, reused) = decoder.answer(decode(&prompt, first, ANSWER, &source)).await;
    assert_eq!((rest.len(), reused), (ANSWER as usize - 1, 0));
    assert_eq!(decoder.metrics.failures(Failure::layout), 1);

    // Also when the asking side does not look.
    let layout = decoder.engine.exchange().expect("there is one").layout();
    let hello = Hello {
        version: VERSION,
        boot_epoch: source.boot_epoch.clone(),
        revision: source.revision.clone(),
        layout: serde_json::to_string(&layout).expect("JSON"),
    };
    let mut socket = TcpStream::connect(source.address(tcp::BACKEND).expect("TCP")).await.expect("the node listens");
    let mut frame = BytesMut::new();
    encode_frame(&ToServer { ask: Some(Ask::Hello(hello)) }, &mut frame);
    socket.write_all(&frame).await.expect("sent");
    let answer = within("an answer", read::<ToClient>(&mut socket)).await.expect("a message").answer;
    assert!(matches!(answer, Some(Answer::Refused(refused)) if refused.refusal() == Refusal::Layout));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_prefill_worker_is_only_latency() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(100, 12);
    let (first, source) = prefill.prefill(&prompt).await;
    let mut source = source.expect("a lease");
    let proxy = Proxy::before(&mut source, Harm::Stall(3 * BLOCK)).await;
    let mut outputs = decoder.submit(decode(&prompt, first, ANSWER, &source));
    within("the transfer begins", proxy.stalled.notified()).await;
    drop(prefill);
    proxy.kill();
    let (rest, _) = whole(&mut outputs).await;
    assert_eq!([&[first], &rest[..]].concat(), alone(&prompt).await);
    assert_eq!(decoder.metrics.failures(Failure::lost), 1);
    decoder.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelling_a_transfer_frees_both_sides_at_once() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(100, 13);
    let (first, source) = prefill.prefill(&prompt).await;
    let mut source = source.expect("a lease");
    // Only the blocks stall: the message that ends the lease is answered by a Welcome of a few bytes.
    let proxy = Proxy::before(&mut source, Harm::Stall(BLOCK)).await;
    let outputs = decoder.submit(decode(&prompt, first, ANSWER, &source));
    within("the transfer begins", proxy.stalled.notified()).await;
    assert!(decoder.engine.load().active_blocks >= 6, "room is reserved");
    assert_eq!(decoder.engine.load().waiting, 1);
    drop(outputs);
    decoder.idle().await;
    until("the lease is ended", || prefill.leased() == (0, 0)).await;
    prefill.idle().await;
    until("counted", || decoder.metrics.cancelled.get() == 1).await;
    assert_eq!(decoder.engine.load().waiting, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_requests_run_while_a_transfer_stalls() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(100, 14);
    let (first, source) = prefill.prefill(&prompt).await;
    let mut source = source.expect("a lease");
    let proxy = Proxy::before(&mut source, Harm::Stall(3 * BLOCK)).await;
    let mut transferred = decoder.submit(decode(&prompt, first, ANSWER, &source));
    within("the transfer begins", proxy.stalled.notified()).await;
    for seed in 30..40 {
        let other = tokens(40, seed);
        assert_eq!(decoder.answer(generate(&other, 60)).await.0.len(), 60);
    }
    // The very prompt that is on its way, too.
    assert_eq!(decoder.answer(generate(&prompt, ANSWER)).await.0, alone(&prompt).await);
    assert!(transferred.try_recv().is_err(), "it still waits for its blocks");
    proxy.kill();
    whole(&mut transferred).await;
    decoder.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_nobody_takes_expires() {
    let prefill = Node::start(Setup { lease: Duration::from_millis(50), ..Setup::default() }).await;
    let decoder = Node::start(Setup::default()).await;
    let prompt = tokens(64, 15);
    let (first, source) = prefill.prefill(&prompt).await;
    assert_eq!((prefill.leased(), prefill.engine.load().active_blocks), ((1, 4), 4));
    prefill.idle().await;
    until("it is counted", || prefill.metrics.leases_expired.get() == 1).await;
    assert_eq!(prefill.leased(), (0, 0));
    falls_back(&decoder, &prompt, first, &source.expect("a lease"), Failure::lease_gone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_needs_leased_blocks_waits_for_them_parked() {
    let prefill = Node::start(Setup { blocks: 8, lease: Duration::from_millis(300), ..Setup::default() }).await;
    let (_, source) = prefill.prefill(&tokens(64, 51)).await;
    assert_eq!((source.is_some(), prefill.leased()), (true, (1, 4)));
    // Its 7 blocks are not there until the lease has expired.
    assert_eq!(prefill.answer(generate(&tokens(110, 52), 2)).await.0.len(), 2);
    until("it is counted", || prefill.metrics.leases_expired.get() == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_ends_at_its_first_token_is_not_handed_over() {
    let prefill = Node::start(Setup::default()).await;
    let prompt = tokens(64, 56);
    let first = alone(&prompt).await[0];
    let stop = Stop { max_tokens: 9, token_ids: vec![first], ..Default::default() };
    for (request, reason) in [
        (generate(&prompt, 1), FinishReason::Length),
        (Generate { stop: Some(stop), ..generate(&prompt, 9) }, FinishReason::StopToken),
    ] {
        let mut outputs = prefill.submit(Generate { prefill_only: true, ..request });
        let mut last = None;
        while let Some(output) = within("an output", outputs.recv()).await {
            last = Some(output);
        }
        assert!(matches!(last, Some(EngineOutput::Finished(finish)) if finish.reason == reason));
    }
    assert_eq!(prefill.leased(), (0, 0));
    prefill.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_ends_with_the_drain_and_the_engine_with_leases_held() {
    let (prefill, decoder) = nodes().await;
    let prompt = tokens(64, 57);
    let (first, source) = prefill.prefill(&prompt).await;
    prefill.drain.stop();
    within("the server ends", prefill.serving).await.expect("no panic");
    falls_back(&decoder, &prompt, first, &source.expect("a lease"), Failure::connect).await;
    drop(prefill.engine);
}
