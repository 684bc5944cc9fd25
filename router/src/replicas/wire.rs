//! Load events from their meaning to their wire form, and back. What comes back is bounded and consistent, whoever sent it.

use kv_hashing::{BlockSize, SequenceHash};
use kv_index::{WorkerId, WorkerRank};
use protocol::replica_sync::{
    ActiveSequenceData, ActiveSequenceEvent, AddRequest, Growth, PrefillLoadHint, WorkerWithDpRank,
};
use routing::{BookingState, Prompt, ReplicaChange, ReplicaEvent, RouterId};

/// Tokens per block where a sender does not say: it counts its blocks itself, so it only scales what it says in tokens.
const BLOCK_SIZE: BlockSize = BlockSize::new(16).expect("not zero");

/// Most tokens of a prompt or an answer that are believed. Sums over all bookings stay far below 2^64.
const MAX_TOKENS: u64 = 1 << 32;

/// Longest name of a request.
const MAX_NAME: usize = 512;

/// The wire form of an event of a booking on `rank`; none of growth, which has another ([`growth`]).
pub(super) fn event(event: &ReplicaEvent, rank: WorkerRank) -> Option<ActiveSequenceEvent> {
    let data = match &event.change {
        ReplicaChange::Add(state) => ActiveSequenceData::AddRequest(add_request(state)),
        ReplicaChange::MarkPrefillCompleted => ActiveSequenceData::MarkPrefillCompleted,
        ReplicaChange::Free => ActiveSequenceData::Free,
        ReplicaChange::Grow(_) => return None,
    };
    Some(ActiveSequenceEvent {
        request_id: event.request.to_string(),
        worker: WorkerWithDpRank { worker_id: rank.worker.0, dp_rank: rank.dp_rank },
        data,
        router_id: event.router.0,
        lora_name: None,
    })
}

fn add_request(state: &BookingState) -> AddRequest {
    let prompt = &state.prompt;
    let reused = prompt.tokens.saturating_sub(state.prefill_tokens) / prompt.block_size.get();
    AddRequest {
        token_sequence: Some(prompt.blocks.iter().map(|block| block.0).collect()),
        isl: Some(prompt.tokens as u64),
        overlap: u32::try_from(reused).unwrap_or(u32::MAX),
        track_prefill_tokens: true,
        expected_output_tokens: state.expected_output_tokens.and_then(|tokens| u32::try_from(tokens).ok()),
        prefill_load_hint: Some(PrefillLoadHint {
            initial_effective_prefill_tokens: state.prefill_tokens as u64,
            expected_prefill_duration: None,
        }),
        block_size: u32::try_from(prompt.block_size.get()).ok(),
        output_tokens: state.output_tokens as u64,
        prefill_completed: state.prefill_completed,
    }
}

/// The meaning of an event of `router`. The error is the label under which it is counted.
pub(super) fn read(event: ActiveSequenceEvent, router: RouterId) -> Result<ReplicaEvent, &'static str> {
    if event.router_id != router.0 {
        return Err("another router");
    }
    if event.request_id.len() > MAX_NAME {
        return Err("malformed");
    }
    let rank = WorkerRank { worker: WorkerId(event.worker.worker_id), dp_rank: event.worker.dp_rank };
    let change = match event.data {
        ActiveSequenceData::AddRequest(add) => ReplicaChange::Add(state(rank, add)),
        ActiveSequenceData::MarkPrefillCompleted => ReplicaChange::MarkPrefillCompleted,
        ActiveSequenceData::Free => ReplicaChange::Free,
    };
    Ok(ReplicaEvent { router, request: event.request_id.into(), change })
}

/// The wire form of how far a booking has grown.
pub(super) fn growth(request: &str, output_tokens: usize) -> Growth {
    Growth { request_id: request.to_owned(), output_tokens: output_tokens as u64 }
}

/// The meaning of a growth that `router` tells. The error as with [`read`].
pub(super) fn read_growth(growth: Growth, router: RouterId) -> Result<ReplicaEvent, &'static str> {
    if growth.request_id.len() > MAX_NAME {
        return Err("malformed");
    }
    let change = ReplicaChange::Grow(growth.output_tokens.min(MAX_TOKENS) as usize);
    Ok(ReplicaEvent { router, request: growth.request_id.into(), change })
}

