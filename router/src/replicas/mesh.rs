//! A link to every other router that discovery shows, and one task that takes what they bring.
//!
//! Discovery only adds candidates: who is still heard from stays, listed or not, as a router that drains does. An address is
//! given up when it is not listed and silent; an address at which we hear ourselves is none.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use routing::RouterId;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::MAX_ROUTERS;
use super::hub::{Hub, Message};
use super::link::{Heard, Link};
use super::metrics::ReplicaMetrics;
use super::outbox::Standing;

/// `host:port` of every router that is visible now, our own perhaps among them.
pub(super) type View = BTreeSet<String>;

/// Longest time that a new router waits for its peers before it says that it is ready.
const JOIN: Duration = Duration::from_secs(1);

/// How often silence and age are looked at.
const TICK: Duration = Duration::from_millis(250);

/// Messages waiting to be applied. When it is full the sockets are not read, and the publishers drop: a gap.
const QUEUE: usize = 256;

/// The links.
pub(super) struct Mesh {
    own: RouterId,
    hub: Hub,
    standing: Standing,
    metrics: Arc<ReplicaMetrics>,
    addresses: HashMap<Arc<str>, Address>,
    out: mpsc::Sender<Heard>,
    heard: mpsc::Receiver<Heard>,
    deadline: Instant,
}

/// A place where a router listens.
struct Address {
    /// Absent where we hear ourselves.
    link: Option<Link>,
    /// Who answers there, once it did.
    router: Option<RouterId>,
    listed: bool,
}

impl Mesh {
    pub(super) fn new(own: RouterId, hub: Hub, standing: Standing, metrics: Arc<ReplicaMetrics>) -> Self {
        let (out, heard) = mpsc::channel(QUEUE);
        let deadline = Instant::now() + JOIN;
        Self { own, hub, standing, metrics, addresses: HashMap::new(), out, heard, deadline }
    }

    /// Listens for ever.
    pub(super) async fn run(mut self, mut view: watch::Receiver<Option<View>>) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut discovering = true;
        let mut seen = false;
        loop {
            tokio::select! {
                changed = view.changed(), if discovering => {
                    let listed = view.borrow_and_update().clone();
                    if let Some(listed) = listed {
                        seen = true;
                        self.list(&listed);
                    }
                    // Discovery ends only with the process; what is known stays.
                    discovering = changed.is_ok();
                }
                Some((address, message)) = self.heard.recv() => self.take(&address, message),
                _ = ticks.tick() => self.tick(),
            }
            self.settle(seen);
        }
    }

    /// Makes the addresses those of a view; one that is not in it goes when it is silent.
    fn list(&mut self, view: &View) {
        for (address, known) in &mut self.addresses {
            known.listed = view.contains(&**address);
        }
        for address in view {
            if self.addresses.contains_key(address.as_str()) {
                continue;
            }
            if self.addresses.len() > MAX_ROUTERS {
                tracing::warn!(limit = MAX_ROUTERS, "more routers than are listened to");
                return;
            }
            let address: Arc<str> = address.as_str().into();
            let link = Link::start(address.clone(), self.own, self.out.clone(), self.metrics.clone());
            self.addresses.insert(address, Address { link: Some(link), router: None, listed: true });
        }
    }

    fn take(&mut self, address: &str, message: Message) {
        let Some(known) = self.addresses.get_mut(address) else { return };
        if message.from == self.own {
            known.link = None;
            return;
        }
        let before = known.router.replace(message.from).filter(|before| *before != message.from);
        if let Some(before) = before
            && !self.addresses.values().any(|other| other.router == Some(before))
        {
            // Its address belongs to another one now.
            self.hub.gone(before);
        }
        self.hub.take(message, Instant::now());
    }

    fn tick(&mut self) {
        self.hub.tick(Instant::now());
        self.addresses.retain(|_, known| known.listed || known.router.is_some_and(|router| self.hub.knows(router)));
    }

    /// Whether there is anybody to tell, and whether this router has learnt all it can.
    fn settle(&mut self, seen: bool) {
        let others = || self.addresses.values().filter(|known| known.link.is_some());
        self.standing.set_listened(others().next().is_some());
        if !self.standing.joined() {
            let complete = seen && others().all(|known| known.router.is_some_and(|router| self.hub.joined(router)));
            if complete || Instant::now() >= self.deadline {
                self.standing.set_joined();
            }
        }
    }
}
