//! From workers' tokens to the client's answer: text, stop strings, events, or one whole response.
//!
//! A [`choice::Choice`] turns one token stream into text deltas. [`events::EventStream`] sends the deltas of all
//! choices of a request as server-sent events; [`whole`] waits for all of them. Both are polled by the connection
//! itself: no task and no channel lies between a worker's frame and the client's.

pub mod choice;
pub mod encode;
pub mod events;
pub mod stop;

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use tokio_util::sync::CancellationToken;

use crate::http::metrics::RequestGuard;
use crate::openai::error::ApiError;
use choice::Choice;

/// Waits until every choice has ended. `abort` ends the wait when the process must go.
pub async fn whole(
    choices: &mut [Choice],
    guard: &mut RequestGuard,
    abort: &CancellationToken,
) -> Result<(), ApiError> {
    let mut aborted = pin!(abort.cancelled());
    poll_fn(|cx| {
        let mut waiting = false;
        for choice in choices.iter_mut() {
            let before = choice.tokens();
            while choice.finish().is_none() {
                match choice.poll_advance(cx) {
                    Poll::Ready(Ok(())) => {}
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error.into())),
                    Poll::Pending => {
                        waiting = true;
                        break;
                    }
                }
            }
            guard.tokens(choice.tokens() - before);
        }
        if !waiting {
            return Poll::Ready(Ok(()));
        }
        aborted.as_mut().poll(cx).map(|()| Err(ApiError::shutting_down()))
    })
    .await
}
