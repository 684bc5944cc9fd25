//! What carries a connection to a server: TCP, or TLS over it; and whose certificates are trusted.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Why nobody can be trusted.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The file of `--worker-ca-file` cannot be used.
    #[error("--worker-ca-file {0}: {1}")]
    File(PathBuf, String),
    /// The machine has no certificate authorities.
    #[error(
        "this machine's certificate authorities cannot be read ({0}): name those of the https:// servers with --worker-ca-file"
    )]
    Machine(String),
    /// The settings of TLS do not fit together.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
}

/// Whose certificates are trusted. One of them serves all connections, so that sessions are resumed.
#[derive(Clone)]
pub(super) struct Trust(Arc<ClientConfig>);

impl Trust {
    /// The authorities in `file`, or those of the machine. Reads files; cost: a few ms.
    pub(super) fn load(file: Option<&Path>) -> Result<Self, TrustError> {
        let mut roots = RootCertStore::empty();
        let reason = match file {
            Some(path) => {
                let failed = |error: &dyn std::fmt::Display| TrustError::File(path.to_owned(), error.to_string());
                for certificate in CertificateDer::pem_file_iter(path).map_err(|error| failed(&error))? {
                    let certificate = certificate.map_err(|error| failed(&error))?;
                    roots.add(certificate).map_err(|error| failed(&error))?;
                }
                failed(&"it has no certificate")
            }
            None => {
                let found = rustls_native_certs::load_native_certs();
                // Some machines have certificates that nobody can read; the others are good all the same.
                roots.add_parsable_certificates(found.certs);
                TrustError::Machine(
                    found.errors.first().map_or_else(|| "there are none".to_owned(), ToString::to_string),
                )
            }
        };
        if roots.is_empty() {
            return Err(reason);
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(Arc::new(config)))
    }

    /// Makes sure that `host` is at the other end.
    pub(super) async fn greet(&self, host: &str, stream: TcpStream) -> io::Result<Socket> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let stream = TlsConnector::from(self.0.clone()).connect(name, stream).await?;
        Ok(Socket::Tls(Box::new(stream)))
    }
}

/// A connection.
pub(super) enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
