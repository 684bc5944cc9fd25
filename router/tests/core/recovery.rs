//! A router that starts anew among many workers, and what it says while workers come and go.

use std::collections::BTreeSet;
use std::fmt::{Debug, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use protocol::request_plane::Generate;
use router::backend::{Backend, RouteOptions};
use routing::Mode;
use serde_json::json;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::harness::*;
use crate::worker::{Life, Worker};

/// Case 1: one of the workers takes connections and answers nothing; it holds up neither its own model nor the others.
#[tokio::test]
async fn a_router_that_starts_anew_finds_all_models_though_a_worker_is_stuck() {
    let models: Vec<String> = (1..=5).map(|number| format!("m{number}")).collect();
    let cluster = Cluster::start(Mode::Kv).await;
    let mut workers: Vec<Worker> = Vec::new();
    for model in &models {
        for number in 1..=3 {
            let life = Life { card: json!({"display_name": model}), ..Life::new(&format!("{model}-{number}")) };
            workers.push(cluster.worker_of(life).await);
        }
    }
    workers[0].store(&prompt(1, 4));
    workers[1].store(&prompt(1, 4));
    cluster.until("its blocks are known", || cluster.indexed(&workers[1]).device == 4).await;
    let again = cluster.beside().await;
    workers[0].get_stuck();
    cluster.core.stop().await;

    let routable = |model: &String| {
        let request = Generate { model: model.clone(), token_ids: prompt(1, 4), ..Generate::default() };
        again
            .backend()
            .explain(&request, &RouteOptions::default())
            .is_ok_and(|explained| explained.answer.outcome.is_ok())
    };
    again.until("every model is routable", || models.iter().all(routable)).await;
    let listed: BTreeSet<String> =
        Backend::models(&**again.backend()).iter().map(|model| model.card.display_name.clone()).collect();
    assert_eq!(listed.into_iter().collect::<Vec<_>>(), models);
    again.until("its blocks are known again", || again.indexed(&workers[1]).device == 4).await;
    for model in &models {
        for seed in 0..3 {
            let request = Generate { model: model.clone(), token_ids: prompt(seed, 2), ..Generate::default() };
            let routed = again.backend().generate(request, RouteOptions::default()).await.expect("somebody answers");
            assert_ne!(routed.worker_id, workers[0].life.instance_id, "it never said hello");
            drain(routed).await.1.expect("it ends well");
        }
    }
}

/// Keeps the level and the text of every event of the router.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(Level, String)>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{}={value:?} ", field.name()).expect("a String takes it");
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO && metadata.target().starts_with("router")
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push((*event.metadata().level(), text.0));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Case S10. All tasks of the router run on this thread, whose subscriber it is.
#[tokio::test]
async fn workers_that_come_and_go_are_no_warning() {
    let log = Log::default();
    let _listening = tracing::subscriber::set_default(log.clone());
    let cluster = Cluster::start(Mode::Kv).await;
    let (stays, leaves) = (cluster.worker("stays").await, cluster.worker("leaves").await);
    stays.store(&prompt(1, 2));
    leaves.store(&prompt(1, 3));
    cluster.until_equal(&leaves).await;
    leaves.unregister(cluster.directory.path());
    leaves.kill();
    cluster.until("it is gone", || cluster.backend().workers().len() == 1).await;
    cluster.until("its blocks are gone", || cluster.indexed(&leaves).total() == 0).await;
    let said = log.0.lock().clone();
    let about = |what: &str| said.iter().filter(|(_, text)| text.contains(what)).count();
    assert_eq!((about("worker found"), about("worker left")), (2, 1), "{said:?}");
    assert!(said.iter().all(|(level, _)| *level == Level::INFO), "{said:?}");
}
