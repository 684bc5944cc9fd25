//! The model with a progress bar, and the check that it is one before any worker starts.

use std::path::PathBuf;

use indicatif::{DecimalBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use worker_agent::source::{Cache, ModelSource, Progress, obtain as obtain_source};

use crate::commands::worker;
use crate::outcome::Failure;

/// The model's file. A source that does not exist is a setting to change; a download that breaks is a failure.
pub async fn obtain(source: &ModelSource, cache: &Cache) -> Result<PathBuf, Failure> {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("model    {msg}  {bar:20} {bytes} of {total_bytes}, {bytes_per_sec}");
    bar.set_style(style.expect("the template is constant"));
    let show = |progress: Progress<'_>| {
        if bar.message().is_empty() {
            bar.set_message(progress.file.to_owned());
        }
        bar.set_length(progress.total.unwrap_or(progress.done));
        bar.set_position(progress.done);
    };
    let file = obtain_source(source, cache, &show).await;
    bar.finish_and_clear();
    let file = file.map_err(worker::source_failure)?;
    let bytes = std::fs::metadata(&file)?.len();
    let title = match source {
        // Inside the file it has its training run's name.
        ModelSource::Default => worker::title(&file).map(|_| "SmolLM2-135M-Instruct".to_owned())?,
        _ => worker::title(&file)?,
    };
    println!("model    {title}  {}", DecimalBytes(bytes));
    Ok(file)
}
