//! The exact bytes, and what is read of other writers.

use super::*;

const WORKER: WorkerWithDpRank = WorkerWithDpRank { worker_id: 42, dp_rank: 1 };

fn event(data: ActiveSequenceData) -> ActiveSequenceEvent {
    ActiveSequenceEvent { request_id: "r".into(), worker: WORKER, data, router_id: 7, lora_name: None }
}

fn added() -> AddRequest {
    AddRequest {
        token_sequence: Some(vec![1, u64::MAX]),
        isl: Some(40),
        overlap: 1,
        track_prefill_tokens: true,
        expected_output_tokens: None,
        prefill_load_hint: Some(PrefillLoadHint {
            initial_effective_prefill_tokens: 24,
            expected_prefill_duration: None,
        }),
        block_size: Some(16),
        output_tokens: 3,
        prefill_completed: false,
    }
}

/// msgpack, written by hand: `fixmap`, `fixarray` and `fixstr` of this length or with this text.
fn map(len: u8) -> Vec<u8> {
    vec![0x80 | len]
}

fn text(text: &str) -> Vec<u8> {
    match text.len() {
        len @ 0..32 => [&[0xa0 | len as u8], text.as_bytes()].concat(),
        len => [&[0xd9, len as u8], text.as_bytes()].concat(),
    }
}

const NIL: u8 = 0xc0;
const FALSE: u8 = 0xc2;
const TRUE: u8 = 0xc3;

fn golden(data: Vec<u8>) -> Vec<u8> {
    [
        [map(1), text("events"), vec![0x91]].concat(),
        [map(5), text("request_id"), text("r")].concat(),
        [text("worker"), map(2), text("worker_id"), vec![42], text("dp_rank"), vec![1]].concat(),
        [text("data"), data].concat(),
        [text("router_id"), vec![7], text("lora_name"), vec![NIL]].concat(),
    ]
    .concat()
}

#[test]
fn the_bytes_of_each_event_are_fixed() {
    let sequence = [vec![0x92, 1, 0xcf], vec![0xff; 8]].concat();
    let hint =
        [map(2), text("initial_effective_prefill_tokens"), vec![24], text("expected_prefill_duration"), vec![NIL]]
            .concat();
    let fields = [
        [text("token_sequence"), sequence].concat(),
        [text("isl"), vec![40]].concat(),
        [text("overlap"), vec![1]].concat(),
        [text("track_prefill_tokens"), vec![TRUE]].concat(),
        [text("expected_output_tokens"), vec![NIL]].concat(),
        [text("prefill_load_hint"), hint].concat(),
        [text("block_size"), vec![16]].concat(),
        [text("output_tokens"), vec![3]].concat(),
        [text("prefill_completed"), vec![FALSE]].concat(),
    ];
    let add = [map(1), text("AddRequest"), map(fields.len() as u8), fields.concat()].concat();
    for (data, expected) in [
        (ActiveSequenceData::AddRequest(added()), add),
        (ActiveSequenceData::MarkPrefillCompleted, text("MarkPrefillCompleted")),
        (ActiveSequenceData::Free, text("Free")),
    ] {
        let batch = ActiveSequenceBatch { events: vec![event(data)] };
        let bytes = encode(&batch);
        assert_eq!(bytes, golden(expected), "{batch:?}");
        assert_eq!(decode::<ActiveSequenceBatch>(&bytes).expect("own output"), batch);
    }
}

#[test]
fn the_peers_own_addition_is_read() {
    let json = r#"{"events":[{"request_id":"r","worker":{"worker_id":42,"dp_rank":1},"router_id":7,"lora_name":null,"data":
        {"AddRequest":{"token_sequence":[1,2],"track_prefill_tokens":true,"expected_output_tokens":5,"prefill_load_hint":
        {"initial_effective_prefill_tokens":30,"expected_prefill_duration":{"secs":1,"nanos":5}}}}}]}"#;
    let value: serde_json::Value = serde_json::from_str(json).expect("JSON");
    let batch: ActiveSequenceBatch = decode(&encode(&value)).expect("the peer's own form");
    let ActiveSequenceData::AddRequest(add) = &batch.events[0].data else { panic!("{batch:?}") };
    assert_eq!((add.token_sequence.as_deref(), add.expected_output_tokens), (Some(&[1, 2][..]), Some(5)));
    assert_eq!(add.prefill_load_hint.map(|hint| hint.initial_effective_prefill_tokens), Some(30));
    assert_eq!((add.isl, add.block_size, add.output_tokens, add.prefill_completed), (None, None, 0, false));
}

#[test]
fn growth_status_and_snapshot_survive_the_wire() {
    let growth = GrowthBatch { requests: vec![Growth { request_id: "r".into(), output_tokens: 1 << 40 }] };
    assert_eq!(decode::<GrowthBatch>(&encode(&growth)).expect("own output"), growth);
    let status = RouterStatus { next_sequence: 9, wants: vec![SnapshotRequest { router_id: 7, nonce: 1 }] };
    assert_eq!(decode::<RouterStatus>(&encode(&status)).expect("own output"), status);
    let events = vec![event(ActiveSequenceData::AddRequest(added()))];
    let snapshot = Snapshot { nonce: 1, part: 2, last: true, next_sequence: 9, events };
    assert_eq!(decode::<Snapshot>(&encode(&snapshot)).expect("own output"), snapshot);
}

#[test]
fn cut_payloads_are_errors_and_topics_do_not_begin_each_other() {
    let bytes = encode(&ActiveSequenceBatch { events: vec![event(ActiveSequenceData::Free)] });
    for end in 0..bytes.len() {
        assert!(decode::<ActiveSequenceBatch>(&bytes[..end]).is_err(), "{end} bytes");
    }
    let fixed = [ACTIVE_SEQUENCES, GROWTH, ROUTER_STATUS].map(str::to_owned);
    let topics = [&fixed[..], &[snapshot_topic(1), snapshot_topic(16)]].concat();
    for (at, topic) in topics.iter().enumerate() {
        assert!(topics.iter().enumerate().all(|(other, t)| other == at || !t.starts_with(topic.as_str())));
    }
}
