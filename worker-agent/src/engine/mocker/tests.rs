//! The mocker beside the built-in engine, its times, and its answers.

use std::time::Duration;

use kv_hashing::SequenceHash;
use parking_lot::Mutex;
use proptest::prelude::*;
use protocol::request_plane::{FinishReason, Generate, Stop};

use super::pace::Clock;
use super::timing::{Profile, StepWork};
use super::*;
use crate::engine::builtin::scheduler::{Request, RequestId, Scheduler};
use crate::engine::builtin::shadow::{Shadow, VOCAB, extend, push_row};
use crate::engine::builtin::{BlockId, Chunk, Context, Forward, Logits, NextToken};
use crate::engine::{ArenaEvent, Engine, EngineOutput, SubmitError};

const SIZE: u32 = 4;
/// Token 1 is EOS; the others are letters, and one is no word.
const EOS: u32 = 1;

fn vocabulary() -> Arc<Vocabulary> {
    let text = |id: u8| match id {
        1 => vec![],
        2 => b"\n".to_vec(),
        _ => vec![b' ', b'A' + id % 26],
    };
    Arc::new(Vocabulary { token_bytes: (0..VOCAB as u8).map(text).collect(), eos_token_ids: vec![EOS] })
}

fn config(total_blocks: usize, max_num_seqs: usize, max_num_batched_tokens: usize) -> SchedulerConfig {
    let engine = EngineInfo {
        block_size: BlockSize::new(SIZE).expect("not zero"),
        total_blocks,
        max_num_seqs,
        max_num_batched_tokens,
        context_length: 64,
    };
    SchedulerConfig { engine, max_waiting: 1000 }
}

fn generate(prompt: &[u32], max_tokens: u32) -> Generate {
    let stop = Stop { max_tokens, ..Default::default() };
    Generate { token_ids: prompt.to_vec(), stop: Some(stop), ..Default::default() }
}

/// Chooses what a greedy sampler chooses from the shadow's logits.
#[derive(Debug)]
struct Greedy;

impl NextToken for Greedy {
    fn next(&self, context: Context<'_>, masked: &[u32]) -> u32 {
        assert_eq!(context.tail.len(), context.tokens.len() % SIZE as usize);
        assert_eq!(context.prefix.is_some(), context.tokens.len() >= SIZE as usize);
        let mut row = Vec::new();
        push_row(context.tokens.iter().fold(0, |context, &token| extend(context, token)), &mut row);
        masked.iter().for_each(|&token| row[token as usize] = f32::NEG_INFINITY);
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter().position(|&logit| logit == best).expect("not empty") as u32
    }
}

/// One scheduler with its forward pass.
struct Side {
    scheduler: Scheduler,
    forward: Box<dyn Forward>,
    logits: Vec<f32>,
}

/// What a step shows to the outside.
#[derive(Debug, PartialEq)]
struct Seen {
    chunks: Vec<(Vec<u32>, usize, Vec<BlockId>)>,
    events: Vec<ArenaEvent>,
    outputs: String,
    load: crate::engine::EngineLoad,
}

impl Side {
    fn new(config: SchedulerConfig, forward: Box<dyn Forward>) -> Self {
        let scheduler = match forward.next_token() {
            None => Scheduler::new(config, forward.vocab()),
            Some(next_token) => Scheduler::without_logits(config, forward.vocab(), next_token),
        };
        Self { scheduler: scheduler.expect("valid"), forward, logits: Vec::new() }
    }

    fn enqueue(&mut self, wire: Generate) -> RequestId {
        let request = Request::new(wire, &self.scheduler.limits(vocabulary()), 0).expect("valid");
        self.scheduler.enqueue(request).expect("room")
    }

    fn step(&mut self) -> Seen {
        self.scheduler.plan();
        self.logits.clear();
        let chunks = self.scheduler.chunks();
        let seen = chunks.iter().map(|c| (c.tokens.to_vec(), c.start, c.blocks.to_vec())).collect();
        self.forward.forward(&chunks, &mut self.logits);
        let outputs = format!("{:?}", self.scheduler.apply(&mut self.logits));
        Seen { chunks: seen, events: self.scheduler.take_events(), outputs, load: self.scheduler.load() }
    }
}