fn state(rank: WorkerRank, add: AddRequest) -> BookingState {
    let block_size = add.block_size.and_then(BlockSize::new).unwrap_or(BLOCK_SIZE);
    let blocks: Box<[SequenceHash]> = add.token_sequence.unwrap_or_default().into_iter().map(SequenceHash).collect();
    let hint = add.prefill_load_hint.map(|hint| hint.initial_effective_prefill_tokens);
    // A prompt is never shorter than its full blocks.
    let full = (blocks.len() * block_size.get()) as u64;
    let tokens = add.isl.or(hint).unwrap_or(0).min(MAX_TOKENS).max(full);
    let prefill = if add.track_prefill_tokens { hint.unwrap_or(tokens).min(tokens) } else { 0 };
    BookingState {
        rank,
        prompt: Prompt { blocks: blocks.into(), tokens: tokens as usize, block_size },
        prefill_tokens: prefill as usize,
        expected_output_tokens: add.expected_output_tokens.map(|tokens| tokens as usize),
        output_tokens: add.output_tokens.min(MAX_TOKENS) as usize,
        prefill_completed: add.prefill_completed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: WorkerRank = WorkerRank { worker: WorkerId(42), dp_rank: 1 };
    const ROUTER: RouterId = RouterId(7);

    fn told(change: ReplicaChange) -> ReplicaEvent {
        ReplicaEvent { router: ROUTER, request: "r".into(), change }
    }

    fn booked() -> BookingState {
        let block_size = BlockSize::new(32).expect("not zero");
        BookingState {
            rank: RANK,
            prompt: Prompt { blocks: [SequenceHash(1), SequenceHash(2)].into(), tokens: 70, block_size },
            prefill_tokens: 38,
            expected_output_tokens: Some(100),
            output_tokens: 5,
            prefill_completed: true,
        }
    }

    fn wire(sent: &ReplicaEvent) -> ActiveSequenceEvent {
        event(sent, RANK).expect("no growth")
    }

    #[test]
    fn growth_comes_back_within_bounds() {
        let grown = told(ReplicaChange::Grow(40));
        assert_eq!(read_growth(growth("r", 40), ROUTER), Ok(grown.clone()));
        assert_eq!(event(&grown, RANK), None);
        assert_eq!(read_growth(growth("r", usize::MAX), ROUTER), Ok(told(ReplicaChange::Grow(MAX_TOKENS as usize))));
        assert_eq!(read_growth(growth(&"r".repeat(MAX_NAME + 1), 1), ROUTER), Err("malformed"));
    }

    #[test]
    fn every_event_comes_back_as_it_was() {
        for change in [ReplicaChange::Add(booked()), ReplicaChange::MarkPrefillCompleted, ReplicaChange::Free] {
            let sent = told(change);
            assert_eq!(read(wire(&sent), ROUTER), Ok(sent));
        }
        let ActiveSequenceData::AddRequest(add) = wire(&told(ReplicaChange::Add(booked()))).data else {
            panic!("an addition")
        };
        assert_eq!(add.overlap, 1, "32 of 70 tokens were expected to be reused");
    }

    #[test]
    fn a_sender_that_says_little_or_too_much_is_read_within_bounds() {
        let mut sent = wire(&told(ReplicaChange::Add(booked())));
        let ActiveSequenceData::AddRequest(add) = &mut sent.data else { panic!("an addition") };
        (add.isl, add.block_size, add.prefill_load_hint) = (None, None, None);
        let Ok(ReplicaEvent { change: ReplicaChange::Add(state), .. }) = read(sent.clone(), ROUTER) else {
            panic!("an addition")
        };
        assert_eq!((state.prompt.tokens, state.prefill_tokens), (32, 32), "two blocks of 16");
        let ActiveSequenceData::AddRequest(add) = &mut sent.data else { panic!("an addition") };
        (add.isl, add.output_tokens, add.block_size) = (Some(u64::MAX), u64::MAX, Some(0));
        let Ok(ReplicaEvent { change: ReplicaChange::Add(state), .. }) = read(sent, ROUTER) else {
            panic!("an addition")
        };
        assert_eq!((state.prompt.tokens as u64, state.output_tokens as u64), (MAX_TOKENS, MAX_TOKENS));
    }

    #[test]
    fn events_in_the_name_of_others_are_refused() {
        let sent = wire(&told(ReplicaChange::Free));
        assert_eq!(read(sent.clone(), RouterId(8)), Err("another router"));
        assert_eq!(
            read(ActiveSequenceEvent { request_id: "r".repeat(MAX_NAME + 1), ..sent }, ROUTER),
            Err("malformed")
        );
    }
}
