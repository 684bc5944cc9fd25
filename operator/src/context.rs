//! What every reconciler holds: the client, settings, events and metrics.

use std::time::Instant;

use kube::runtime::controller::Action;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource, ResourceExt};

use crate::config::Settings;
use crate::error::{Error, call};
use crate::metrics::{Metrics, Reconcile};

/// Most bytes in an event's note, as the API server has it.
const NOTE_BYTES: usize = 1024;

/// Shared by all reconcilers.
pub struct Context {
    /// The cluster.
    pub client: Client,
    /// What objects are built with.
    pub settings: Settings,
    /// Metrics.
    pub metrics: Metrics,
    recorder: Recorder,
}

impl Context {
    /// A context whose events are reported by `identity`.
    pub fn new(client: Client, settings: Settings, metrics: Metrics, identity: String) -> Self {
        let reporter = Reporter { controller: "armature-operator".into(), instance: Some(identity) };
        Self { recorder: Recorder::new(client.clone(), reporter), client, settings, metrics }
    }

    /// Counts and times one reconcile of `object`, and logs its error: the one place where that happens.
    pub async fn observe<K>(
        &self,
        object: &K,
        reconcile: impl Future<Output = Result<Action, Error>>,
    ) -> Result<Action, Error>
    where
        K: Resource<DynamicType = ()>,
    {
        let started = Instant::now();
        let outcome = reconcile.await;
        let controller = K::kind(&()).into_owned();
        let result = match &outcome {
            Ok(_) => "ok",
            Err(error) => {
                let namespace = object.namespace().unwrap_or_default();
                tracing::warn!(kind = controller, namespace, name = object.name_any(), %error, "reconcile failed");
                error.reason()
            }
        };
        self.metrics.reconciled(Reconcile { controller, result: result.into() }, started.elapsed());
        outcome
    }

    /// Tells the author of `object` what is wrong, as an event on it. Failing to tell is logged and nothing more.
    pub async fn warn<K>(&self, object: &K, error: &Error)
    where
        K: Resource<DynamicType = ()>,
    {
        let mut note = error.to_string();
        note.truncate(note.floor_char_boundary(NOTE_BYTES));
        let event = Event {
            type_: EventType::Warning,
            reason: error.reason().into(),
            note: Some(note),
            action: "Reconcile".into(),
            secondary: None,
        };
        let regarding = object.object_ref(&());
        if let Err(error) = call(|| "publishing an event".into(), self.recorder.publish(&event, &regarding)).await {
            tracing::warn!(%error, "event not published");
        }
    }
}
