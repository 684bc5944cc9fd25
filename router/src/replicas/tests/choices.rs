//! Routers that share their load choose as one router would; those that do not, do not.

use kv_index::Overlaps;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use routing::{Request, Selector, SelectorConfig, Worker, WorkerSet};

use super::*;

const WORKERS: u64 = 8;
const REQUESTS: u64 = 1000;
/// That each running request generates between two requests.
const TOKENS: usize = 12;

/// Where each request went, and how unevenly: the most requests on a worker, of the mean of all, over time.
struct Run {
    choices: Vec<WorkerRank>,
    imbalance: f64,
}

/// The same requests, in turn through `routers`, which hear each other or do not. Each runs for a while, most shortly, and
/// generates as it runs.
fn run(routers: u64, sync: bool) -> Run {
    let workers: WorkerSet = (0..WORKERS).map(|n| Worker::new(rank(n), "w", "m")).collect();
    let mut nodes: Vec<(Node, Selector)> =
        (1..=routers).map(|id| (Node::new(id), Selector::new(SelectorConfig::default()))).collect();
    let (mut sizes, mut dice) = (StdRng::seed_from_u64(1), StdRng::seed_from_u64(2));
    // When a running request ends, its router, and its name there.
    let mut ends: Vec<(u64, usize, Arc<str>)> = Vec::new();
    let mut running = [0_u64; WORKERS as usize];
    let (mut choices, mut busiest, mut all) = (Vec::new(), 0, 0);
    for now in 0..REQUESTS {
        for (_, at, request) in ends.extract_if(.., |(end, ..)| *end <= now).collect::<Vec<_>>() {
            let (node, _) = &mut nodes[at];
            let place = node.running.iter().position(|(name, _)| *name == request).expect("it runs");
            let state = node.load.load.lock().state(node.running[place].1).expect("it runs").rank;
            running[state.worker.0 as usize] -= 1;
            node.end(place);
            let told = node.tell();
            exchange(&mut nodes, at, told, sync);
        }
        for at in 0..nodes.len() {
            let (node, _) = &mut nodes[at];
            (0..node.running.len()).for_each(|place| node.output(place, TOKENS));
            let told = node.growth();
            exchange(&mut nodes, at, told, sync);
        }
        let at = (now % routers) as usize;
        let prompt = prompt(now, sizes.random_range(1..60));
        let life = if sizes.random_bool(0.2) { sizes.random_range(40..120) } else { sizes.random_range(4..20) };
        let (node, selector) = &mut nodes[at];
        let load = node.load.load.lock();
        let decision = selector.decide(&workers, &Request::new("m", &prompt), &Overlaps::default(), &load, &mut dice);
        let chosen = decision.expect("any worker will do").rank;
        drop(load);
        let prefill_tokens = prompt.tokens;
        node.place(chosen, prompt, prefill_tokens);
        ends.push((now + life, at, node.running.last().expect("just placed").0.clone()));
        let told = node.tell();
        exchange(&mut nodes, at, told, sync);
        choices.push(chosen);
        running[chosen.worker.0 as usize] += 1;
        busiest += running.iter().max().copied().unwrap_or_default();
        all += running.iter().sum::<u64>();
    }
    Run { choices, imbalance: (busiest * WORKERS) as f64 / all as f64 }
}

/// What one router tells reaches the others.
fn exchange(nodes: &mut [(Node, Selector)], from: usize, messages: Vec<Outgoing>, sync: bool) {
    let own = nodes[from].0.own;
    for (node, _) in nodes.iter_mut().filter(|(node, _)| sync && node.own != own) {
        node.hear(own, messages.clone());
    }
}

#[test]
fn several_routers_that_share_their_load_choose_as_one_would() {
    let (one, two, five, alone) = (run(1, true), run(2, true), run(5, true), run(2, false));
    assert!(one.choices == two.choices && one.choices == five.choices);
    let equal = one.choices.iter().zip(&alone.choices).filter(|(a, b)| a == b).count();
    assert!((equal as u64) < REQUESTS / 2, "{equal} choices are equal without it");
    let (even, uneven) = (two.imbalance, alone.imbalance);
    assert!(even == one.imbalance && uneven > even * 1.01, "with it {even}, without {uneven}");
}
