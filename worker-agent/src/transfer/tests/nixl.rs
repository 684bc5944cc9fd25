//! NIXL: what is read is what was there, and what is read for nobody keeps its room until it has ended.

use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::task::AbortOnDropHandle;

use super::pressure::{blocks, exchange};
use super::*;
use crate::engine::builtin::exchange::Lease;
use crate::transfer::nixl::{self, Agent, MOST_LEFT};
use crate::transfer::wire::{AgentHead, BlockPlace, Welcome};

fn setup() -> Setup {
    Setup { transports: Transports::Nixl, ..Setup::default() }
}

async fn pair() -> (Node, Node) {
    (Node::start(setup()).await, Node::start(setup()).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_read_is_what_was_there_and_only_what_was_missing() {
    let (prefill, decoder) = pair().await;
    let prompt = tokens(100, 120);
    decoder.answer(generate(&prompt[..40], 2)).await;
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let held = exchange(&prefill).lease(source.lease).expect("held");
    let (rest, reused) = decoder.answer(decode(&prompt, first, ANSWER, &source)).await;
    assert_eq!(([&[first], &rest[..]].concat(), reused), (alone(&prompt).await, 96));
    assert_eq!(decoder.metrics.received_bytes(nixl::BACKEND).get(), 4 * BLOCK as u64);
    assert_eq!(prefill.metrics.sent_bytes(nixl::BACKEND).get(), 4 * BLOCK as u64);

    // What the decode worker would hand out are the blocks that came.
    let (_, copy) = decoder.prefill(&prompt).await;
    let copy = exchange(&decoder).lease(copy.expect("a lease").lease).expect("held");
    assert_eq!(copy.blocks().len(), 6);
    for index in 2..6 {
        assert_eq!(copy.bytes(index), held.bytes(index), "block {index}");
    }
    until("the lease is ended", || prefill.leased() == (0, 0)).await;
    drop(held);
    prefill.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_has_ended_or_is_of_another_life_falls_back() {
    let prefill = Node::start(Setup { lease: Duration::from_millis(50), ..setup() }).await;
    let prompt = tokens(64, 121);
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let other_life = Source { boot_epoch: "earlier".into(), ..source.clone() };
    until("it expires", || prefill.metrics.leases_expired.get() == 1).await;
    for (source, reason) in [(source, Failure::lease_gone), (other_life, Failure::refused)] {
        let decoder = Node::start(setup()).await;
        falls_back(&decoder, &prompt, first, &source, reason).await;
        decoder.idle().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_without_an_agent_is_no_way() {
    let prefill = Node::start(Setup::default()).await;
    let prompt = tokens(64, 122);
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let offers = vec![Offer { backend: nixl::BACKEND.into(), address: source.offers[0].address.clone() }];
    let claimed = Source { offers, ..source.clone() };
    for (source, reason) in [(source, Failure::params), (claimed, Failure::refused)] {
        falls_back(&Node::start(setup()).await, &prompt, first, &source, reason).await;
    }
}

/// What a worker tells of its blocks.
#[derive(Clone, Copy, Debug)]
enum Harm {
    /// The truth.
    None,
    /// It writes to the second block after it has told of it.
    Overwrites,
    /// It gives a place of the second block that is not in its arena.
    Strays,
    /// It is gone after the first block.
    Dies,
}

/// Takes the place of `prefill`, with an agent of the same memory.
struct Impostor {
    agent: Arc<Agent>,
    address: String,
    serving: JoinHandle<()>,
}

impl Impostor {
    async fn of(prefill: &Node, source: &Source, agent: Agent, harm: Harm) -> Self {
        let agent = Arc::new(agent);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let (head, lease) = (agent.head(), exchange(prefill).lease(source.lease).expect("held"));
        let serving = tokio::spawn(async move {
            // Ends with this task.
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                connections.spawn(answer(socket, head.clone(), lease.clone(), harm));
            }
        });
        Self { agent, address, serving }
    }

    /// An agent that does nothing for those who read from it: their reads wait until it is gone.
    fn idle_agent(prefill: &Node) -> Agent {
        Agent::open(exchange(prefill).arena().clone(), false, "TLS=tcp").expect("an agent")
    }

    fn over(&self, source: &Source) -> Source {
        let offers = vec![Offer { backend: nixl::BACKEND.into(), address: self.address.clone() }];
        Source { offers, ..source.clone() }
    }

    /// As if its process were killed.
    async fn kill(self) {
        self.serving.abort();
        // The task has ended when its handle says so.
        let _ = self.serving.await;
        drop(Arc::into_inner(self.agent).expect("nobody else has it"));
    }
}

/// One connection.
async fn answer(mut socket: TcpStream, head: AgentHead, lease: Arc<Lease>, harm: Harm) {
    while let Ok(ToServer { ask: Some(ask) }) = read(&mut socket).await {
        match ask {
            Ask::Hello(_) => say(&mut socket, Answer::Welcome(Welcome { version: VERSION })).await,
            Ask::Agent(()) => say(&mut socket, Answer::Agent(head.clone())).await,
            Ask::Locate(pull) if !tell(&mut socket, &lease, &pull.blocks, harm).await => break,
            _ => {}
        }
    }
}

async fn say(socket: &mut TcpStream, answer: Answer) {
    let mut frame = BytesMut::new();
    encode_frame(&ToClient { answer: Some(answer) }, &mut frame);
    // A client that has seen enough may be gone.
    let _ = socket.write_all(&frame).await;
}

async fn tell(socket: &mut TcpStream, lease: &Lease, blocks: &[u64], harm: Harm) -> bool {
    for (index, &hash) in blocks.iter().enumerate() {
        let bytes = lease.bytes(index).len() as u32;
        let (mut offset, mut checksum) = (lease.offset(index), lease.checksum(index));
        match harm {
            Harm::Dies if index == 1 => return false,
            Harm::Overwrites if index == 1 => checksum ^= 1,
            Harm::Strays if index == 1 => offset = 1 << 40,
            _ => {}
        }
        say(socket, Answer::Place(BlockPlace { hash, bytes, checksum, offset })).await;
    }
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_cannot_be_trusted_is_only_latency() {
    for (number, (harm, reason, whole)) in
        [(Harm::Overwrites, Failure::checksum, 1), (Harm::Strays, Failure::lost, 0), (Harm::Dies, Failure::lost, 0)]
            .into_iter()
            .enumerate()
    {
        let (prefill, decoder) = pair().await;
        let prompt = tokens(100, 130 + number as u64);
        let (first, source) = prefill.prefill(&prompt).await;
        let source = source.expect("a lease");
        let agent = Agent::start(exchange(&prefill).arena().clone()).expect("an agent");
        let impostor = Impostor::of(&prefill, &source, agent, harm).await;
        falls_back(&decoder, &prompt, first, &impostor.over(&source), reason).await;
        decoder.idle().await;
        assert_eq!(decoder.metrics.received_blocks.get(), whole, "{harm:?}");
        impostor.kill().await;
    }
}

/// Fetches without an engine around it.
struct Fetches {
    own: Arc<Exchange>,
    nixl: Nixl,
    lane: Lane,
}

impl Fetches {
    fn to(decoder: &Node) -> Self {
        let own = exchange(decoder);
        let nixl = Nixl::start(&own, Duration::from_secs(20)).expect("an agent");
        Self { own, nixl, lane: Lane::start().expect("a thread") }
    }

    /// The outcome, and how many blocks came.
    async fn begin(&self, prompt: &[u32], source: Source) -> AbortOnDropHandle<(Result<(), TransferError>, usize)> {
        let mut into = self.own.reserve(blocks(prompt), Duration::from_secs(20)).await.expect("room");
        let nixl = self.nixl.clone();
        self.lane.run(async move {
            let address = source.address(nixl::BACKEND).expect("offered");
            let outcome = nixl.pull(&source, address, &mut into, Instant::now() + LONGEST_PULL).await;
            (outcome, into.received())
        })
    }

    /// Those that know a worker are one, who fetches from it another, and a read the third.
    async fn until_holders(&self, source: &Source, count: usize) {
        until("so many holders", || self.nixl.remotes.holders(&source.boot_epoch) == count).await;
    }

    fn hanging(&self, source: &Source) -> usize {
        self.nixl.remotes.hanging(&source.boot_epoch)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_killed_while_it_is_read_from_can_come_back() {
    let (prefill, decoder) = pair().await;
    let prompt = tokens(100, 140);
    let source = prefill.prefill(&prompt).await.1.expect("a lease");
    let impostor = Impostor::of(&prefill, &source, Impostor::idle_agent(&prefill), Harm::None).await;
    let fetches = Fetches::to(&decoder);
    let pull = fetches.begin(&prompt, impostor.over(&source)).await;
    fetches.until_holders(&source, 3).await;
    let beside = fetches.begin(&tokens(16, 141), impostor.over(&source)).await;
    fetches.until_holders(&source, 5).await;
    impostor.kill().await;
    for pull in [pull, beside] {
        let (outcome, received) = within("its end", pull).await.expect("no panic");
        assert_eq!((outcome.expect_err("it is gone").reason(), received), (Failure::lost, 0));
    }
    // First nothing can come any more, and then the room rests: some part of a read may not have heard of the end.
    until("the connection is ended", || fetches.nixl.remotes.has_forgotten(&source.boot_epoch)).await;
    assert_eq!(fetches.own.reserved(), 7, "it rests");
    let again = fetches.begin(&prompt, source.clone()).await;
    let (outcome, _) = within("a refusal", again).await.expect("no panic");
    assert_eq!(outcome.expect_err("not as long as that lasts").reason(), Failure::connect);
    until("the room is given back", || fetches.own.reserved() == 0).await;

    let again = fetches.begin(&prompt, source.clone()).await;
    let (outcome, received) = within("all blocks", again).await.expect("no panic");
    assert_eq!((outcome.is_ok(), received), (true, 6), "by another connection");
    decoder.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_that_takes_too_long_keeps_its_room_until_it_has_ended() {
    let prefill = Node::start(setup()).await;
    let decoder = Node::start(Setup { timeout: Duration::from_millis(300), ..setup() }).await;
    let prompt = tokens(100, 150);
    let (first, source) = prefill.prefill(&prompt).await;
    let source = source.expect("a lease");
    let impostor = Impostor::of(&prefill, &source, Impostor::idle_agent(&prefill), Harm::None).await;
    falls_back(&decoder, &prompt, first, &impostor.over(&source), Failure::timeout).await;
    assert_eq!(exchange(&decoder).reserved(), 6, "it may still write there");
    impostor.kill().await;
    until("the room is given back", || exchange(&decoder).reserved() == 0).await;
    decoder.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_for_nobody_keeps_its_room_until_it_has_ended() {
    let (prefill, decoder) = pair().await;
    let prompt = tokens(100, 160);
    let source = prefill.prefill(&prompt).await.1.expect("a lease");
    let impostor = Impostor::of(&prefill, &source, Impostor::idle_agent(&prefill), Harm::None).await;
    let fetches = Fetches::to(&decoder);
    let pull = fetches.begin(&prompt, impostor.over(&source)).await;
    fetches.until_holders(&source, 3).await;
    drop(pull);
    fetches.until_holders(&source, 2).await;
    assert_eq!(fetches.own.reserved(), 6, "the read may still write there");
    // Others get other blocks.
    assert_eq!(decoder.answer(generate(&prompt, ANSWER)).await.0, alone(&prompt).await);
    impostor.kill().await;
    until("the room is given back", || fetches.own.reserved() == 0).await;
    decoder.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_ends_no_reads_is_read_from_a_few_times_only() {
    let (prefill, decoder) = pair().await;
    let prompt = tokens(100, 170);
    let source = prefill.prefill(&prompt).await.1.expect("a lease");
    let impostor = Impostor::of(&prefill, &source, Impostor::idle_agent(&prefill), Harm::None).await;
    let fetches = Fetches::to(&decoder);
    for left in 0..MOST_LEFT {
        let pull = fetches.begin(&tokens(16, 171 + left as u64), impostor.over(&source)).await;
        fetches.until_holders(&source, left + 3).await;
        drop(pull);
        fetches.until_holders(&source, left + 2).await;
    }
    until("they hang", || fetches.hanging(&source) == MOST_LEFT).await;
    let one_more = fetches.begin(&prompt, impostor.over(&source)).await;
    let (outcome, _) = within("a refusal", one_more).await.expect("no panic");
    let refused = outcome.expect_err("its room would not come back either");
    assert!(refused.is_no_way(), "another way may lead there: {refused}");
    assert!(refused.to_string().contains("4 NIXL reads from it were given up and have not ended"), "{refused}");
    assert_eq!(fetches.own.reserved(), MOST_LEFT);
    impostor.kill().await;
    until("the rooms are given back", || fetches.own.reserved() == 0).await;
    let again = fetches.begin(&prompt, source.clone()).await;
    let (outcome, received) = within("all blocks", again).await.expect("no panic");
    assert_eq!((outcome.is_ok(), received), (true, 6), "by another connection");
    decoder.idle().await;
}
