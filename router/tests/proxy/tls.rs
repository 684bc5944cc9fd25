//! Servers behind TLS. The certificates in `tls/` are for 127.0.0.1, signed by an authority that nobody else trusts.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio_rustls::TlsAcceptor;

use crate::harness::*;
use crate::server::{Behaviour, Server};

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/proxy/tls").join(name)
}

fn acceptor() -> TlsAcceptor {
    let certificate = CertificateDer::from_pem_file(file("server.pem")).expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(file("server.key")).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("versions of TLS").with_no_client_auth().with_single_cert(vec![certificate], key);
    Arc::new(config.expect("the key is the certificate's")).into()
}

fn trusting() -> String {
    format!("--worker-ca-file={}", file("authority.pem").display())
}

#[tokio::test]
async fn a_server_behind_tls_answers_beside_one_that_is_not() {
    let (secure, plain) = (Server::start_tls("secure", acceptor()).await, Server::start("plain").await);
    let router = Router::start(&[&secure, &plain], &[&trusting(), "--router-mode=round-robin"]).await;
    for stream in [false, true] {
        for _ in 0..2 {
            let answer = router.chat(json!({"stream": stream})).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
            assert!(!stream || !answer.events().is_empty());
        }
    }
    assert_eq!((secure.seen().len(), plain.seen().len()), (2, 2));
    assert_eq!(secure.seen()[0].headers["host"], secure.address.to_string().as_str());
}

#[tokio::test]
async fn a_long_answer_comes_through_tls_whole_and_the_connection_serves_again() {
    let server = Server::start_tls("secure", acceptor()).await;
    let router = Router::start(&[&server], &[&trusting(), "--worker-check-interval-secs=600"]).await;
    server.behave(Behaviour::Tokens(2000));
    let before = server.connections();
    let answer = router.chat(json!({"stream": true})).await;
    assert!(answer.events().len() >= 2000);
    assert_eq!(router.chat(json!({})).await.status, 200);
    assert_eq!(server.connections(), before, "kept alive");
}

#[tokio::test]
async fn a_server_that_nobody_vouches_for_gets_nothing() {
    let server = Server::start_tls("secure", acceptor()).await;
    // It is trusted under another name only: the certificate is for 127.0.0.1.
    let by_name = server.url().replace("127.0.0.1", "localhost");
    let router = Router::before_urls(&[by_name], &[&trusting()]).await;
    until("it is dialed", || server.connections() > 0).await;
    let answer = router.chat(json!({})).await;
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert!(server.seen().is_empty(), "not even a health check");
}

#[tokio::test]
async fn a_file_without_authorities_ends_the_router_at_its_start() {
    let server = Server::start_tls("secure", acceptor()).await;
    for (name, reason) in [("server.key", "no certificate"), ("missing.pem", "missing.pem")] {
        let flag = format!("--worker-ca-file={}", file(name).display());
        let error = Router::fails(&[server.url()], &[&flag]).await;
        assert!(error.contains("--worker-ca-file") && error.contains(reason), "{error}");
    }
}
