//! Peers that get it wrong: each loses its own connection, and nobody else notices.

use bytes::{BufMut, BytesMut};
use protocol::request_plane::{ErrorCode, Failed, Hello, Ping, client_frame};
use tokio::io::AsyncWriteExt;

use crate::harness::*;

/// What a stranger hears that opens with `body`, until the end of its connection.
async fn refused(worker: &Worker, body: client_frame::Body) -> Failed {
    let mut stranger = worker.stranger().await;
    stranger.send(0, body).await;
    let failed = stranger.failed(0).await;
    assert_eq!(stranger.recv_or_end().await, None);
    failed
}

#[tokio::test]
async fn another_life_or_another_worker_is_refused() {
    let worker = Worker::start(&[]).await;
    let hello = worker.hello();
    let wrong = [
        Hello { boot_epoch: "local/1/0".into(), ..hello.clone() },
        Hello { instance_id: hello.instance_id + 1, ..hello.clone() },
        Hello { boot_epoch: String::new(), ..hello.clone() },
    ];
    for hello in wrong {
        let failed = refused(&worker, client_frame::Body::Hello(hello)).await;
        assert_eq!(failed.code(), ErrorCode::WrongWorker);
    }
    let failed = refused(&worker, client_frame::Body::Hello(Hello { protocol_version: 9, ..hello })).await;
    assert!(failed.message.contains("protocol version 9"), "{}", failed.message);
    let failed = refused(&worker, client_frame::Body::Ping(Ping { nonce: 1 })).await;
    assert!(failed.message.contains("Hello"), "{}", failed.message);
    worker.router().await.nothing_more().await;
}

#[tokio::test]
async fn malformed_bytes_close_only_their_connection() {
    let mut worker = Worker::start(&[]).await;
    let mut healthy = worker.router().await;
    healthy.generate(1).await;
    let submission = worker.next_submission().await;

    let mut too_long = BytesMut::new();
    too_long.put_u32(u32::MAX);
    let attacks: [&[u8]; 4] =
        [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", &[0, 0, 0, 2, 0xff, 0xff], &too_long, &[0, 0, 0, 0]];
    for attack in attacks {
        for handshake in [false, true] {
            let mut attacker = if handshake { worker.router().await } else { worker.stranger().await };
            attacker.socket.write_all(attack).await.expect("sent");
            assert_eq!(attacker.failed(0).await.code(), ErrorCode::InvalidRequest, "{attack:?}");
            assert_eq!(attacker.recv_or_end().await, None);
        }
    }
    // Half a frame, then gone.
    let mut attacker = worker.router().await;
    attacker.socket.write_all(&[0, 0, 1, 0, 7]).await.expect("sent");
    drop(attacker);

    submission.first(9);
    assert_eq!(healthy.output(1).await.token_ids, [9]);
}

#[tokio::test]
async fn a_stream_id_is_never_opened_twice() {
    let mut worker = Worker::start(&[]).await;
    for second in [5, 4, 0] {
        let mut router = worker.router().await;
        router.generate(5).await;
        let submission = worker.next_submission().await;
        router.generate(second).await;
        let failed = router.failed(0).await;
        assert!(failed.message.contains("after stream 5"), "{}", failed.message);
        submission.cancelled().await;
    }
}

#[tokio::test]
async fn a_stranger_that_says_nothing_is_let_go() {
    let worker = Worker::start(&[]).await;
    let mut stranger = worker.stranger().await;
    let failed = stranger.failed(0).await;
    assert_eq!(failed.code(), ErrorCode::Deadline, "{}", failed.message);
    assert_eq!(stranger.recv_or_end().await, None);
}
