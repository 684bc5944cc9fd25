//! Sources against a real server that speaks the hub's routes, with the redirects, ranges and failures of the real one.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use parking_lot::Mutex;

use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A hub with one repository, `org/name`.
#[derive(Default)]
struct Hub {
    files: HashMap<String, Vec<u8>>,
    token: Option<String>,
    /// The first answer with a body breaks off after so many bytes.
    break_after: Mutex<Option<usize>>,
    /// Announces this digest instead of the true one.
    wrong_digest: bool,
    /// `METHOD path range`, and whether a token came along.
    log: Mutex<Vec<(String, bool)>>,
    /// Where large files are kept: another server, as with the real hub.
    storage: Mutex<String>,
}

impl Hub {
    fn with(files: &[(&str, &[u8])]) -> Self {
        Self { files: files.iter().map(|(name, bytes)| ((*name).into(), bytes.to_vec())).collect(), ..Self::default() }
    }

    /// Starts hub and storage; returns the hub's address.
    async fn serve(self) -> (Arc<Self>, String) {
        let hub = Arc::new(self);
        let storage = listen(Router::new().fallback(stored).with_state(hub.clone())).await;
        *hub.storage.lock() = storage;
        let address = listen(Router::new().fallback(routes).with_state(hub.clone())).await;
        (hub, address)
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().iter().map(|(line, _)| line.clone()).collect()
    }

    fn note(&self, request: &Request) {
        let range = request.headers().get(header::RANGE).map_or("", |range| range.to_str().unwrap_or("?"));
        let line = format!("{} {} {range}", request.method(), request.uri().path());
        self.log.lock().push((line.trim_end().into(), request.headers().contains_key(header::AUTHORIZATION)));
    }

    fn digest(&self, bytes: &[u8]) -> String {
        let digest = ring::digest::digest(&ring::digest::SHA256, if self.wrong_digest { b"" } else { bytes });
        digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

async fn listen(router: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}")
}

async fn routes(State(hub): State<Arc<Hub>>, request: Request) -> Response {
    hub.note(&request);
    let token = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()?.strip_prefix("Bearer "));
    if hub.token.as_deref().is_some_and(|wanted| token != Some(wanted)) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let path = request.uri().path();
    if path == "/api/models/org/name/revision/main" {
        let siblings: Vec<_> = hub.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        return axum::Json(serde_json::json!({"sha": COMMIT, "siblings": siblings})).into_response();
    }
    let Some(file) = path.strip_prefix(&format!("/org/name/resolve/{COMMIT}/")) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let Some(bytes) = hub.files.get(file) else { return StatusCode::NOT_FOUND.into_response() };
    let headers = [
        (header::LOCATION.as_str(), format!("{}/{file}", hub.storage.lock())),
        ("x-linked-etag", format!("\"{}\"", hub.digest(bytes))),
        ("x-linked-size", bytes.len().to_string()),
        ("x-repo-commit", COMMIT.into()),
    ];
    (StatusCode::FOUND, headers).into_response()
}

