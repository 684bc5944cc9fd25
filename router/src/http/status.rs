//! `GET /`: a page for people, with the models that are served and the workers that are known.

use std::fmt::Write;

use super::pages::sorted;
use crate::backend::{Backend, WorkerStatus};

/// Most workers on the page.
const MOST_WORKERS: usize = 500;

/// The page.
pub(super) fn page(backend: &impl Backend, ready: bool) -> String {
    let state = if ready { "ready" } else { "not ready" };
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Armature</title>\
         <style>body{{font:16px/1.5 system-ui;margin:3em auto;max-width:70em;padding:0 1em}}\
         td,th{{text-align:left;padding:.2em 1.5em .2em 0}}</style>\
         <h1>Armature</h1><p>This router is <b>{state}</b>.</p>{}{}\
         <p><a href=/v1/models>/v1/models</a> · <a href=/health>/health</a> · <a href=/metrics>/metrics</a></p></html>",
        models(backend),
        workers(backend)
    )
}

fn models(backend: &impl Backend) -> String {
    let rows = sorted(backend).into_iter().map(|model| {
        let card = &model.card;
        let capacity = card.runtime_config.total_kv_blocks.map_or("–".to_owned(), |blocks| blocks.to_string());
        let (context, size) = (card.context_length.to_string(), card.kv_cache_block_size.to_string());
        [card.display_name.clone(), context, capacity, size, model.model.tokenizer_name().to_owned()]
    });
    let columns = ["model", "context", "KV blocks of a worker", "block size", "tokenizer"];
    table(columns, rows, "no model is served yet")
}

/// Of servers that speak OpenAI's API themselves nothing is shown: they are counted elsewhere.
fn workers(backend: &impl Backend) -> String {
    let all = backend.worker_status();
    if all.is_empty() && backend.proxy().is_some() {
        return String::new();
    }
    let beyond = all.len().saturating_sub(MOST_WORKERS);
    let columns =
        ["worker", "id", "model", "role", "state", "requests", "blocks in use", "blocks cached: device, host, disk"];
    let rows = all.iter().take(MOST_WORKERS).map(row);
    let mut text = table(columns, rows, "no worker is known yet");
    if beyond > 0 {
        write!(text, "<p>and {beyond} more</p>").expect("a String takes everything");
    }
    text
}

fn row(status: &WorkerStatus) -> [String; 8] {
    let WorkerStatus { worker, loaded, load, held } = status;
    let state = match (worker.unreachable, worker.draining, loaded) {
        (true, ..) => "unreachable",
        (_, true, _) => "draining",
        (.., false) => "model not loaded",
        (.., true) => "ready",
    };
    let id = match worker.rank.dp_rank {
        0 => worker.rank.worker.0.to_string(),
        rank => format!("{} rank {rank}", worker.rank.worker.0),
    };
    let used = match worker.total_blocks {
        Some(total) => format!("{} of {total}", load.active_blocks),
        None => load.active_blocks.to_string(),
    };
    let cached = format!("{}, {}, {}", held.device, held.host, held.disk);
    let (name, model, role) = (worker.name.to_string(), worker.model.to_string(), worker.role.name().to_owned());
    [name, id, model, role, state.to_owned(), load.requests.to_string(), used, cached]
}

/// A table of text, whatever is in it; `none` where it has no row.
fn table<const N: usize>(columns: [&str; N], rows: impl Iterator<Item = [String; N]>, none: &str) -> String {
    let cells = |tag: &str, cells: &mut dyn Iterator<Item = String>| {
        cells.map(|cell| format!("<{tag}>{}</{tag}>", escape(&cell))).collect::<String>()
    };
    let head = cells("th", &mut columns.iter().map(|column| (*column).to_owned()));
    let mut body: String = rows.map(|row| format!("<tr>{}</tr>", cells("td", &mut row.into_iter()))).collect();
    if body.is_empty() {
        body = format!("<tr><td colspan={N}>{none}</td></tr>");
    }
    format!("<table><tr>{head}</tr>{body}</table>")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use kv_index::{TierBlocks, WorkerId, WorkerRank};
    use routing::{RankView, Worker};

    use super::*;

    fn status() -> WorkerStatus {
        let rank = WorkerRank { worker: WorkerId(u64::MAX), dp_rank: 0 };
        let mut worker = Worker::new(rank, "<b>w</b>", "m&m");
        worker.total_blocks = Some(100);
        let load = RankView { active_blocks: 7, prefill_tokens: 0, requests: 2 };
        WorkerStatus { worker, loaded: true, load, held: TierBlocks { device: 5, host: 4, disk: 3, shared: 0 } }
    }

    #[test]
    fn a_worker_is_a_row_of_text() {
        let text = table([""; 8], [row(&status())].into_iter(), "none");
        for cell in [
            "&lt;b&gt;w&lt;/b&gt;",
            "18446744073709551615",
            "m&amp;m",
            "aggregated",
            "ready",
            "2",
            "7 of 100",
            "5, 4, 3",
        ] {
            assert!(text.contains(&format!("<td>{cell}</td>")), "{cell}: {text}");
        }
        assert!(table([""; 8], std::iter::empty(), "nobody").contains("<td colspan=8>nobody</td>"));
    }

    #[test]
    fn why_a_worker_gets_no_requests_is_said() {
        let state = |change: fn(&mut WorkerStatus)| {
            let mut status = status();
            change(&mut status);
            row(&status)[4].clone()
        };
        assert_eq!(state(|status| status.worker.unreachable = true), "unreachable");
        assert_eq!(state(|status| status.worker.draining = true), "draining");
        assert_eq!(state(|status| status.loaded = false), "model not loaded");
    }
}
