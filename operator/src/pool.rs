//! Reconciles `WorkerPool`: fetch → validate → build → apply → status. It owns one Deployment.

use std::sync::Arc;
use std::time::Duration;

use crds::{WorkerPool, WorkerPoolStatus};
use jiff::Timestamp;
use kube::Resource;
use kube::runtime::controller::Action;

use crate::apply;
use crate::build;
use crate::context::Context;
use crate::error::Error;
use crate::status;
use crate::validate::Invalid;

/// Everything is looked at again after this time, even if no watch said anything.
const RESYNC: Duration = Duration::from_secs(300);

/// One reconcile, with its outcome reported on the object.
pub async fn reconcile(object: Arc<WorkerPool>, context: Arc<Context>) -> Result<Action, Error> {
    context.observe(object.as_ref(), run(&object, &context)).await
}

async fn run(object: &WorkerPool, context: &Context) -> Result<Action, Error> {
    if object.meta().deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    match steps(object, context).await {
        Ok(status) => write_status(object, status, context).await?,
        Err(error) if error.concerns_author() => {
            context.warn(object, &error).await;
            let failed = status::pool_failed(object, error.reason(), error.to_string(), Timestamp::now());
            write_status(object, failed, context).await?;
            return Err(error);
        }
        Err(error) => return Err(error),
    }
    Ok(Action::requeue(RESYNC))
}

async fn steps(object: &WorkerPool, context: &Context) -> Result<WorkerPoolStatus, Error> {
    let owner = object.controller_owner_ref(&()).ok_or(Invalid::Incomplete("UID"))?;
    let (wanted, revision) = build::pool_deployment(object, &context.settings, &owner)?;
    let stored = apply::apply(&context.client, &wanted).await?;
    Ok(status::pool(object, &stored, &revision, Timestamp::now()))
}

async fn write_status(object: &WorkerPool, status: WorkerPoolStatus, context: &Context) -> Result<(), Error> {
    if object.status.as_ref() == Some(&status) {
        return Ok(());
    }
    apply::apply_status(&context.client, object, &status).await
}