async fn stored(State(hub): State<Arc<Hub>>, request: Request) -> Response {
    hub.note(&request);
    let bytes = hub.files[request.uri().path().trim_start_matches('/')].clone();
    let range = request
        .headers()
        .get(header::RANGE)
        .and_then(|v| v.to_str().ok()?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    let (status, start) = range.map_or((StatusCode::OK, 0), |start: usize| (StatusCode::PARTIAL_CONTENT, start));
    assert_eq!(request.method(), Method::GET, "HEAD stays with the hub");
    let rest = bytes[start..].to_vec();
    match hub.break_after.lock().take() {
        Some(n) => {
            let first = futures::stream::once(futures::future::ok(bytes::Bytes::copy_from_slice(&rest[..n])));
            // The pause lets the server send what it has before the connection breaks.
            let cut = futures::stream::once(async {
                tokio::task::yield_now().await;
                Err(std::io::Error::other("cable cut"))
            });
            (status, Body::from_stream(first.chain(cut))).into_response()
        }
        None => (status, rest).into_response(),
    }
}

fn cache(dir: &Path, endpoint: &str) -> Cache {
    let hub = HubSettings { endpoint: endpoint.into(), token: None, offline: false, cache: dir.join("hub") };
    Cache { models: dir.join("models"), hub }
}

async fn get(source: &str, cache: &Cache) -> Result<PathBuf, SourceError> {
    obtain(&source.parse()?, cache, &|_| {}).await
}

#[test]
fn sources_are_read_as_people_write_them() {
    let hub = |repo: &str, revision: &str, file: Option<&str>| {
        Some(ModelSource::Hub(HubModel { repo: repo.into(), revision: revision.into(), file: file.map(str::to_owned) }))
    };
    let file = |path: &str| Some(ModelSource::File(path.into()));
    let cases = [
        ("default", Some(ModelSource::Default)),
        ("/models/x.gguf", file("/models/x.gguf")),
        ("file:///models/x.gguf", file("/models/x.gguf")),
        ("models/x.gguf", file("models/x.gguf")),
        ("./models/x", file("./models/x")),
        ("x", file("x")),
        ("org/name", hub("org/name", "main", None)),
        ("hf://org/name", hub("org/name", "main", None)),
        ("hf://org/name@v1.0/sub/x-Q8_0.gguf", hub("org/name", "v1.0", Some("sub/x-Q8_0.gguf"))),
        ("hf://name", None),
        ("hf://org/../x.gguf", None),
        ("hf://org/name/../x.gguf", None),
        ("file://x.gguf", None),
        ("pvc://claim/x.gguf", None),
        ("s3://bucket/x.gguf", None),
        ("", None),
    ];
    for (text, expected) in cases {
        assert_eq!(text.parse().ok(), expected, "{text}");
    }
}

#[tokio::test]
async fn a_download_lands_in_the_hubs_cache_layout_and_is_not_repeated() {
    let (hub, address) = Hub::with(&[("m-Q8_0.gguf", b"weights"), ("README.md", b"words")]).serve().await;
    let dir = tempfile::tempdir().expect("a folder");
    let cache = cache(dir.path(), &address);
    let path = get("org/name", &cache).await.expect("downloaded");
    let folder = dir.path().join("hub/models--org--name");
    assert_eq!(path, folder.join("snapshots").join(COMMIT).join("m-Q8_0.gguf"));
    assert_eq!(std::fs::read(&path).expect("readable"), b"weights");
    assert_eq!(std::fs::read_to_string(folder.join("refs/main")).expect("readable"), COMMIT);
    let blob = std::fs::read_link(&path).expect("a link");
    assert_eq!(blob, Path::new("../../blobs").join(hub.digest(b"weights")));

    let before = hub.log().len();
    assert_eq!(get("org/name", &cache).await.expect("cached"), path);
    assert_eq!(hub.log()[before..], ["GET /api/models/org/name/revision/main"]);
    let offline = Cache {
        hub: HubSettings { offline: true, endpoint: "http://127.0.0.1:1".into(), ..cache.hub.clone() },
        ..cache
    };
    assert_eq!(get("org/name", &offline).await.expect("cached"), path);
}

#[tokio::test]
async fn a_broken_download_is_continued_where_it_stopped() {
    let hub = Hub::with(&[("m.gguf", b"0123456789")]);
    *hub.break_after.lock() = Some(4);
    let (hub, address) = hub.serve().await;
    let dir = tempfile::tempdir().expect("a folder");
    let cache = cache(dir.path(), &address);
    let error = get("org/name", &cache).await.expect_err("the connection broke");
    assert!(matches!(error, SourceError::Network { stage: "downloading", .. }), "{error}");

    let seen = Mutex::new(Vec::new());
    let source = "org/name".parse().expect("valid");
    let path = obtain(&source, &cache, &|p| seen.lock().push((p.done, p.total))).await.expect("continued");
    assert_eq!(std::fs::read(path).expect("readable"), b"0123456789");
    assert_eq!(hub.log().last().expect("asked"), "GET /m.gguf bytes=4-");
    let seen = seen.into_inner();
    assert_eq!((seen.first(), seen.last()), (Some(&(4, Some(10))), Some(&(10, Some(10)))));
}

#[tokio::test]
async fn a_damaged_file_is_refused_and_deleted() {
    let (_, address) = Hub { wrong_digest: true, ..Hub::with(&[("m.gguf", b"weights")]) }.serve().await;
    let dir = tempfile::tempdir().expect("a folder");
    let error = get("org/name", &cache(dir.path(), &address)).await.expect_err("damaged");
    assert!(error.to_string().contains("SHA-256"), "{error}");
    let blobs = std::fs::read_dir(dir.path().join("hub/models--org--name/blobs")).expect("exists");
    assert_eq!(blobs.count(), 0);
}

#[tokio::test]
async fn the_token_goes_to_the_hub_and_not_to_its_storage() {
    let (hub, address) = Hub { token: Some("secret".into()), ..Hub::with(&[("m.gguf", b"weights")]) }.serve().await;
    let dir = tempfile::tempdir().expect("a folder");
    let mut cache = cache(dir.path(), &address);
    let error = get("org/name", &cache).await.expect_err("no token").to_string();
    assert!(error.contains("401") && error.contains("HF_TOKEN"), "{error}");
    cache.hub.token = Some("secret".into());
    get("org/name", &cache).await.expect("with a token");
    let with_token: Vec<_> = hub.log.lock().iter().filter(|(_, token)| *token).map(|(line, _)| line.clone()).collect();
    assert!(!with_token.is_empty() && !with_token.contains(&"GET /m.gguf".into()), "{with_token:?}");
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let (_, address) = Hub::with(&[("a-Q8_0.gguf", b"a"), ("b-Q8_0.gguf", b"b")]).serve().await;
    let dir = tempfile::tempdir().expect("a folder");
    let cache = cache(dir.path(), &address);
    let said = |result: Result<PathBuf, SourceError>| result.expect_err("cannot work").to_string();
    assert!(said(get("/nowhere/x.gguf", &cache).await).contains("no model file /nowhere/x.gguf"));
    assert!(said(get("other/name", &cache).await).contains("404"));
    assert!(said(get("hf://org/name/c.gguf", &cache).await).contains("404"));
    assert!(said(get("org/name", &cache).await).contains("b-Q8_0.gguf"));
    let offline = Cache { hub: HubSettings { offline: true, ..cache.hub.clone() }, ..cache.clone() };
    assert!(said(get("org/name", &offline).await).contains("HF_HUB_OFFLINE"));
    let nobody = Cache { hub: HubSettings { endpoint: "http://127.0.0.1:1".into(), ..cache.hub.clone() }, ..cache };
    let error = get("org/name", &nobody).await.expect_err("nobody listens");
    assert!(matches!(error, SourceError::Network { stage: "waiting for an answer", .. }), "{error}");
}
