//! One watch that never ends: a map of what the API server has of one kind, reduced to what discovery needs of it.

use std::collections::HashMap;
use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt};
use kube::api::Api;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Server-side limit of one watch call; the client gives up 5 s later. A silently dropped connection is noticed in that time.
const WATCH_S: u32 = 60;

/// Deadline of each call before a list is complete.
const LIST: Duration = Duration::from_secs(15);

/// First and longest pause after an error.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Objects by name, each reduced to a `V`; objects that reduce to nothing are left out.
pub(crate) struct Watched<V> {
    kind: &'static str,
    restart: Box<dyn Fn() -> Changes<V> + Send + Sync>,
    changes: Changes<V>,
    listed: Option<HashMap<String, V>>,
    /// The list that is coming in; it replaces the other when it is complete.
    listing: Option<HashMap<String, V>>,
    /// Deadline of each call while a list is incomplete.
    deadline: Duration,
    /// When the call that is going on fails by it. Kept here, because the future that waits is dropped with every change of
    /// another watch.
    due: Option<Instant>,
    pause: Duration,
    paused_until: Option<Instant>,
}

type Changes<V> = Pin<Box<dyn Stream<Item = Result<Change<V>, watcher::Error>> + Send>>;

enum Change<V> {
    Set(String, Option<V>),
    Gone(String),
    ListBegins,
    Listed(String, Option<V>),
    ListEnds,
}

/// Starts watching.
pub(crate) fn watch<K, V>(
    kind: &'static str,
    api: Api<K>,
    selector: Option<String>,
    reduce: fn(K) -> Option<V>,
) -> Watched<V>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    V: Send + 'static,
{
    let config = watcher::Config { label_selector: selector, timeout: Some(WATCH_S), ..watcher::Config::default() };
    let restart = Box::new(move || -> Changes<V> {
        let events = watcher(api.clone(), config.clone());
        Box::pin(events.map(move |event| event.map(|event| change(event, reduce))))
    });
    Watched {
        kind,
        changes: restart(),
        restart,
        listed: None,
        listing: None,
        deadline: LIST,
        due: None,
        pause: BACKOFF.0,
        paused_until: None,
    }
}

fn change<K: Resource, V>(event: Event<K>, reduce: fn(K) -> Option<V>) -> Change<V> {
    match event {
        Event::Apply(object) => Change::Set(object.name_any(), reduce(object)),
        Event::Delete(object) => Change::Gone(object.name_any()),
        Event::Init => Change::ListBegins,
        Event::InitApply(object) => Change::Listed(object.name_any(), reduce(object)),
        Event::InitDone => Change::ListEnds,
    }
}

impl<V> Watched<V> {
    /// The last complete list with what changed since; `None` before the first one.
    pub(crate) fn list(&self) -> Option<&HashMap<String, V>> {
        self.listed.as_ref()
    }

    /// Waits for the list to change. May be dropped and called again.
    pub(crate) async fn changed(&mut self) {
        loop {
            if let Some(until) = self.paused_until {
                sleep_until(until).await;
                self.paused_until = None;
            }
            let listing = self.listed.is_none() || self.listing.is_some();
            // Once listed, the watcher itself bounds each call by WATCH_S.
            let next = if listing {
                let due = *self.due.get_or_insert_with(|| Instant::now() + self.deadline);
                timeout_at(due, self.changes.next()).await
            } else {
                Ok(self.changes.next().await)
            };
            self.due = None;
            match next {
                Ok(Some(Ok(change))) => {
                    self.pause = BACKOFF.0;
                    if self.take(change) {
                        return;
                    }
                }
                Ok(Some(Err(error))) => self.failed(&error.to_string(), false),
                // A stream that has ended, or hangs, is replaced; it is never polled again.
                Ok(None) => self.failed("the watch ended", true),
                Err(_) => self.failed("no answer to a list in time", true),
            }
        }
    }