/// A mocker whose steps take no time.
fn mocked(next_token: Arc<dyn NextToken>) -> Paced<SystemClock> {
    Paced::new(TimingModel::default(), Pacer::new(SystemClock::default(), 0.0), VOCAB, next_token)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Given the same tokens, mocker and built-in engine plan, cache, evict, preempt and tell the same, step by step.
    #[test]
    fn steps_and_events_are_those_of_the_built_in_engine(
        blocks in 16..40usize, seqs in 1..6usize, extra in 0..20usize,
        arrivals in prop::collection::vec((0..3usize, 1..24u32, 0..3u32, 1..20u32, 0..4i32), 4..40),
    ) {
        let config = config(blocks, seqs, seqs + extra);
        let mut real = Side::new(config.clone(), Box::new(Shadow::new(blocks, SIZE as usize)));
        let mut mocker = Side::new(config, Box::new(mocked(Arc::new(Greedy))));
        for (steps, prompt, family, max_tokens, priority) in arrivals {
            let prompt: Vec<u32> = (0..prompt).map(|position| 2 + (position * 7 + family) % 40).collect();
            let wire = Generate { priority, ..generate(&prompt, max_tokens) };
            prop_assert_eq!(real.enqueue(wire.clone()), mocker.enqueue(wire));
            for _ in 0..steps {
                prop_assert_eq!(real.step(), mocker.step());
            }
        }
        while !real.scheduler.is_idle() {
            prop_assert_eq!(real.step(), mocker.step());
        }
        prop_assert!(mocker.scheduler.is_idle());
        prop_assert!(mocker.logits.is_empty());
    }
}

fn chunk(tokens: &[u32], start: usize) -> Chunk<'_> {
    Chunk { tokens, start, blocks: &[], logits: Logits::Last }
}

#[test]
fn a_step_s_work_is_counted_from_its_chunks() {
    let work = StepWork::of(&[chunk(&[5; 3], 10), chunk(&[5], 99), chunk(&[5; 2], 0), chunk(&[5], 0)]);
    // 11 + 12 + 13 and 1 + 2 pairs; the decoding ones read 100 tokens and 1.
    assert_eq!(work, StepWork { prefill_tokens: 5, attention_pairs: 39, decode_sequences: 2, kv_tokens: 101 });
}

#[test]
fn a_step_s_time_is_the_sum_of_its_terms() {
    let model = TimingModel {
        base_ns: 1e6,
        prefill_token_ns: 1e3,
        attention_pair_ns: 2.0,
        decode_sequence_ns: 500.0,
        kv_token_ns: 10.0,
    };
    let work = StepWork { prefill_tokens: 7, attention_pairs: 100, decode_sequences: 3, kv_tokens: 40 };
    assert_eq!(model.step(work), Duration::from_nanos(1_000_000 + 7_000 + 200 + 1_500 + 400));
    assert_eq!(model.step(StepWork::default()), Duration::from_millis(1));
}

#[test]
fn the_profiles_have_the_times_of_their_models() {
    let prefill = |profile: Profile, tokens: u64| {
        let attention_pairs = tokens * (tokens + 1) / 2;
        profile.timing().step(StepWork { prefill_tokens: tokens, attention_pairs, ..Default::default() })
    };
    let decode = |profile: Profile, sequences: u64, context: u64| {
        let kv_tokens = sequences * context;
        profile.timing().step(StepWork { decode_sequences: sequences, kv_tokens, ..Default::default() })
    };
    let (small, large) = (Profile::Llama3_8b, Profile::Llama3_70b);
    for (what, time, from_ms, to_ms) in [
        ("8B, a prompt of 2048 tokens", prefill(small, 2048), 66, 67),
        ("8B, a prompt of 32768 tokens", prefill(small, 32768), 1490, 1510),
        ("8B, decoding 1 sequence", decode(small, 1, 1000), 6, 7),
        ("8B, decoding 64 sequences", decode(small, 64, 4000), 22, 24),
        ("70B, a prompt of 2048 tokens", prefill(large, 2048), 79, 81),
        ("70B, decoding 64 sequences", decode(large, 64, 4000), 13, 15),
    ] {
        assert!((from_ms..to_ms).contains(&time.as_millis()), "{what} takes {time:?}");
    }
}

/// A clock that moves only when somebody waits for it, who then wakes `late`, or when the test says so.
#[derive(Clone, Default)]
struct TestClock {
    now: Arc<Mutex<Duration>>,
    late: Duration,
}

impl TestClock {
    fn advance(&self, time: Duration) {
        *self.now.lock() += time;
    }
}

impl Clock for TestClock {
    fn now(&self) -> Duration {
        *self.now.lock()
    }

    fn sleep_until(&self, time: Duration) {
        let mut now = self.now.lock();
        if time > *now {
            *now = time + self.late;
        }
    }
}

