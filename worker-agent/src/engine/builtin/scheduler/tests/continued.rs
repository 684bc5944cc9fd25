//! Answers that were begun elsewhere: whatever the cut, what follows is what would have followed.

use super::*;

/// Tokens with their log-probabilities, and the end. Blocks reused differ, and so does `reused_tokens`, which is set to 0.
fn said(run: &Run, id: RequestId) -> (Vec<String>, Finish) {
    let outputs = run.outputs[&id].iter().filter_map(|output| match output {
        EngineOutput::First { token, logprobs, .. } | EngineOutput::Token { token, logprobs } => {
            Some(format!("{token} {logprobs:?}"))
        }
        _ => None,
    });
    (outputs.collect(), Finish { reused_tokens: 0, ..run.finished(id) })
}

/// The request as another worker gets it after the first `cut` tokens of `answer`.
fn cut_at(wire: &Generate, answer: &[u32], cut: usize) -> Generate {
    let token_ids = [&wire.token_ids[..], &answer[..cut]].concat();
    Generate { token_ids, generated: cut as u32, ..wire.clone() }
}

fn checked(wire: Generate, run: &Run) -> Result<Request, SubmitError> {
    Request::new(wire, &run.scheduler.limits(vocabulary()), 0)
}

/// Checks every cut of one request, on an engine that knows nothing and on one that has computed it before.
fn assert_every_cut_continues(wire: &Generate, config: &SchedulerConfig) {
    let mut warm = Run::new(config.clone());
    let whole = warm.run_alone(wire.clone());
    let (answer, said_whole) = (warm.answer(whole).0, said(&warm, whole));
    for cut in 0..=answer.len() {
        let continued = cut_at(wire, &answer, cut);
        if cut == wire.stop.as_ref().expect("set").max_tokens as usize {
            assert!(checked(continued, &warm).is_err(), "nothing is left to generate");
            continue;
        }
        if let Some(finish) = checked(continued.clone(), &warm).expect("valid").finished() {
            assert_eq!((cut, &finish), (answer.len(), &said_whole.1), "only the whole answer has ended");
            continue;
        }
        let mut cold = Run::new(config.clone());
        for run in [&mut cold, &mut warm] {
            let id = run.run_alone(continued.clone());
            let (tokens, finish) = said(run, id);
            assert_eq!(tokens, said_whole.0[cut..], "cut at {cut} of {wire:?}");
            assert_eq!(finish, said_whole.1, "cut at {cut} of {wire:?}");
        }
    }
}

/// A stop string of the two tokens at position `at` of the answer, if it has so many.
fn stop_string(wire: &Generate, config: &SchedulerConfig, at: usize) -> Vec<String> {
    let mut run = Run::new(config.clone());
    let id = run.run_alone(wire.clone());
    let answer = run.answer(id).0;
    let vocabulary = vocabulary();
    let pair = answer.get(at..at + 2).unwrap_or_default().iter();
    let text: Vec<u8> = pair.flat_map(|&token| vocabulary.token_bytes.get(token).iter().copied()).collect();
    vec![String::from_utf8(text).expect("letters")]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_cut_gives_exactly_the_rest(
        prompt in prop::collection::vec(2..VOCAB as u32, 1..14),
        max_tokens in 1..24u32,
        min_tokens in 0..12u32,
        seed in prop::option::of(any::<u64>()),
        penalties in (0.0..1.5f32, -1.0..1.5f32, 0.5..2.0f32),
        (ignore_eos, stop_at, stop_token) in (any::<bool>(), 0..20usize, prop::option::of(2..VOCAB as u32)),
        logprobs in prop::option::of(0..3u32),
        budget in 4..12usize,
    ) {
        let config = config(40, 2, budget);
        let (presence_penalty, frequency_penalty, repetition_penalty) = penalties;
        let temperature = if seed.is_some() { 1.0 } else { 0.0 };
        let sampling =
            Sampling { temperature, seed, presence_penalty, frequency_penalty, repetition_penalty, ..Default::default() };
        let token_ids = stop_token.into_iter().collect();
        let stop = Stop { max_tokens, min_tokens, ignore_eos, token_ids, ..Default::default() };
        let mut wire = Generate { sampling: Some(sampling), stop: Some(stop), logprobs, ..generate(&prompt, max_tokens) };
        assert_every_cut_continues(&wire, &config);
        wire.stop.as_mut().expect("set").strings = stop_string(&wire, &config, stop_at);
        assert_every_cut_continues(&wire, &config);
    }
}

#[test]
fn what_was_begun_elsewhere_is_reused_like_a_prompt_and_counted_as_output() {
    let mut run = Run::new(config(40, 2, 16));
    let wire = ranked(0, &[2, 3, 4, 5, 6, 7], 12);
    let first = run.run_alone(wire.clone());
    let continued = cut_at(&wire, &run.answer(first).0, 9);
    let id = run.run_alone(continued);
    match &run.outputs[&id][0] {
        EngineOutput::First { reused_blocks, prompt_blocks, .. } => {
            assert_eq!((*reused_blocks, *prompt_blocks), (3, 3));
        }
        other => panic!("{other:?}"),
    }
    let finish = run.finished(id);
    assert_eq!((finish.prompt_tokens, finish.completion_tokens, finish.reused_tokens), (6, 12, 6));
}

#[test]
fn prompt_logprobs_are_not_told_twice() {
    let mut run = Run::new(config(40, 2, 16));
    let wire = Generate { prompt_logprobs: true, logprobs: Some(1), ..ranked(0, &[2, 3, 4, 5, 6], 6) };
    let first = run.run_alone(wire.clone());
    let id = run.run_alone(cut_at(&wire, &run.answer(first).0, 2));
    assert!(matches!(&run.outputs[&id][0], EngineOutput::First { prompt_logprobs, .. } if prompt_logprobs.is_empty()));
    assert_eq!(said(&run, id).0, said(&run, first).0[2..]);
}

#[test]
fn a_beginning_that_leaves_nothing_is_refused() {
    let run = Run::new(config(40, 2, 16));
    let refused = |wire: Generate| match checked(wire, &run) {
        Err(SubmitError::Invalid(message)) => message,
        other => panic!("{other:?}"),
    };
    let begun = |generated, max_tokens| Generate { generated, ..generate(&[2, 3, 4], max_tokens) };
    assert_eq!(refused(begun(4, 9)), "token_ids holds 3 tokens, of which 4 are generated: there is no prompt");
    assert!(refused(begun(3, 9)).contains("there is no prompt"));
    assert_eq!(refused(begun(2, 2)), "generated is 2, which stop.max_tokens of 2 does not exceed");
    assert!(checked(begun(2, 3), &run).is_ok());
}