    /// True when the list changed.
    fn take(&mut self, change: Change<V>) -> bool {
        match change {
            Change::ListBegins => self.listing = Some(HashMap::new()),
            Change::Listed(name, value) => put(self.listing.get_or_insert_default(), name, value),
            Change::ListEnds => {
                self.listed = Some(self.listing.take().unwrap_or_default());
                return true;
            }
            Change::Set(name, value) => {
                put(self.listed.get_or_insert_default(), name, value);
                return true;
            }
            Change::Gone(name) => {
                self.listed.get_or_insert_default().remove(&name);
                return true;
            }
        }
        false
    }

    fn failed(&mut self, reason: &str, restart: bool) {
        tracing::warn!(kind = self.kind, reason, "discovery: the Kubernetes API failed; the last view stays");
        if restart {
            self.changes = (self.restart)();
            self.listing = None;
        }
        self.paused_until = Some(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(BACKOFF.1);
    }
}

fn put<V>(map: &mut HashMap<String, V>, name: String, value: Option<V>) {
    match value {
        Some(value) => map.insert(name, value),
        None => map.remove(&name),
    };
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use futures::stream;

    use tokio::time::timeout;

    use super::*;

    type Script = VecDeque<Vec<Result<Change<u32>, watcher::Error>>>;

    /// A watch whose streams follow a script; after the last one it is silent.
    fn scripted(script: Script) -> Watched<u32> {
        let script = Arc::new(Mutex::new(script));
        let restart = Box::new(move || -> Changes<u32> {
            match script.lock().expect("not poisoned").pop_front() {
                Some(changes) => Box::pin(stream::iter(changes)),
                None => Box::pin(stream::pending()),
            }
        });
        Watched {
            kind: "test",
            changes: restart(),
            restart,
            listed: None,
            listing: None,
            deadline: Duration::from_millis(20),
            due: None,
            pause: Duration::from_millis(1),
            paused_until: None,
        }
    }

    fn listed(names: &[&str]) -> Vec<Result<Change<u32>, watcher::Error>> {
        let mut changes = vec![Ok(Change::ListBegins)];
        changes.extend(names.iter().map(|name| Ok(Change::Listed((*name).to_owned(), Some(1)))));
        changes.push(Ok(Change::ListEnds));
        changes
    }

    fn names(watched: &Watched<u32>) -> Vec<&str> {
        let mut names: Vec<&str> = watched.list().expect("listed").keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    #[tokio::test]
    async fn a_list_after_a_break_replaces_the_set() {
        let broken = vec![Ok(Change::ListBegins), Err(watcher::Error::NoResourceVersion)];
        let mut watched = scripted([listed(&["a", "b"]), broken, listed(&["b", "c"])].into());
        watched.changed().await;
        assert_eq!(names(&watched), ["a", "b"]);
        watched.changed().await;
        assert_eq!(names(&watched), ["b", "c"], "what was deleted during the break is gone");
    }

    #[tokio::test]
    async fn the_last_view_stays_while_the_server_is_away() {
        let gone: Vec<_> = (0..3).map(|_| Err(watcher::Error::NoResourceVersion)).collect();
        let mut watched = scripted([listed(&["a"]), gone].into());
        watched.changed().await;
        // Three errors, and three pauses that double.
        assert!(timeout(Duration::from_millis(100), watched.changed()).await.is_err());
        assert_eq!(names(&watched), ["a"]);
    }

    #[tokio::test]
    async fn a_list_that_hangs_is_asked_for_again() {
        let mut watched = scripted([Vec::new(), listed(&["a"])].into());
        watched.changes = Box::pin(stream::pending());
        watched.changed().await;
        assert_eq!(names(&watched), ["a"]);
    }

    #[tokio::test]
    async fn the_deadline_of_a_list_goes_on_while_other_watches_change() {
        let mut watched = scripted([Vec::new(), listed(&["a"])].into());
        watched.changes = Box::pin(stream::pending());
        // Something else fires five times within each deadline.
        let mut waits = 0;
        while timeout(Duration::from_millis(4), watched.changed()).await.is_err() {
            waits += 1;
            assert!(waits < 20, "the list was never asked for again");
        }
        assert_eq!(names(&watched), ["a"]);
    }
}
