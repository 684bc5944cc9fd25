//! Our sockets against those of the `zeromq` crate, and against peers that mean no good.

use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use super::collector::PEERS;
use super::handshake::{shake, subscription};
use super::publisher::READER_BYTES;
use super::*;

/// Longest wait for anything here, on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(30);

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("waited {PATIENCE:?} in vain for {what}"))
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let poll = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        while !condition() {
            ticks.tick().await;
        }
    };
    soon(what, poll).await;
}

async fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    (listener, address)
}

fn parts<const N: usize>(parts: [&'static str; N]) -> Vec<Bytes> {
    parts.map(|part| Bytes::from_static(part.as_bytes())).to_vec()
}

fn message(of: &[Bytes]) -> ZmqMessage {
    std::collections::VecDeque::from(of.to_vec()).try_into().expect("not empty")
}

async fn publisher() -> (Publisher, PublisherCounters, String) {
    let (listener, address) = listener().await;
    let counters = PublisherCounters::default();
    (Publisher::new(listener, counters.clone()), counters, address)
}

async fn collector() -> (Collector, CollectorCounters, String) {
    let (listener, address) = listener().await;
    let counters = CollectorCounters::default();
    (Collector::on(listener, counters.clone()), counters, address)
}

#[tokio::test]
async fn a_subscriber_reads_a_publisher_of_another_make() {
    let mut theirs = PubSocket::new();
    let address = theirs.bind("tcp://127.0.0.1:0").await.expect("a free port").to_string();
    let mut ours = Subscriber::connect(&address, &["a", "c"], PATIENCE).await.expect("it answers");
    let large = [Bytes::from_static(b"c"), vec![7; 1 << 20].into()];
    let got = async {
        // Until the subscription has arrived, nothing is sent.
        loop {
            theirs.send(message(&parts(["a", "first"]))).await.expect("bound");
            if let Ok(got) = timeout(Duration::from_millis(20), ours.next()).await {
                return got;
            }
        }
    };
    assert_eq!(soon("the first message", got).await.expect("one"), parts(["a", "first"]));
    theirs.send(message(&parts(["b", "of no interest"]))).await.expect("bound");
    theirs.send(message(&large)).await.expect("bound");
    let next = async {
        loop {
            let got = ours.next().await.expect("a message");
            if got != parts(["a", "first"]) {
                return got;
            }
        }
    };
    assert_eq!(soon("the large one", next).await, large);
    drop(theirs);
    soon("its end", async { while ours.next().await.is_ok() {} }).await;
}

#[tokio::test]
async fn a_publisher_serves_subscribers_of_any_make_their_topics() {
    let (publisher, counters, address) = publisher().await;
    publisher.send(&parts(["a", "nobody listens"]));
    let mut ours = Subscriber::connect(&format!("tcp://{address}"), &["a"], PATIENCE).await.expect("it answers");
    let mut theirs = SubSocket::new();
    theirs.subscribe("").await.expect("subscribed");
    theirs.connect(&format!("tcp://{address}")).await.expect("it answers");
    until("both have subscribed", || publisher.readers(b"a") == 2).await;
    publisher.send(&parts(["b", "1"]));
    publisher.send(&parts(["ab", "2", ""]));
    assert_eq!(soon("ours", ours.next()).await.expect("a message"), parts(["ab", "2", ""]));
    for expected in [parts(["b", "1"]), parts(["ab", "2", ""])] {
        assert_eq!(soon("theirs", theirs.recv()).await.expect("a message").into_vec(), expected);
    }
    theirs.unsubscribe("").await.expect("unsubscribed");
    until("one is left", || publisher.readers(b"a") == 1).await;
    drop(ours);
    until("nobody is left", || publisher.readers(b"a") == 0).await;
    assert_eq!((counters.dropped.get(), counters.refused.get()), (0, 0));
}

#[tokio::test]
async fn what_waits_for_a_reader_is_bounded_and_the_others_get_everything() {
    let (publisher, counters, address) = publisher().await;
    let mut idle = TcpStream::connect(&address).await.expect("it listens");
    shake(&mut idle, "SUB", &["PUB"]).await.expect("it speaks");
    idle.write_all(&message::encode(&[subscription("")])).await.expect("open");
    let mut reads = Subscriber::connect(&format!("tcp://{address}"), &[""], PATIENCE).await.expect("it answers");
    until("both have subscribed", || publisher.readers(b"t") == 2).await;
    let body = Bytes::from(vec![0; 1 << 20]);
    let count = READER_BYTES / body.len() + 32;
    for number in 0..count {
        publisher.send(&[Bytes::from_static(b"t"), Bytes::from(number.to_string()), body.clone()]);
        let got = soon("the next message", reads.next()).await.expect("a message");
        assert_eq!(got[1], number.to_string());
    }
    assert!((1..=32).contains(&counters.dropped.get()), "{} dropped", counters.dropped.get());
    drop(idle);
    until("its queue is gone", || publisher.readers(b"t") == 1).await;
}

#[tokio::test]
async fn publishers_connect_to_a_collector() {
    let (mut collector, counters, address) = collector().await;
    for name in ["one", "two"] {
        let mut theirs = PubSocket::new();
        theirs.connect(&format!("tcp://{address}")).await.expect("it listens");
        let got = async {
            loop {
                theirs.send(message(&parts(["topic", name]))).await.expect("connected");
                if let Ok(got) = timeout(Duration::from_millis(20), collector.next()).await
                    && got.as_ref().is_ok_and(|parts| parts[1] == name)
                {
                    return;
                }
            }
        };
        soon("its message", got).await;
    }
    assert_eq!(counters.peers.get(), 0);
}

#[tokio::test]
async fn a_port_takes_so_many_peers_and_messages_of_such_a_size() {
    let (mut collector, counters, address) = collector().await;
    let mut peers = Vec::new();
    for _ in 0..PEERS {
        let mut peer = TcpStream::connect(&address).await.expect("it listens");
        shake(&mut peer, "PUB", &["SUB"]).await.expect("it speaks");
        peers.push(peer);
    }
    let mut late = TcpStream::connect(&address).await.expect("the kernel takes it");
    let end = soon("the end of the connection", late.read_u8()).await;
    assert!(end.is_err(), "{end:?}");
    assert_eq!(counters.peers.get(), 1);
    // A frame that announces more than any message may have ends its connection, and nothing is set aside for it.
    let mut huge = peers.pop().expect("many");
    huge.write_all(&[2, 0x10, 0, 0, 0, 0, 0, 0, 0]).await.expect("open");
    until("it is refused", || counters.large.get() == 1).await;
    // Its place is free again.
    let mut theirs = PubSocket::new();
    theirs.connect(&format!("tcp://{address}")).await.expect("it listens");
    let got = async {
        loop {
            theirs.send(message(&parts(["topic", "x"]))).await.expect("connected");
            if let Ok(Ok(got)) = timeout(Duration::from_millis(20), collector.next()).await {
                return got;
            }
        }
    };
    assert_eq!(soon("its message", got).await, parts(["topic", "x"]));
}

#[tokio::test]
async fn a_collector_that_is_not_read_holds_its_publishers_back() {
    let (mut collector, _counters, address) = collector().await;
    let mut peer = TcpStream::connect(&address).await.expect("it listens");
    shake(&mut peer, "PUB", &["SUB"]).await.expect("it speaks");
    let (_read, mut write) = peer.into_split();
    let large = message::encode(&[vec![0; 4 << 20].into()]);
    const COUNT: usize = 64;
    let sending = tokio::spawn(async move {
        for _ in 0..COUNT {
            write.write_all(&large).await.expect("open");
        }
        write
    });
    let first = soon("the first", collector.next()).await.expect("a message");
    assert_eq!(first[0].len(), 4 << 20);
    assert!(!sending.is_finished(), "256 MB are not taken in advance");
    for _ in 1..COUNT {
        soon("another one", collector.next()).await.expect("a message");
    }
    soon("the sender", sending).await.expect("all is taken in the end");
}

#[tokio::test]
async fn who_does_not_speak_the_protocol_is_sent_away() {
    let (_collector, _counters, address) = collector().await;
    let mut http = TcpStream::connect(&address).await.expect("it listens");
    http.write_all(&[b'G'; 64]).await.expect("open");
    let mut answer = Vec::new();
    // Closed or reset: it ends.
    _ = soon("its end", http.read_to_end(&mut answer)).await;
    let mut subscriber = TcpStream::connect(&address).await.expect("it listens");
    shake(&mut subscriber, "SUB", &["SUB"]).await.expect("so far it is polite");
    let closed = soon("its end", subscriber.read_u8()).await;
    assert!(closed.is_err(), "two subscribers have nothing to say to each other");
    let unreachable = Subscriber::connect("udp://127.0.0.1:1", &[""], PATIENCE).await;
    assert!(unreachable.is_none());
}

#[tokio::test]
async fn a_dealer_asks_a_router_of_another_make() {
    let mut theirs = RouterSocket::new();
    let address = theirs.bind("tcp://127.0.0.1:0").await.expect("a free port").to_string();
    let mut ours = soon("a connection", Dialed::dealer(&address)).await.expect("it answers");
    ours.send(&parts(["", "question"])).await.expect("open");
    let question = soon("the question", theirs.recv()).await.expect("a message").into_vec();
    let [identity, rest @ ..] = &question[..] else { panic!("{question:?}") };
    assert_eq!(rest, parts(["", "question"]));
    let answer = [identity.clone(), Bytes::new(), Bytes::from_static(b"answer")];
    theirs.send(message(&answer)).await.expect("open");
    assert_eq!(ours.next(PATIENCE).await.expect("a message"), parts(["", "answer"]));
    let silent = ours.next(Duration::from_millis(20)).await;
    assert!(matches!(silent, Err(ZmtpError::Silent)), "{silent:?}");
}
