//! KV events of a server that is asked for them: a feed beside the one that listens.
//!
//! What was answered is gone at the server, so one that could not be read is a gap, and after a gap nothing is known.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::Shared;
use super::blocks::PolledBlocks;
use super::dialect::{Call, Refusal, Told};
use super::http::{self, HttpError, Stage};

/// Pause between two questions; a server that has nothing may take its time to say so.
const PAUSE: Duration = Duration::from_millis(200);
/// Pause after one that failed.
const AGAIN: Duration = Duration::from_secs(1);
/// Time for an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("what runs there gets nowhere")]
    Still,
}

/// Asks until the server is lost.
pub(super) async fn run(shared: Arc<Shared>, call: Call, dp_rank: u32) {
    let mut blocks = PolledBlocks::new(shared.clone(), dp_rank);
    let mut failing = false;
    loop {
        let asked = shared.lost.run_until_cancelled(ask(&shared, &call)).await;
        let pause = match asked {
            None => return,
            Some(Ok(told)) => {
                failing = false;
                blocks.take(told);
                PAUSE
            }
            Some(Err(error)) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "the engine does not tell its KV events");
                }
                shared.metrics.refused("not answered").inc();
                AGAIN
            }
        };
        if shared.lost.run_until_cancelled(sleep(pause)).await.is_none() {
            return;
        }
    }
}

async fn ask(shared: &Shared, call: &Call) -> Result<Vec<Told>, AskError> {
    let answer = shared.server.call(call, Stage::Page, ANSWER).await?;
    let status = answer.status();
    let body = http::read_whole(answer.into_body(), Stage::Page, ANSWER).await?;
    if !status.is_success() {
        return Err(shared.dialect.refusal(status.as_u16(), &body).into());
    }
    Ok(shared.dialect.events(&body)?)
}