const MS: Duration = Duration::from_millis(1);

#[test]
fn late_timers_and_the_scheduler_s_own_time_do_not_add_up() {
    let clock = TestClock { late: MS / 10, ..Default::default() };
    let mut pacer = Pacer::new(clock.clone(), 10.0);
    for _ in 0..100 {
        clock.advance(MS / 5);
        pacer.step(10 * MS);
    }
    assert_eq!(clock.now(), 100 * MS + MS / 10);
}

#[test]
fn a_step_after_idle_time_begins_when_it_is_asked_for() {
    let clock = TestClock::default();
    let mut pacer = Pacer::new(clock.clone(), 1.0);
    pacer.step(10 * MS);
    clock.advance(500 * MS);
    pacer.resume();
    pacer.step(10 * MS);
    assert_eq!(clock.now(), 520 * MS);
}

#[test]
fn lost_time_stays_lost() {
    let clock = TestClock::default();
    let mut pacer = Pacer::new(clock.clone(), 1.0);
    pacer.step(10 * MS);
    clock.advance(500 * MS);
    (0..3).for_each(|_| pacer.step(10 * MS));
    assert_eq!(clock.now(), 530 * MS, "the first of the three was over before it began, the others were not");
}

#[test]
fn without_a_speed_there_is_no_waiting() {
    let clock = TestClock::default();
    Pacer::new(clock.clone(), 0.0).step(1000 * MS);
    assert_eq!(clock.now(), Duration::ZERO);
}

#[test]
fn a_request_takes_the_time_of_its_steps() {
    let clock = TestClock::default();
    let timing = TimingModel {
        base_ns: 1e6,
        prefill_token_ns: 1e5,
        attention_pair_ns: 1e3,
        decode_sequence_ns: 2e5,
        kv_token_ns: 1e4,
    };
    let forward = Paced::new(timing, Pacer::new(clock.clone(), 2.0), VOCAB, Arc::new(Greedy));
    let mut side = Side::new(config(40, 4, 8), Box::new(forward));
    let mut wire = generate(&[5; 12], 3);
    wire.stop.as_mut().expect("set").ignore_eos = true;
    side.enqueue(wire);
    let mut times = Vec::new();
    while !side.scheduler.is_idle() {
        let before = clock.now();
        side.step();
        times.push((clock.now() - before).as_micros());
    }
    // Eight tokens with 36 pairs, four with 42; then two tokens that read 13 and 14. All at twice the speed.
    assert_eq!(times, [(1000 + 800 + 36) / 2, (1000 + 400 + 42) / 2, (1000 + 200 + 130) / 2, (1000 + 200 + 140) / 2]);
}

fn options(answer_tokens: Option<f64>) -> MockerOptions {
    MockerOptions { timing: TimingModel::default(), speedup_ratio: 0.0, context_length: 64, answer_tokens }
}

/// A mocker of four sequences and steps of 16 tokens.
fn started(blocks: usize, answer_tokens: Option<f64>) -> BuiltIn {
    let text = Arc::new(PlainText::new(&vocabulary(), answer_tokens));
    start(config(blocks, 4, 16), vocabulary(), text, options(answer_tokens), &TierOptions::default()).expect("starts")
}

