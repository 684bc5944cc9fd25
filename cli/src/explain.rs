//! `armature explain`: asks a router where a request would go, or why one went where it did, and prints the answer as a table.

mod table;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::outcome::Outcome;

/// Longest time that the router may take.
const DEADLINE: Duration = Duration::from_secs(30);

/// Largest answer: about 100,000 workers.
const ANSWER_BYTES: usize = 64 << 20;

/// What to ask, and whom.
#[derive(Args)]
pub struct Explain {
    /// Address of the router
    #[arg(long, env = "ARMATURE_URL", default_value = "http://127.0.0.1:8000")]
    url: Uri,
    /// Model of the prompt [default: the only one that the router has]
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    subject: Subject,
    /// Print the router's JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// The request in question.
#[derive(Args)]
#[group(required = true, multiple = false)]
struct Subject {
    /// Text of a prompt
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// File with the text of a prompt
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// File with the JSON body of a chat or a completion
    #[arg(long, value_name = "FILE")]
    request: Option<PathBuf>,
    /// A past request, by the id of its answer or by its x-request-id
    #[arg(long, value_name = "ID")]
    decision: Option<String>,
}

/// Asks, and prints.
pub fn run(args: &Explain) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(anyhow::Error::from)?;
    let answer = runtime.block_on(async {
        match tokio::time::timeout(DEADLINE, answer(args)).await {
            Ok(answer) => answer,
            Err(_) => bail!("{} did not answer within {} s", args.url, DEADLINE.as_secs()),
        }
    })?;
    if args.json {
        println!("{answer:#}");
    } else {
        print!("{}", table::all(&answer));
    }
    Ok(())
}

/// As a part of a path: an id may have any characters.
fn escaped(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    id.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

async fn answer(args: &Explain) -> anyhow::Result<Value> {
    if let Some(id) = &args.subject.decision {
        return ask(&args.url, Method::GET, &format!("/debug/decisions/{}", escaped(id)), None).await;
    }
    let body = match &args.subject.request {
        Some(file) => std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?,
        None => {
            let prompt = match &args.subject.prompt_file {
                Some(file) => {
                    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?
                }
                None => args.subject.prompt.clone().unwrap_or_default(),
            };
            let model = match &args.model {
                Some(model) => model.clone(),
                None => only_model(&args.url).await?,
            };
            json!({"model": model, "prompt": prompt, "max_tokens": 1}).to_string().into_bytes()
        }
    };
    ask(&args.url, Method::POST, "/v1/route/explain", Some(body)).await
}

async fn only_model(url: &Uri) -> anyhow::Result<String> {
    let models = ask(url, Method::GET, "/v1/models", None).await?;
    let names: Vec<&str> = models["data"].as_array().into_iter().flatten().filter_map(|m| m["id"].as_str()).collect();
    match names[..] {
        [name] => Ok(name.to_owned()),
        [] => bail!("the router has no model yet"),
        _ => bail!("the router has several models; name one of them with --model: {}", names.join(", ")),
    }
}

async fn ask(url: &Uri, method: Method, path: &str, body: Option<Vec<u8>>) -> anyhow::Result<Value> {
    let authority = url.authority().with_context(|| format!("{url} names no host"))?;
    if url.scheme_str().is_some_and(|scheme| scheme != "http") {
        bail!("{url}: only http is spoken here");
    }
    let address = format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(80));
    let stream = TcpStream::connect(&address).await.with_context(|| format!("cannot reach a router at {address}"))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let driver = tokio::spawn(connection);
    let request = Request::builder().method(method).uri(path).header(HOST, authority.as_str());
    let request =
        request.header(CONTENT_TYPE, "application/json").body(Full::new(Bytes::from(body.unwrap_or_default())));
    let response = sender.send_request(request.context("the id makes no path")?).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("{address}: {error}"))?.to_bytes();
    driver.abort();
    let answer: Value = serde_json::from_slice(&body).with_context(|| format!("{address} is no router: {status}"))?;
    if status != StatusCode::OK {
        bail!("{}", answer["error"]["message"].as_str().unwrap_or(status.as_str()));
    }
    Ok(answer)
}