/// Tokens and reason of the answer.
async fn answer(engine: &BuiltIn, wire: Generate) -> (Vec<u32>, FinishReason) {
    let mut outputs = engine.submit(wire).expect("room");
    let mut tokens = Vec::new();
    loop {
        match tokio::time::timeout(Duration::from_secs(60), outputs.recv()).await.expect("in time") {
            Some(EngineOutput::First { token, .. } | EngineOutput::Token { token, .. }) => tokens.push(token),
            Some(EngineOutput::Finished(finish)) => return (tokens, finish.reason),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn answers_are_words_and_depend_on_the_sequence_alone() {
    let (a, b) = (started(40, None), started(40, None));
    let prompt = [5, 6, 7, 8, 9];
    let (tokens, reason) = answer(&a, generate(&prompt, 20)).await;
    assert_eq!((tokens.len(), reason), (20, FinishReason::Length), "no end by itself");
    assert!(!tokens.contains(&EOS) && !tokens.contains(&2), "{tokens:?}");
    let other = answer(&a, generate(&[5, 6, 7, 8, 10], 20)).await.0;
    assert_ne!(tokens, other);
    // Elsewhere, from the middle of the answer, and beside other requests.
    let resumed: Vec<u32> = prompt.iter().chain(&tokens[..9]).copied().collect();
    let (rest, _) = tokio::join!(answer(&b, generate(&resumed, 11)), answer(&b, generate(&[9; 30], 20)));
    assert_eq!(rest.0, tokens[9..]);
}

#[tokio::test]
async fn answers_end_by_themselves_when_asked_to() {
    let engine = started(400, Some(5.0));
    let mut generated = 0;
    for prompt in 0..200u32 {
        let (tokens, _) = answer(&engine, generate(&[3 + prompt % 40, 3 + prompt / 40], 60)).await;
        generated += tokens.len() + 1;
    }
    assert!((700..1300).contains(&generated), "{generated} tokens of 200 answers of 5");
    let mut wire = generate(&[3, 4], 60);
    wire.stop.as_mut().expect("set").min_tokens = 40;
    assert!(answer(&engine, wire).await.0.len() >= 40);
}

#[test]
fn words_that_are_masked_are_not_chosen() {
    let text = PlainText::new(&vocabulary(), None);
    let context = |tail: &'static [u32]| Context { tokens: tail, prefix: Some(SequenceHash(7)), tail };
    let first = text.next(context(&[3, 4]), &[]);
    let second = text.next(context(&[3, 4]), &[first]);
    assert_ne!(first, second);
    assert_eq!(text.next(context(&[3, 4]), &[]), first);
    // A vocabulary without words, and one with nothing at all.
    let signs = Vocabulary { token_bytes: [&b""[..], b"\n"].iter().collect(), eos_token_ids: vec![0] };
    assert_eq!(PlainText::new(&signs, None).next(context(&[]), &[]), 1);
    assert_eq!(PlainText::new(&Vocabulary::default(), None).next(context(&[]), &[]), 0);
}

#[test]
fn what_a_mocker_cannot_give_is_refused() {
    let engine = started(40, None);
    for wire in
        [Generate { logprobs: Some(1), ..generate(&[3], 1) }, Generate { prompt_logprobs: true, ..generate(&[3], 1) }]
    {
        assert!(matches!(engine.submit(wire), Err(SubmitError::Invalid(m)) if m.contains("log-probabilities")));
    }
    assert!(matches!(engine.submit(generate(&[VOCAB as u32], 1)), Err(SubmitError::Invalid(_))));
}

#[test]
fn sizes_are_checked_and_the_arena_bounds_the_context() {
    let options = MockerOptions { context_length: 131_072, ..options(None) };
    let model = MockedModel::read(&integration_tests::model::path(), options).expect("the default model");
    let sizes = OpenOptions { total_blocks: 100, ..OpenOptions::default() };
    let engine = model.start(sizes.clone()).expect("starts");
    assert_eq!(engine.info().context_length, 1600);
    assert!(matches!(engine.submit(generate(&[49152], 1)), Err(SubmitError::Invalid(_))));
    assert!(model.start(OpenOptions { max_num_batched_tokens: 1, ..sizes }).is_err());
}

#[test]
fn an_answer_begun_elsewhere_goes_on_word_for_word() {
    let started = || {
        let words = Arc::new(PlainText::new(&vocabulary(), Some(12.0)));
        Side::new(config(64, 2, 16), Box::new(mocked(words)))
    };
    let answer = |wire: Generate| {
        let mut side = started();
        side.enqueue(wire);
        let mut outputs = Vec::new();
        while !side.scheduler.is_idle() {
            side.scheduler.plan();
            let chunks = side.scheduler.chunks();
            side.forward.forward(&chunks, &mut side.logits);
            outputs.extend(side.scheduler.apply(&mut side.logits).into_iter().map(|(_, output)| output));
        }
        let tokens = outputs.iter().filter_map(|output| match output {
            EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } => Some(*token),
            _ => None,
        });
        let Some(EngineOutput::Finished(finish)) = outputs.last() else { panic!("{outputs:?}") };
        (tokens.collect::<Vec<u32>>(), (finish.reason, finish.prompt_tokens, finish.completion_tokens))
    };
    for prompt in 2..10 {
        let wire = generate(&[prompt, 7, 8, 9, 10], 30);
        let (whole, end) = answer(wire.clone());
        for cut in 0..whole.len() {
            let token_ids = [&wire.token_ids[..], &whole[..cut]].concat();
            let continued = Generate { token_ids, generated: cut as u32, ..wire.clone() };
            assert_eq!(answer(continued), (whole[cut..].to_vec(), end), "prompt {prompt}, cut at {cut}");
        }
    }
}
